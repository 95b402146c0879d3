"""The four roles, from outside: what each login may, what it may not, and that nothing can be forged.

The migrator is no superuser, and every statement runs on a connection that logged in as who it is about.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import rota.db
from factories import NODE, make_dead_letter, make_job, make_running_job, state_of
from role_logins import ROLES, RoleDatabase, module_role_database, role_database
from rota.db import operations, queries, schedule_reports
from rota.db.migrate import migrate, roles_script
from rota.db.queries import ANY_TIME
from rota.db.sql import SQL
from rota.domain.job import NodeId
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from asyncpg import Connection, Record

    from servers import Server

PUBLIC_COLUMNS = {
    "handler",
    "payload",
    "queue",
    "priority",
    "run_at",
    "max_attempts",
    "backoff_base",
    "backoff_cap",
    "retry_for",
    "timeout",
    "lease",
    "delivery",
    "limit_key",
    "start_by",
    "unique_key",
    "idempotency_key",
    "meta",
}
CLIENTS_CALL = {
    "enqueue",
    "put_job",
    "replace_job",
    "cancel",
    "put_schedule",
    "remove_schedule",
    "ran",
    "jitter_offset",
}
CHECKS_CALL = {"is_duration", "is_name", "is_cron", "cron_value", "caller", "current_server"}
OPERATORS_CALL = {
    "cancel_many",
    "reschedule",
    "retry_now",
    "redrive",
    "redrive_many",
    "discard",
    "discard_many",
    "pause_queue",
    "resume_queue",
    "pause_handler",
    "resume_handler",
    "forget_node",
    "set_limit",
    "remove_limit",
    "hold_limit",
    "limit_of",
    "starts_left",
    "permits_left",
    "pause_schedule",
    "pause_schedules",
    "resume_schedule",
    "resume_schedules",
    "run_schedule_now",
    "backfill_schedule",
}
DAEMONS_CALL = {
    "bounded_duration",
    "complete",
    "guard",
    "rotate_ledger",
    "prune_audit",
    "note_housekeeping",
    "raise_fence_tokens",
    "request_cancellations",
    "tell",
    "claim_limited_jobs",
    "limit_of",
    "starts_left",
    "permits_left",
    "hold_limit",
    "extend_hold",
}

DENIED = asyncpg.InsufficientPrivilegeError


@pytest.fixture(scope="module")
def place(server: Server) -> Iterator[RoleDatabase]:
    """The schema with its roles."""
    with module_role_database(server, "roles") as made:
        yield made


@pytest.fixture
async def root(place: RoleDatabase) -> AsyncIterator[Connection[Record]]:
    """The superuser, who only looks and tidies up."""
    async with place.connect() as connection:
        yield connection
        await connection.execute(
            "truncate rota.jobs, rota.dead_letters, rota.job_runs, rota.handlers, rota.queues, rota.audit, rota.cancel_requests"
        )


@pytest.fixture
async def app(place: RoleDatabase, root: Connection[Record]) -> AsyncIterator[Connection[Record]]:
    """A client."""
    del root
    async with place.connect("app") as connection:
        yield connection


@pytest.fixture
async def op(place: RoleDatabase, root: Connection[Record]) -> AsyncIterator[Connection[Record]]:
    """An operator."""
    del root
    async with place.connect("op") as connection:
        yield connection


@pytest.fixture
async def node(place: RoleDatabase, root: Connection[Record]) -> AsyncIterator[Connection[Record]]:
    """A daemon's login."""
    del root
    async with place.connect("node") as connection:
        yield connection


async def denied(conn: Connection[Record], statement: str, *arguments: Any) -> None:
    """Assert that the server lets this login not do it."""
    with pytest.raises(DENIED):
        await conn.execute(statement, *arguments)


# ------------------------------------------------------------------------------------------------------------ a client


async def test_a_client_inserts_with_each_public_column_and_is_told_the_number(app: Connection[Record]) -> None:
    """Plain INSERT is the interface: RETURNING and ON CONFLICT need SELECT, CHECKs and triggers need their functions."""
    given = {
        "handler": "'h'",
        "payload": "'{}'",
        "queue": "'q'",
        "priority": "1",
        "run_at": "now()",
        "max_attempts": "3",
        "backoff_base": "interval '1 s'",
        "backoff_cap": "interval '1 min'",
        "retry_for": "interval '1 day'",
        "timeout": "interval '1 min'",
        "lease": "interval '1 min'",
        "delivery": "'at_least_once'",
        "start_by": "now() + interval '1 h'",
        "unique_key": "'k'",
        "idempotency_key": "'i'",
        "meta": "'{}'",
        "limit_key": "'tenant:42'",
    }
    assert given.keys() == PUBLIC_COLUMNS
    columns, values = ", ".join(given), ", ".join(given.values())
    insert = f"insert into rota.jobs ({columns}) values ({values})"
    assert await app.fetchval(f"{insert} returning job_id") is not None
    assert await app.fetchval(f"{insert} on conflict do nothing returning job_id") is None
    named = "on conflict (handler, unique_key) where unique_key is not null do nothing"
    assert await app.fetchval(f"{insert} {named} returning job_id") is None
    assert (
        await app.fetchval(f"select count(*) from (select job_id, state, scheduled_for, {columns} from rota.jobs) as j")
        == 1
    )
    for column in PUBLIC_COLUMNS - {"handler"}:
        assert await app.fetchval(f"insert into rota.jobs (handler, {column}) values ('h', null) returning job_id")


async def test_the_row_trigger_reads_the_handlers_queue_for_a_client(
    app: Connection[Record], root: Connection[Record]
) -> None:
    """It runs as whoever inserts, so that a client has to be able to read the two columns that it looks at; no others."""
    await root.execute("insert into rota.handlers (handler, queue) values ('h', 'mail')")
    assert await app.fetchval("insert into rota.jobs (handler) values ('h') returning queue") == "mail"
    await denied(app, "select app from rota.handlers")


HOSTILE = """
create schema mine;
grant usage on schema mine to public;
create function mine.current_setting(text, boolean) returns text language sql as $$ select 'somebody else' $$;
create function mine.now() returns timestamptz language sql as $$ select timestamptz '2001-01-01 00:00+00' $$;
create function mine.clock_timestamp() returns timestamptz language sql as $$ select timestamptz '2001-01-01 00:00+00' $$;
create function mine.yes(interval, interval) returns boolean language sql immutable as $$ select true $$;
create function mine.yes(numeric, integer) returns boolean language sql immutable as $$ select true $$;
create function mine.yes(text, text) returns boolean language sql immutable as $$ select true $$;
create operator mine.> (leftarg = interval, rightarg = interval, function = mine.yes);
create operator mine.<= (leftarg = interval, rightarg = interval, function = mine.yes);
create operator mine.= (leftarg = numeric, rightarg = integer, function = mine.yes);
create operator mine.= (leftarg = text, rightarg = text, function = mine.yes);
"""


async def test_what_a_client_puts_first_in_its_search_path_decides_nothing(
    app: Connection[Record], root: Connection[Record]
) -> None:
    """CHECKs and row triggers run with the session's own settings: its operators and functions must not answer for ours."""
    await root.execute(HOSTILE)
    try:
        await app.execute("set search_path = mine, pg_catalog")
        for duration in ("178000000 years", "-1 second", "1 month", "400 days"):
            with pytest.raises(asyncpg.CheckViolationError):
                await app.execute(f"insert into rota.jobs (handler, timeout) values ('h', '{duration}')")
        with pytest.raises(asyncpg.CheckViolationError):
            await app.execute("insert into rota.schedules (name, handler, every) values ('s', 'h', '-5 hours')")
        await app.execute("insert into rota.jobs (handler) values ('h')")
        await app.execute("insert into rota.schedules (name, handler, cron) values ('s', 'h', '*/5 9 * * mon-fri')")
        login = await app.fetchval("select session_user")
        job = await root.fetchrow("select created_by, run_at > now() - interval '1 min' as is_now from rota.jobs")
        assert job is not None
        assert tuple(job) == (login, True)
        made = await root.fetchrow(
            "select created_by, created_at > now() - interval '1 min' as is_now from rota.schedule_definitions"
        )
        assert made is not None
        assert tuple(made) == (login, True)
    finally:
        await root.execute("drop schema mine cascade; delete from rota.schedules")


async def test_strings_with_backslashes_of_old_change_no_pattern(
    app: Connection[Record], root: Connection[Record]
) -> None:
    """standard_conforming_strings is any session's to turn off, and some drivers of old do."""
    for conn in (app, root):
        await conn.execute("set standard_conforming_strings = off")
    await app.execute("insert into rota.schedules (name, handler, cron) values ('s', 'h', '*/5 9 * * mon-fri')")
    await root.execute("delete from rota.schedules")
    with pytest.raises(asyncpg.CheckViolationError):
        await app.execute("insert into rota.schedules (name, handler, cron) values ('s', 'h', '*/5 9 * * mon-fry')")
    await root.execute(
        "create table rota.job_runs_20200101 partition of rota.job_runs for values from ('2020-01-01') to ('2020-01-02')"
    )
    assert await root.fetchval("select dropped from rota.rotate_ledger(interval '7 days')") == 1


async def test_no_daemons_column_can_be_written_or_read_by_a_client(
    app: Connection[Record], root: Connection[Record]
) -> None:
    """Nobody forges a state, a token, a fire's identity or created_by: also not in a column that is yet to come."""
    columns = await root.fetch(
        "select attname, atttypid::regtype::text as type from pg_attribute "
        "where attrelid = 'rota.jobs'::regclass and attnum > 0 and not attisdropped"
    )
    assert {row["attname"] for row in columns} > PUBLIC_COLUMNS
    for name, kind in columns:
        await denied(app, f"update rota.jobs set {name} = default")
        if name in PUBLIC_COLUMNS:
            continue
        insert = f"insert into rota.jobs (handler, {name}) overriding system value values ('h', null::{kind})"
        await denied(app, insert)
        await denied(app, insert + " on conflict do nothing")
        if name not in {"job_id", "state", "scheduled_for"}:
            await denied(app, f"select {name} from rota.jobs")
            await denied(app, f"insert into rota.jobs (handler) values ('h') returning {name}")
    await denied(app, "insert into rota.jobs (handler, unique_key) values ('h', 'k') on conflict (handler, unique_key) "
                      "where unique_key is not null do update set payload = excluded.payload")  # fmt: skip


async def test_created_by_is_who_logged_in(
    app: Connection[Record], root: Connection[Record], place: RoleDatabase
) -> None:
    """It decides who may cancel. A role that the login may take on is a name of its own; another's can't be taken."""
    job_id = await app.fetchval("select job_id from rota.enqueue('h')")
    await app.execute(f"set role {place.prefix}_client")
    shared = await app.fetchval("insert into rota.jobs (handler) values ('h') returning job_id")
    await app.execute("reset role")
    made = await root.fetch("select job_id, created_by from rota.jobs")
    assert {row["job_id"]: row["created_by"] for row in made} == {
        job_id: f"{place.prefix}_app",
        shared: f"{place.prefix}_client",
    }
    for role in ("other", "op", "owner", "daemon", "operator", "mig"):
        await denied(app, f"set role {place.prefix}_{role}")
        await denied(app, f"set session authorization {place.prefix}_{role}")
        await denied(app, "select set_config('role', $1, false)", f"{place.prefix}_{role}")


async def test_a_client_cancels_its_own_jobs_and_nobody_elses(
    app: Connection[Record], root: Connection[Record], place: RoleDatabase
) -> None:
    """Two services share a database: neither may stop the other's work, by cancel or by replacing what has its key."""
    mine = await app.fetchval("select job_id from rota.enqueue('h', unique_key => 'mine')")
    async with place.connect("other") as other:
        with pytest.raises(DENIED, match="not yours") as refused:
            await other.fetchval("select rota.cancel($1)", mine)
        assert "operator" in str(refused.value.hint)
        with pytest.raises(DENIED, match="not yours"):
            await other.fetchval("select rota.cancel($1, force => true)", mine)
        with pytest.raises(DENIED, match="not yours"):
            await other.fetchrow(
                "select * from rota.enqueue('h', '{}', unique_key => 'mine', on_conflict => 'replace')"
            )
        kept = await other.fetch("select * from rota.enqueue('h', '{\"n\": 2}', unique_key => 'mine')")
        assert [tuple(row) for row in kept] == [(mine, False)]
    replaced = await app.fetch(
        "select * from rota.enqueue('h', '{\"n\": 3}', unique_key => 'mine', on_conflict => 'replace')"
    )
    assert [tuple(row) for row in replaced] == [(mine, False)]
    assert await root.fetchval("select payload->>'n' from rota.jobs") == "3"
    assert await app.fetchval("select rota.cancel($1)", mine) == "cancelled"
    assert await state_of(root, mine) == "cancelled"
    assert await root.fetchval("select count(*) from rota.audit") == 0  # a client's own affairs are no operation


async def test_the_identity_of_a_fire_cannot_be_rewritten_by_its_schedules_maker(
    app: Connection[Record], root: Connection[Record], place: RoleDatabase
) -> None:
    """The scheduler's jobs are created_by who made the schedule, who may cancel them; their instant is the fire's."""
    fire = await make_job(root, schedule_id=7, created_by=f"{place.prefix}_app")
    before = await root.fetchval("select scheduled_for from rota.jobs")
    arguments = "$1, null, null, now() + interval '1 day'" + ", null" * 11 + ", false"
    assert await app.fetchval(f"select rota.replace_job({arguments})", fire.job_id) == "gone"
    assert await root.fetchval("select scheduled_for from rota.jobs") == before
    assert await app.fetchval("select rota.cancel($1)", fire.job_id) == "cancelled"


async def test_a_client_sees_where_jobs_stand_and_not_what_broke_them(
    app: Connection[Record], root: Connection[Record]
) -> None:
    """The view is for everybody; dead letters, error texts, the audit, nodes and guards are not."""
    await make_dead_letter(root)
    assert await app.fetchval("select state from rota.job_status") == "dead"
    assert await app.fetchval("select count(*) from rota.meta") == 1
    for table in (
        "dead_letters",
        "job_runs",
        "attempts",
        "audit",
        "nodes",
        "queues",
        "guards",
        "cancel_requests",
        "migrations",
    ):
        await denied(app, f"select from rota.{table}")


async def test_a_client_keeps_schedules_and_forges_no_fire(
    app: Connection[Record], op: Connection[Record], root: Connection[Record]
) -> None:
    """All of a schedule that people write, nothing of what daemons do; pausing and running by name are an operator's."""
    made = await app.fetchval(
        "insert into rota.schedules (name, cron, handler) values ('n', '0 3 * * *', 'h') returning schedule_id"
    )
    assert await app.fetchval("select rota.put_schedule('n', 'h', every => interval '1 h', description => 'd')") == made
    await app.execute("update rota.schedules set paused = true, resume_at = now() + interval '1 h' where name = 'n'")
    await app.execute(
        "insert into rota.schedules (name, cron, handler) values ('n', '0 3 * * *', 'h') on conflict do nothing"
    )
    assert await app.fetchval("select paused from rota.schedules where name = 'n'")
    assert await app.fetchval("select rota.ran('n', now())") is False
    assert await app.fetch("select * from rota.fire_history") == []
    for column in (
        "schedule_id", "created_at", "created_by", "edited_at", "paused_at", "declared_by", "declared", "next_fire_at",
        "last_fire_at", "last_success_at", "consecutive_failures", "invalid_reason", "version",
    ):  # fmt: skip
        with pytest.raises((DENIED, asyncpg.FeatureNotSupportedError, asyncpg.GeneratedAlwaysError)):
            await app.execute(f"update rota.schedules set {column} = {column}")
    for table in ("schedule_definitions", "schedule_clocks", "fires"):
        await denied(app, f"select from rota.{table}")
        await denied(op, f"delete from rota.{table}")
    await denied(
        app, "insert into rota.fires (scheduled_for, schedule_id, disposition, name) values (now(), 1, 'enqueued', 'n')"
    )
    for call in (
        *("pause_schedule('n')", "resume_schedule('n')", "run_schedule_now('n')"),
        "backfill_schedule('n', array[now()])",
    ):
        await denied(app, f"select rota.{call}")
        assert await op.fetch(f"select rota.{call}")
    assert await root.fetchval("select count(*) from rota.audit") >= 3
    # What `rota schedule add`, set, list and preview send.
    columns = '{"name": "c", "handler": "h", "cron": "0 3 * * *"}'
    assert await operations.add_schedule(app, columns=columns, payload="[1]")
    assert await operations.edit_schedule(app, name="c", columns='{"priority": 2}', payload=None)
    seen = await schedule_reports.describe_schedule(app, name="c")
    assert seen is not None
    assert (seen.priority, seen.payload) == (2, "[1]")
    assert await schedule_reports.list_schedules(app, which=schedule_reports.ScheduleFilter(), state="ok", limit=10)
    await app.execute("insert into rota.schedules (name, cron, handler) values ('m', '0 3 * * *', 'h')")
    await denied(app, "delete from rota.schedules where name = 'm'")
    await app.execute("select rota.remove_schedule('m')")
    assert await root.fetchval("select count(*) from rota.schedule_definitions where name = 'm'") == 0


# ----------------------------------------------------------------------------------------------- what everybody may not


@pytest.mark.parametrize("login", ["app", "op"])
async def test_rows_are_changed_by_functions_alone(login: str, place: RoleDatabase, root: Connection[Record]) -> None:
    """What a function doesn't do, nobody does: there is no way around the audit, the fence or the ledger."""
    tables = await root.fetch(
        "select oid::regclass::text as name, relkind from pg_class "
        "where relnamespace = 'rota'::regnamespace and relkind in ('r', 'p', 'v')"
    )
    async with place.connect(login) as conn:
        for name, kind in tables:
            rights = ["UPDATE", "DELETE", "TRIGGER"]
            if kind != "v":
                rights += ["TRUNCATE", "REFERENCES", "INSERT"]
            if (login, name) == ("op", "rota.limits"):
                continue  # the one table that operators write directly
            for right in rights:
                assert not await conn.fetchval("select has_table_privilege($1, $2)", name, right), (name, right)
            if name not in {"rota.schedules", "rota.jobs"}:
                assert not await conn.fetchval("select has_any_column_privilege($1, 'INSERT')", name), name
        for name in ("fence_tokens", "jobs_job_id_seq", "audit_audit_id_seq"):
            for right in ("USAGE", "UPDATE"):
                assert not await conn.fetchval("select has_sequence_privilege($1, $2)", f"rota.{name}", right)
        await denied(conn, "create table rota.mine (n int)")
        await denied(conn, "create function rota.mine() returns int language sql return 1")
        await denied(conn, "create trigger mine before insert on rota.jobs execute function rota.fill_in_job()")
        await denied(conn, "alter table rota.jobs disable trigger all")
        await denied(conn, "drop function rota.caller()")


async def test_each_role_calls_its_functions_and_no_others(root: Connection[Record], place: RoleDatabase) -> None:
    """A function that a later migration brings is nobody's until roles.sql names it."""
    functions = await root.fetch("select oid, proname from pg_proc where pronamespace = 'rota'::regnamespace")
    everyone = CLIENTS_CALL | CHECKS_CALL
    for role, may in {
        "client": everyone,
        "operator": everyone | OPERATORS_CALL,
        "daemon": everyone | DAEMONS_CALL,
    }.items():
        has = {
            row["proname"]
            for row in functions
            if await root.fetchval(
                "select has_function_privilege($1, $2::oid, 'EXECUTE')", f"{place.prefix}_{role}", row["oid"]
            )
        }
        assert has == may & {row["proname"] for row in functions}


async def test_the_public_has_nothing(root: Connection[Record], place: RoleDatabase) -> None:
    """A login without a role can't even learn that there is a schema."""
    await root.execute(f"create role {place.prefix}_nobody login password 'secret'")
    async with place.connect("nobody") as nobody:
        for statement in (
            "select from rota.job_status",
            "insert into rota.jobs (handler) values ('h')",
            "select rota.caller()",
        ):
            await denied(nobody, statement)
    assert await granted_to_all(root) == []


async def granted_to_all(root: Connection[Record]) -> list[str]:
    """The relations and functions on which PUBLIC has any right."""
    rows = await root.fetch(
        """
        select oid::regclass::text from pg_class, aclexplode(relacl) where relnamespace = 'rota'::regnamespace and grantee = 0
        union all
        select oid::regprocedure::text from pg_proc, aclexplode(coalesce(proacl, acldefault('f', proowner)))
        where pronamespace = 'rota'::regnamespace and grantee = 0
        """
    )
    return [row[0] for row in rows]


async def test_functions_with_the_owners_rights_look_nowhere_else(
    app: Connection[Record], root: Connection[Record], place: RoleDatabase
) -> None:
    """A client with a schema of its own in front must not lend its tables and functions to the owner."""
    loose = await root.fetch(
        "select proname from pg_proc where pronamespace = 'rota'::regnamespace and prosecdef "
        "and not coalesce(proconfig, '{}') @> '{\"search_path=pg_catalog, pg_temp\"}'"
    )
    assert loose == []
    assert (
        await root.fetchval("select count(*) from pg_proc where pronamespace = 'rota'::regnamespace and prosecdef") > 5
    )

    await root.execute(f"create schema trap authorization {place.prefix}_app")
    await app.execute(
        """
        create function trap.now() returns timestamptz language plpgsql
            as $$ begin raise exception 'trapped by %', current_user; end $$;
        create function trap.pg_notify(text, text) returns void language plpgsql
            as $$ begin raise exception 'trapped by %', current_user; end $$;
        create function trap.clock_timestamp() returns timestamptz language plpgsql
            as $$ begin raise exception 'trapped by %', current_user; end $$;
        create temp table jobs (job_id bigint, created_by text, state text);
        set search_path = trap, pg_temp, pg_catalog, rota;
        """
    )
    job_id = await root.fetchval(
        "insert into rota.jobs (handler, created_by) values ('h', $1) returning job_id", f"{place.prefix}_app"
    )
    assert await app.fetchval("select rota.cancel($1)", job_id) == "cancelled"


async def test_a_notification_from_anybody_is_a_hint_and_no_order(
    app: Connection[Record], root: Connection[Record]
) -> None:
    """Channels have no owners: a client can say that job 1 is cancelled, and nothing in the database believes it."""
    running = await make_running_job(root)
    await app.execute("select pg_notify('rota_cancel', $1)", str(running.job_id))
    assert await state_of(root, running.job_id) == "running"
    assert await root.fetchval("select count(*) from rota.cancel_requests") == 0
    await denied(app, "insert into rota.cancel_requests (job_id, requested_by) values ($1, 'me')", running.job_id)


# ---------------------------------------------------------------------------------------------------------- an operator


async def test_an_operator_acts_on_anybodys_jobs_and_is_written_down(
    op: Connection[Record], app: Connection[Record], root: Connection[Record], place: RoleDatabase
) -> None:
    """Each action leaves who, what, to which, why."""
    waits = await app.fetchval("insert into rota.jobs (handler) values ('h') returning job_id")
    dead = await make_dead_letter(root, handler="h")
    gone = await make_dead_letter(root, handler="h")
    await op.execute("select rota.reschedule($1, now() + interval '1 h', note => 'later')", waits)
    assert await op.fetchval("select rota.cancel($1, note => 'moot')", waits) == "cancelled"
    await op.execute("select rota.redrive($1, '{\"n\": 2}', 'mended')", dead)
    await op.execute("select rota.discard($1, 'too old')", gone)
    for name in ("queue", "handler"):
        assert await op.fetchval(f"select rota.pause_{name}('h', 'smoke')")
        assert await op.fetchval(f"select rota.resume_{name}('h', 'clear')")
    await op.execute("select rota.retry_now(handler => 'h', note => 'n')")
    await op.execute("select * from rota.redrive_many(handler => 'h', note => 'n')")
    await op.execute("select rota.discard_many(handler => 'h', note => 'n')")
    await op.execute("select * from rota.cancel_many(handler => 'h', note => 'n')")
    written = await op.fetch("select action, done_by, reason from rota.audit order by audit_id")
    assert {row["done_by"] for row in written} == {f"{place.prefix}_op"}
    assert all(row["reason"] for row in written)
    assert [row["action"] for row in written] == [
        "reschedule", "cancel", "redrive with another payload", "discard", "pause", "resume", "pause", "resume",
        "retry now", "redrive many", "discard many", "cancel many",
    ]  # fmt: skip


async def test_an_operator_settles_nothing_and_moves_no_token(op: Connection[Record], root: Connection[Record]) -> None:
    """Success is the holder's word alone."""
    running = await make_running_job(root)
    await denied(op, "select rota.complete($1, $2)", running.job_id, running.fence_token)
    await denied(op, "select rota.guard('r', $1)", running.fence_token)
    await denied(op, "select nextval('rota.fence_tokens')")
    await denied(op, "delete from rota.audit")
    await denied(op, "insert into rota.audit (action, target) values ('a', 't')")


def called_in(module: str) -> list[str]:
    """The names of the queries that a module of rota.db sends."""
    text = Path(rota.db.__file__).with_name(module).read_text()
    names = set(re.findall(r'SQL\["(\w+)"\]', text))
    for beginning in re.findall(r'SQL\[f"(\w+)\{', text):
        names |= {name for name in SQL if name.startswith(beginning)}
    assert names
    return sorted(names)


@pytest.mark.parametrize(
    ("login", "module"),
    [
        ("op", "operations.py"),
        ("op", "reports.py"),
        ("op", "node_reports.py"),
        ("op", "server_reports.py"),
        ("node", "server.py"),
        ("op", "schedule_reports.py"),
        ("node", "queries.py"),
        ("node", "schedule_queries.py"),
        ("node", "listen.py"),
    ],
)
async def test_each_statement_that_a_role_sends_is_within_its_rights(
    login: str, module: str, place: RoleDatabase
) -> None:
    """A missing right would show itself in a fleet's night, in the one branch that no test had taken."""
    names = called_in(module) if module != "listen.py" else ["await_inserts", "ignore_inserts"]
    async with place.connect(login) as conn:
        await conn.execute("set plan_cache_mode = force_generic_plan")
        for number, name in enumerate(names):
            # Who starts a statement is asked for its rights, also where it is only explained.
            await conn.execute(f"prepare q{number} as {SQL[name]}")
            count = await conn.fetchval(
                "select cardinality(parameter_types) from pg_prepared_statements where name = $1", f"q{number}"
            )
            nulls = f"({', '.join(['null'] * count)})" if count else ""
            try:
                await conn.execute(f"explain execute q{number}{nulls}")
            except asyncpg.PostgresError as error:
                pytest.fail(f"{login}, {name}: {error}")


async def test_a_daemon_has_no_ddl_and_no_operators_rights(node: Connection[Record], root: Connection[Record]) -> None:
    """It makes and drops the ledger's partitions by a function with the owner's rights, and nothing else."""
    assert await node.fetchrow("select * from rota.rotate_ledger(ahead => 5)") is not None
    assert await root.fetchval("select count(*) from pg_inherits where inhparent = 'rota.job_runs'::regclass") == 7
    await denied(node, "create table rota.mine (n int)")
    await denied(node, "drop table rota.job_runs_default")
    await denied(node, "truncate rota.jobs")
    await denied(node, "update rota.meta set oldest_compatible = 1")
    await denied(node, "select rota.pause_queue('*')")
    await denied(node, "update rota.handlers set paused = true")
    await denied(node, "delete from rota.job_runs")
    job = await make_job(root)
    with pytest.raises(DENIED, match="not yours"):
        await node.execute("select rota.cancel($1)", job.job_id)


# --------------------------------------------------------------------------------------------------------- the migrator


async def test_everything_belongs_to_the_owner_who_has_no_login(root: Connection[Record], place: RoleDatabase) -> None:
    """Functions with the owner's rights must not run with a person's; the migrator may leave, the owner stays."""
    owners = await root.fetch(
        """
        select distinct owner::regrole::text from (
            select nspowner as owner from pg_namespace where nspname = 'rota'
            union all select relowner from pg_class where relnamespace = 'rota'::regnamespace
            union all select proowner from pg_proc where pronamespace = 'rota'::regnamespace
        ) as objects
        """
    )
    assert [row[0] for row in owners] == [f"{place.prefix}_owner"]
    for role in ROLES:
        assert not await root.fetchval(
            "select rolcanlogin or rolsuper or rolcreaterole from pg_roles where rolname = $1", f"{place.prefix}_{role}"
        )


async def test_roles_can_be_given_their_rights_again(root: Connection[Record], place: RoleDatabase) -> None:
    """After each migration, and whenever somebody has meddled: what was granted by hand on the tables is taken back."""
    await root.execute(
        f"grant update (state) on rota.jobs to {place.prefix}_client; grant execute on function rota.caller() to public"
    )
    again = await migrate(place.dsn("mig"), role_prefix=place.prefix)
    assert list(again.roles) == [f"{place.prefix}_{role}" for role in ROLES]
    assert list(again.notices) == []
    assert not await root.fetchval(
        "select has_column_privilege($1, 'rota.jobs', 'state', 'UPDATE')", f"{place.prefix}_client"
    )
    assert await root.fetchval(
        "select has_column_privilege($1, 'rota.jobs', 'payload', 'INSERT')", f"{place.prefix}_client"
    )
    assert await granted_to_all(root) == []


async def test_a_later_migration_brings_its_rights_along(
    root: Connection[Record], place: RoleDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who forgets --roles at an upgrade must not find daemons at a standstill: the roles that are there are seen to."""
    from rota.db import migrate as module
    from rota.db import sql

    later = {
        **sql.MIGRATIONS,
        "9999_later": "create table rota.later (n int); create function rota.ran(n int) returns int language sql return 1",
    }
    monkeypatch.setattr(module, "MIGRATIONS", later)
    monkeypatch.setattr(module, "VERSION", len(later))
    done = await migrate(place.dsn("mig"))
    assert list(done.applied) == ["9999_later"]
    assert f"{place.prefix}_client" in done.roles
    assert await root.fetchval(
        "select has_function_privilege($1, 'rota.ran(int)', 'EXECUTE')", f"{place.prefix}_client"
    )
    assert not await root.fetchval("select has_table_privilege($1, 'rota.later', 'SELECT')", f"{place.prefix}_client")
    assert (
        await root.fetchval("select relowner::regrole::text from pg_class where oid = 'rota.later'::regclass")
        == f"{place.prefix}_owner"
    )
    await root.execute(
        "drop table rota.later; drop function rota.ran(int); delete from rota.migrations where name = '9999_later'"
    )
    monkeypatch.undo()
    await root.execute("update rota.meta set schema_version = $1", module.VERSION)


async def test_who_may_not_create_roles_is_told_what_to_ask_for(server: Server) -> None:
    """An administrator has to act: the error holds the line to type, and nothing was half done."""
    async with role_database(server, "poor", migrate=False) as made, made.connect() as root:
        await root.execute(f"alter role {made.migrator} nocreaterole")
        with pytest.raises(DatabaseUnusable) as refused:
            await migrate(made.dsn("mig"), role_prefix=made.prefix)
        assert f"{made.migrator} may not create roles" in str(refused.value)
        assert f"alter role {made.migrator} createrole" in str(refused.value)
        assert await root.fetchval("select count(*) from rota.jobs") == 0  # the schema itself is there

        # The other way out: somebody else makes them.
        for role in ROLES:
            await root.execute(f"create role {made.prefix}_{role} nologin")
        told = await migrate(made.dsn("mig"), role_prefix=made.prefix)
        assert any("the schema rota still belongs to" in said and "grant" in said for said in told.notices)
        assert await root.fetchval(
            "select has_column_privilege($1, 'rota.jobs', 'handler', 'INSERT')", f"{made.prefix}_client"
        )
        await root.execute(f"grant {made.prefix}_owner to {made.migrator}")
        told = await migrate(made.dsn("mig"), role_prefix=made.prefix)
        assert list(told.notices) == []
        assert (
            await root.fetchval("select nspowner::regrole::text from pg_namespace where nspname = 'rota'")
            == f"{made.prefix}_owner"
        )


async def test_the_schema_of_somebody_else_is_left_alone_with_his_name(server: Server) -> None:
    """A schema that the superuser brought in is his: half of the rights would be worse than none."""
    async with role_database(server, "theirs", migrate=False) as made:
        await migrate(made.root)
        async with made.connect() as root:
            with pytest.raises(DatabaseUnusable, match="must own the schema rota or be a member of its owner"):
                await migrate(made.dsn("mig"), role_prefix=made.prefix)
            async with made.connect("mig") as migrator:
                with pytest.raises(DENIED, match="is not a member") as refused:
                    await migrator.execute(roles_script(made.prefix))
                assert "Run this as" in str(refused.value.hint)
            assert (
                await root.fetchval("select count(*) from pg_roles where starts_with(rolname, $1)", f"{made.prefix}_")
                == 1
            )
            # What is printed for other tools does the same, and a superuser may.
            await root.execute(roles_script(made.prefix))
            assert (
                await root.fetchval("select nspowner::regrole::text from pg_namespace where nspname = 'rota'")
                == f"{made.prefix}_owner"
            )


async def test_who_may_not_make_a_schema_is_told_so(server: Server) -> None:
    """The first of all refusals: no CREATE on the database."""
    async with role_database(server, "none", migrate=False) as made:
        async with made.connect() as root:
            await root.execute(f"revoke create on database {made.database} from {made.migrator}")
        with pytest.raises(DatabaseUnusable, match="grant create on database"):
            await migrate(made.dsn("mig"))


async def test_jobs_run_for_logins_that_have_no_more_than_their_role(
    app: Connection[Record], node: Connection[Record]
) -> None:
    """The whole way once: a client inserts, a daemon's login registers, claims and settles, the ledger has it."""
    job_id = await app.fetchval("insert into rota.jobs (handler) values ('h') returning job_id")
    await queries.register_handlers(node, app="a", release=None, handlers=[("h", None, None, None, None, None, None)])
    await queries.raise_fence_tokens(node)
    claims, *_ = await queries.claim_due_jobs(
        node,
        node=NodeId(NODE),
        groups={"*": 1},
        lanes=[("*", "default", "h", 5, ANY_TIME)],
        suspects=False,
        total=1,
        lease=timedelta(seconds=30),
    )
    assert [claim.job_id for claim in claims] == [job_id]
    await node.execute("select rota.guard('r', $1)", claims[0].fence_token)
    await node.execute("select rota.complete($1, $2)", job_id, claims[0].fence_token)
    assert await app.fetchval("select state from rota.job_status where job_id = $1", job_id) == "succeeded"
