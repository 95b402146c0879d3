"""`rota check` finds each fault that is planted here, names it, and says what to do."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from command_line import Shell
from factories import (
    NODE,
    make_dead_letter,
    make_handler,
    make_job,
    make_running_jobs,
    register_daemon,
    without_check_constraints,
)
from fake_clock import LIBFAKETIME, server_with_fake_clock
from network_faults import FaultyProxy
from pgbouncer_server import find_pgbouncer, pgbouncer
from role_logins import role_database
from rota.db.migrate import VERSION
from schedule_rows import make_due, make_schedule

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import _AsyncGeneratorContextManager as Manager
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database, DurableServer, Server

    Plant = Callable[["Installation"], Manager[None]]

APP = """
import rota

app = rota.App("shop")

@app.handler("shop.works")
async def works(job): ...
"""


@dataclass(slots=True)
class Installation:
    """A healthy installation in which a fault is planted, and functions to create other servers."""

    rota: Shell
    conn: Connection[Record]
    dsn: str
    server: Server
    durable_server: Callable[..., DurableServer]
    environ: dict[str, str] = field(default_factory=dict)
    """Environment variables for the command."""


@pytest.fixture
def installation(
    tmp_path: Path,
    database: Database,
    conn: Connection[Record],
    server: Server,
    durable_server: Callable[..., DurableServer],
) -> Installation:
    """A healthy installation."""
    (tmp_path / "shop.py").write_text(APP)
    return Installation(
        rota=Shell(tmp_path, {"DATABASE_URL": database.dsn, "ROTA_APP": "shop:app"}),
        conn=conn,
        dsn=database.dsn,
        server=server,
        durable_server=durable_server,
    )


@asynccontextmanager
async def plant_client_login_for_a_daemon(installation: Installation) -> AsyncIterator[None]:
    """The daemon uses the URL of the application."""
    async with role_database(installation.server, "check") as roles:
        installation.environ["DATABASE_URL"] = roles.dsn("app")
        yield


@asynccontextmanager
async def plant_operator_login_for_a_daemon(installation: Installation) -> AsyncIterator[None]:
    """The daemon uses the URL of an operator, whose role may read everything and claim nothing."""
    async with role_database(installation.server, "check") as roles:
        installation.environ["DATABASE_URL"] = roles.dsn("op")
        yield


@asynccontextmanager
async def plant_old_schema(installation: Installation) -> AsyncIterator[None]:
    """`rota migrate` was not run after an upgrade."""
    await installation.conn.execute("update rota.meta set schema_version = $1", VERSION - 1)
    yield


@asynccontextmanager
async def plant_pooler_for_notifications(installation: Installation) -> AsyncIterator[None]:
    """Both URLs lead through PgBouncer in transaction mode."""
    with pgbouncer(installation.dsn, installation.rota.folder) as pooled:
        installation.environ |= {"DATABASE_URL": pooled, "ROTA_DIRECT_URL": pooled}
        yield


@asynccontextmanager
async def plant_pooler_alone(installation: Installation) -> AsyncIterator[None]:
    """The only URL leads through PgBouncer."""
    with pgbouncer(installation.dsn, installation.rota.folder) as pooled:
        installation.environ["DATABASE_URL"] = pooled
        yield


@asynccontextmanager
async def plant_direct_url_to_nowhere(installation: Installation) -> AsyncIterator[None]:
    """The server has moved, and only one of the two URLs was changed."""
    with FaultyProxy(installation.dsn) as proxy:
        installation.environ["ROTA_DIRECT_URL"] = proxy.dsn
        proxy.refuse()
        yield


@asynccontextmanager
async def plant_direct_url_to_another_database(installation: Installation) -> AsyncIterator[None]:
    """LISTEN succeeds, but no notification arrives."""
    installation.environ["ROTA_DIRECT_URL"] = installation.durable_server().dsn
    yield


@asynccontextmanager
async def plant_clock_a_minute_behind(installation: Installation) -> AsyncIterator[None]:
    """The clock of this machine is not synchronised."""
    installation.environ |= {"LD_PRELOAD": str(LIBFAKETIME), "FAKETIME": "-60s", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    yield


@asynccontextmanager
async def plant_unknown_handler_name(installation: Installation) -> AsyncIterator[None]:
    """A misspelt handler name."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    await make_job(installation.conn, handler="shop.wroks")
    yield


@asynccontextmanager
async def plant_no_daemons_left(installation: Installation) -> AsyncIterator[None]:
    """The daemons are gone, and no job is due yet."""
    await make_job(installation.conn, handler="shop.works", run_at=timedelta(hours=1))
    yield


@asynccontextmanager
async def plant_no_daemons_left_for_schedules(installation: Installation) -> AsyncIterator[None]:
    """The daemons are gone, and no schedule has fired yet."""
    await make_due(installation.conn, await make_schedule(installation.conn, "nightly"), ago=-timedelta(hours=1))
    yield


@asynccontextmanager
async def plant_hot_table_without_autovacuum(installation: Installation) -> AsyncIterator[None]:
    """Autovacuum is off for one table, perhaps since a migration."""
    await installation.conn.execute("alter table rota.jobs set (autovacuum_enabled = no)")
    yield
    await installation.conn.execute("alter table rota.jobs reset (autovacuum_enabled)")


@asynccontextmanager
async def plant_server_without_fsync(installation: Installation) -> AsyncIterator[None]:
    """fsync is off, perhaps since a bulk load."""
    installation.environ["DATABASE_URL"] = installation.durable_server(fsync="off").dsn
    yield


@asynccontextmanager
async def plant_server_without_full_page_writes(installation: Installation) -> AsyncIterator[None]:
    """full_page_writes is off, as a benchmark guide might advise."""
    installation.environ["DATABASE_URL"] = installation.durable_server(full_page_writes="off").dsn
    yield


@asynccontextmanager
async def plant_server_without_track_counts(installation: Installation) -> AsyncIterator[None]:
    """track_counts is off, so autovacuum never starts."""
    installation.environ["DATABASE_URL"] = installation.durable_server(track_counts="off").dsn
    yield


@asynccontextmanager
async def plant_server_without_autovacuum(installation: Installation) -> AsyncIterator[None]:
    """Autovacuum is off for the whole server."""
    installation.environ["DATABASE_URL"] = installation.durable_server(autovacuum="off").dsn
    yield


@asynccontextmanager
async def plant_server_that_cancels_claims(installation: Installation) -> AsyncIterator[None]:
    """A statement timeout that suits a web application."""
    await installation.conn.execute(
        "do $$ begin execute format('alter database %I set statement_timeout = 2000', current_database()); end $$"
    )
    yield


@asynccontextmanager
async def plant_queue_without_a_free_slot(installation: Installation) -> AsyncIterator[None]:
    """Both slots are held by one handler, and a job of another handler has been due for five minutes."""
    await installation.conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, seen_at) values "
        "($1, 'here', 1, '0', 'shop', '{shop.works,shop.holds}', '{default,*}', '{\"default\": 2, \"*\": 5}', "
        "now() + interval '1 h')",
        NODE,
    )
    await make_running_jobs(installation.conn, 2, handler="shop.holds", queue="default")
    await make_job(installation.conn, handler="shop.works", queue="default", run_at=-timedelta(minutes=5))
    yield


@asynccontextmanager
async def plant_priority_that_is_never_claimed(installation: Installation) -> AsyncIterator[None]:
    """Written by the owner, past the constraints."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    async with without_check_constraints(installation.conn, "rota.jobs"):
        await make_job(installation.conn, handler="shop.works", priority=12, run_at=-timedelta(seconds=9))
    yield


@asynccontextmanager
async def plant_row_that_is_refused(installation: Installation) -> AsyncIterator[None]:
    """A user's trigger rejects the row."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    job_id = (await make_job(installation.conn, handler="shop.works", run_at=timedelta(minutes=5))).job_id
    await installation.conn.execute(
        "update rota.nodes set refused = jsonb_build_array(jsonb_build_object("
        "'doing', 'claim', 'what', 'job', 'id', $1::int8, 'kind', 'RaiseError', 'seconds', 120))",
        job_id,
    )
    shown = await installation.rota("job", "show", str(job_id))
    assert "for 2m the database has refused the operation claim on this job (RaiseError on here:1)" in shown.out
    yield


@asynccontextmanager
async def plant_daemon_login_that_only_reads(installation: Installation) -> AsyncIterator[None]:
    """The read-only setting belongs to another login than the one that checks."""
    await installation.conn.execute(
        "create role rota_test_reader; grant update on sequence rota.fence_tokens to rota_test_reader; "
        "alter role rota_test_reader set default_transaction_read_only = on"
    )
    yield
    await installation.conn.execute("drop owned by rota_test_reader; drop role rota_test_reader")


@asynccontextmanager
async def plant_pooler_without_synchronous_commits(installation: Installation) -> AsyncIterator[None]:
    """A daemon cannot turn synchronous commits on through this pooler."""
    dsn = installation.durable_server(synchronous_commit="off").dsn
    with pgbouncer(dsn, installation.rota.folder) as pooled:
        installation.environ |= {"DATABASE_URL": pooled, "ROTA_DIRECT_URL": dsn}
        yield


@asynccontextmanager
async def plant_server_without_connections(installation: Installation) -> AsyncIterator[None]:
    """Other clients use all connections."""
    server = installation.durable_server(max_connections="5", max_wal_senders="0")
    installation.environ["DATABASE_URL"] = server.dsn
    yield


@asynccontextmanager
async def plant_fleet_larger_than_the_server(installation: Installation) -> AsyncIterator[None]:
    """The pools of the daemons need more connections than the server has."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    installation.environ |= {"ROTA_DATABASE_HANDLER_POOL_SIZE": "900"}
    yield


@asynccontextmanager
async def plant_ledger_without_autovacuum(installation: Installation) -> AsyncIterator[None]:
    """Autovacuum is off for the ledger."""
    await installation.conn.execute("alter table rota.attempts set (autovacuum_enabled = no)")
    yield
    await installation.conn.execute("alter table rota.attempts reset (autovacuum_enabled)")


@asynccontextmanager
async def plant_snapshot_of_forty_minutes(installation: Installation) -> AsyncIterator[None]:
    """A report that was left open in a transaction."""
    async with AsyncExitStack() as stack:
        dsn, clock = stack.enter_context(server_with_fake_clock(installation.durable_server()))
        reader = await asyncpg.connect(dsn, server_settings={"application_name": "report"})
        stack.callback(reader.terminate)
        await reader.execute("begin isolation level repeatable read; select")
        clock.write_text("+0\n")
        installation.environ["DATABASE_URL"] = dsn
        yield


@asynccontextmanager
async def plant_lease_of_two_heartbeats(installation: Installation) -> AsyncIterator[None]:
    """A lease so short that one lost heartbeat lets the job run twice."""
    installation.environ |= {"ROTA_LEASE": "10s", "ROTA_LEASE_HEARTBEAT": "5s"}
    yield


@asynccontextmanager
async def plant_drain_cut_short(installation: Installation) -> AsyncIterator[None]:
    """The supervisor kills the daemon before its drain has ended."""
    installation.environ |= {"ROTA_DRAIN_TIMEOUT": "60s", "ROTA_STOP_TIMEOUT": "30s"}
    yield


@asynccontextmanager
async def plant_misspelt_setting_in_the_file(installation: Installation) -> AsyncIterator[None]:
    """A misspelt setting in the configuration file."""
    (installation.rota.folder / "rota.toml").write_text('[lease]\ndurration = "1m"\n')
    yield


@asynccontextmanager
async def plant_unknown_variable(installation: Installation) -> AsyncIterator[None]:
    """An unknown ROTA_ variable may belong to another program, so it is only a warning."""
    installation.environ["ROTA_NONSENSE"] = "1"
    yield


@asynccontextmanager
async def plant_everything_paused(installation: Installation) -> AsyncIterator[None]:
    """Everything was paused for a restore and never resumed."""
    await installation.conn.execute("select rota.pause_queue('*', 'restored')")
    yield


@asynccontextmanager
async def plant_queue_paused(installation: Installation) -> AsyncIterator[None]:
    """A queue paused by name, without a reason."""
    await installation.conn.execute("select rota.pause_queue('the mail')")
    yield


@asynccontextmanager
async def plant_handler_paused(installation: Installation) -> AsyncIterator[None]:
    """A handler paused by name."""
    await installation.conn.execute("select rota.pause_handler('shop.works', 'bad numbers')")
    yield


@asynccontextmanager
async def plant_clock_that_was_ahead(installation: Installation) -> AsyncIterator[None]:
    """The server's clock was years ahead for a minute, and schedules fired."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    await installation.conn.execute(
        "insert into rota.schedules (name, handler, cron) values ('report', 'shop.works', '@daily')"
    )
    await installation.conn.execute(
        "update rota.schedule_clocks set last_fire_at = now() + interval '5 years', next_fire_at = now() + interval '1827 days'"
    )
    yield


@asynccontextmanager
async def plant_two_apps_with_one_handler(installation: Installation) -> AsyncIterator[None]:
    """One of the two daemons runs an old release that does not refuse to start."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    await installation.conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, seen_at) values "
        "(gen_random_uuid(), 'there', 2, '0', 'mail', '{shop.works,rota.echo}', '{default}', '{}', now() + interval '1 h')"
    )
    yield


@asynccontextmanager
async def plant_daemon_that_vanished(installation: Installation) -> AsyncIterator[None]:
    """A daemon was killed an hour ago and not replaced."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    await installation.conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, seen_at) values "
        "('12345678-0000-4000-8000-000000000000', 'there', 2, '0', 'shop', '{}', '{default}', '{}', now() - interval '1 h')"
    )
    yield


@asynccontextmanager
async def plant_view_on_an_old_partition(installation: Installation) -> AsyncIterator[None]:
    """A user's view on an old ledger partition, which therefore cannot be dropped."""
    await installation.conn.execute(
        "create table rota.job_runs_20200101 partition of rota.job_runs "
        "for values from ('2020-01-01 00:00:00+00') to ('2020-01-02 00:00:00+00')"
    )
    await installation.conn.execute("create view report as select * from rota.job_runs_20200101")
    await installation.conn.fetch("select * from rota.rotate_ledger()")
    yield


@asynccontextmanager
async def plant_limit_of_zero_for_days(installation: Installation) -> AsyncIterator[None]:
    """A tenant was stopped two days ago and forgotten."""
    await installation.conn.execute("select rota.set_limit('tenant:42', 0, note => 'unpaid')")
    await _backdate_limits(installation.conn, "2 days")
    yield


@asynccontextmanager
async def plant_limit_of_a_misspelt_handler(installation: Installation) -> AsyncIterator[None]:
    """It limits nothing."""
    await make_handler(installation.conn, "shop.works")
    await installation.conn.execute("select rota.set_limit('handler:shop.works', 1)")
    await installation.conn.execute("select rota.set_limit('handler:shop.wroks', 1)")
    yield


@asynccontextmanager
async def plant_limit_of_a_misspelt_key(installation: Installation) -> AsyncIterator[None]:
    """The due jobs of the tenants have no limit. The limit of an idle tenant is no finding."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    await installation.conn.execute(
        "select rota.set_limit('tennant:*', 1), rota.set_limit('tenant:43', 1), rota.set_limit('*x', 1)"
    )
    await make_job(installation.conn, handler="shop.works", limit_key="tenant:42")
    yield


@asynccontextmanager
async def plant_key_over_its_limit(installation: Installation) -> AsyncIterator[None]:
    """Both jobs started after the limit had been set. Of the other key, one did: a limit was lowered meanwhile."""
    await register_daemon(installation.conn, handlers=["shop.works"])
    await installation.conn.execute("select rota.set_limit('tenant:*', 1), rota.set_limit('lowered', 1)")
    await _backdate_limits(installation.conn, "1 minute")
    await make_running_jobs(installation.conn, 2, handler="shop.works", limit_key="tenant:42")
    await make_running_jobs(installation.conn, 2, handler="shop.works", limit_key="lowered")
    await installation.conn.execute(
        "update rota.jobs set started_at = now() - interval '2 min' where limit_key = 'lowered'"
    )
    yield


@asynccontextmanager
async def plant_key_that_no_daemon_starts(installation: Installation) -> AsyncIterator[None]:
    """The daemon has free slots, but its dispatcher hangs. The jobs of the closed key rightly wait."""
    await installation.conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, seen_at) values "
        "($1, 'here', 1, '0', 'shop', '{shop.works}', '{default}', '{\"default\": 2}', now() + interval '1 h')",
        NODE,
    )
    await installation.conn.execute("select rota.set_limit('open', 1), rota.set_limit('closed', 0)")
    for key in ("open", "closed"):
        await make_job(installation.conn, handler="shop.works", limit_key=key, run_at=-timedelta(minutes=5))
    installation.environ["ROTA_POLL_INTERVAL"] = "50ms"
    yield


async def _backdate_limits(conn: Connection[Record], age: str) -> None:
    await conn.execute("alter table rota.limits disable trigger check_limit")
    await conn.execute("update rota.limits set changed_at = now() - $1::text::interval", age)
    await conn.execute("alter table rota.limits enable trigger check_limit")


@asynccontextmanager
async def plant_schedule_without_clock(installation: Installation) -> AsyncIterator[None]:
    await make_schedule(installation.conn, "report", handler="shop.works")
    await installation.conn.execute("delete from rota.schedule_clocks")
    yield


DAMAGE = [
    ("drop trigger wake on rota.jobs", "the trigger wake on jobs .* is missing", "rota migrate --sql prints"),
    ("drop index rota.jobs_unique_key_idx", "the index jobs_unique_key_idx .* is missing", "rota migrate --sql prints"),
    ("alter table rota.jobs set unlogged", "the table jobs .* is unlogged", "set logged"),
    (
        "update pg_index set indisvalid = false where indexrelid = 'rota.jobs_unique_key_idx'::regclass",
        "the index jobs_unique_key_idx .* is invalid",
        "reindex index concurrently rota.jobs_unique_key_idx",
    ),
    (
        "create or replace function rota.tell(channel text, message text) returns void language sql as 'select'",
        r"the function tell\(text, text\) .* is not the one of this version",
        "rota migrate --sql prints",
    ),
    (
        "insert into rota.jobs (job_id, handler, run_at) overriding system value values (7, 'shop.works', now() + interval '1 h')",
        "jobs_job_id_seq is behind job 7",
        r"setval\('rota.jobs_job_id_seq', 7\)",
    ),
]


@pytest.mark.parametrize(("statement", "finding", "do"), DAMAGE)
async def test_an_object_missing_or_changed_in_the_schema_is_reported(
    installation: Installation, statement: str, finding: str, do: str
) -> None:
    await installation.conn.execute(statement)
    try:
        result = await installation.rota("check", "--json", **installation.environ)
    finally:  # the only damage that makes no difference between this database and a fresh one
        await installation.conn.execute("update pg_index set indisvalid = true where not indisvalid")
    found = [each for each in result.json["findings"] if each["check"] == "schema"]
    assert found
    assert re.search(finding, found[0]["finding"])
    assert re.search(do, found[0]["do"])


INSTANT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ"

FAULTS: list[tuple[Plant, int, str, str, str]] = [
    # Function that plants the fault, exit code, check, finding, advice.
    (plant_client_login_for_a_daemon, 3, "", "_app.* permission denied", "rota_daemon may run a daemon"),
    (
        plant_operator_login_for_a_daemon,
        1,
        "role",
        r"rt\w+_op may not run a daemon",
        r"grant rt\w+_check_daemon to rt\w+_check_op",
    ),
    (plant_old_schema, 3, "", f"version {VERSION - 1}, this rota needs {VERSION}", "run `rota migrate`"),
    (
        plant_pooler_for_notifications,
        1,
        "pooler",
        "ROTA_DIRECT_URL leads through a connection pooler",
        "set it to the server's own host and port",
    ),
    (
        plant_pooler_alone,
        1,
        "pooler",
        "the URL leads through a connection pooler",
        "set ROTA_DIRECT_URL to a URL straight",
    ),
    (plant_direct_url_to_nowhere, 1, "direct URL", "ROTA_DIRECT_URL can't be used: no database answers", "correct it"),
    (
        plant_direct_url_to_another_database,
        1,
        "direct URL",
        "lead to different databases",
        "set both to the same database",
    ),
    (plant_clock_a_minute_behind, 1, "clock", "this machine's are (59s|1m) apart", "run NTP"),
    (plant_unknown_handler_name, 1, "unclaimed", "1 due job of shop.wroks", "did you mean 'shop.works'"),
    (
        plant_no_daemons_left,
        1,
        "daemons",
        "no daemon is alive, and 1 job and 0 schedules wait",
        "rota run --app module:app",
    ),
    (
        plant_no_daemons_left_for_schedules,
        1,
        "daemons",
        "no daemon is alive, and 0 jobs and 1 schedule wait",
        "rota run --app module:app",
    ),
    (
        plant_hot_table_without_autovacuum,
        1,
        "autovacuum",
        "off for rota.jobs",
        r"alter table rota.jobs reset \(autovac",
    ),
    (plant_server_without_fsync, 1, "settings", "fsync is off: a crash", "alter system set fsync = on"),
    (
        plant_server_without_full_page_writes,
        1,
        "settings",
        "full_page_writes is off: ",
        "alter system set full_page_writes = on",
    ),
    (plant_server_without_track_counts, 1, "settings", "track_counts is off: autovacuum", "set track_counts = on"),
    (plant_server_without_autovacuum, 1, "autovacuum", "off for the whole server", "alter system set autovacuum = on"),
    (plant_server_that_cancels_claims, 1, "settings", "statement_timeout is 2000 ms", "set statement_timeout = 0"),
    (
        plant_priority_that_is_never_claimed,
        1,
        "priority",
        "1 due job of shop.works in queue default have the priority 12, which is not in",
        "set priority = 9 on the rows of rota.jobs where priority = 12",
    ),
    (
        plant_row_that_is_refused,
        1,
        "refused rows",
        r"refuses the daemons' claim of job \d+, for 2m: RaiseError on here:1",
        "trigger, foreign key or constraint",
    ),
    (
        plant_daemon_login_that_only_reads,
        1,
        "settings",
        "on for the login rota_test_reader: ",
        "alter role rota_test_reader set",
    ),
    (
        plant_pooler_without_synchronous_commits,
        1,
        "settings",
        "synchronous_commit is off: ",
        "set synchronous_commit = on",
    ),
    (plant_server_without_connections, 1, "connections", r"the server has \d of 2 connections left", "raise the limit"),
    (plant_fleet_larger_than_the_server, 1, "connections", r"1 daemon may open 907", "raise the limit"),
    (plant_ledger_without_autovacuum, 1, "autovacuum", "off for rota.attempts", r"alter table rota.attempts reset"),
    (
        plant_snapshot_of_forty_minutes,
        1,
        "snapshot",
        r"for 40m.*\(pid \d+, postgres, report, idle",
        "pg_terminate_backend",
    ),
    (plant_lease_of_two_heartbeats, 2, "", "lease.heartbeat = '5s'", "at most a third of lease.duration, which is 10s"),
    (plant_drain_cut_short, 1, "configuration", r"drain.timeout \(1m\).* exceed ROTA_STOP_TIMEOUT", "to 65s or more"),
    (
        plant_misspelt_setting_in_the_file,
        2,
        "",
        "lease.durration .from rota.toml.: no such setting",
        "did you mean lease.duration",
    ),
    (plant_unknown_variable, 1, "configuration", "ROTA_NONSENSE is ignored", "unset it"),
    (
        plant_everything_paused,
        1,
        "paused",
        f"every queue is paused since {INSTANT} by postgres: restored",
        "resume --all",
    ),
    (
        plant_queue_paused,
        1,
        "paused",
        f"the queue the mail is paused since {INSTANT} by .*no reason",
        "resume 'the mail'",
    ),
    (
        plant_handler_paused,
        1,
        "paused",
        "the handler shop.works is paused .*: bad numbers",
        "rota handler resume shop.works",
    ),
    (
        plant_two_apps_with_one_handler,
        1,
        "foreign handlers",
        "mail on there:2, shop on here:1",
        r'shared = \["shop.works"\]',
    ),
    (
        plant_daemon_that_vanished,
        1,
        "lost nodes",
        r"shop on there:2 \(node 12345678\) was lost",
        "rota node forget 12345678",
    ),
    (
        plant_view_on_an_old_partition,
        1,
        "housekeeping",
        "job_runs_20200101: cannot drop .*report",
        "drop the objects that depend",
    ),
    (
        plant_limit_of_zero_for_days,
        1,
        "limit",
        f"limit tenant:42 has max_running 0 since {INSTANT}: unpaid",
        "rota limit remove tenant:42",
    ),
    (
        plant_limit_of_a_misspelt_handler,
        1,
        "limit",
        "limit handler:shop.wroks matches nothing: no daemon has registered the handler",
        "did you mean handler:shop.works[?]",
    ),
    (
        plant_limit_of_a_misspelt_key,
        1,
        "limit",
        r"limit tennant:\* matches no due or running job, and no limit applies to the similar key tenant:42",
        "rota limit remove 'tennant:[*]'",
    ),
    (plant_key_over_its_limit, 1, "limit", r"2 jobs of tenant:42 run, and limit tenant:\* allows 1", "bug of rota"),
    (
        plant_key_that_no_daemon_starts,
        1,
        "limit",
        r"job \d+ has been due for .*: its key open is open and a daemon has a free slot",
        r"rota why \d+",
    ),
    (
        plant_schedule_without_clock,
        1,
        "invalid schedules",
        "report does not fire: its row in rota.schedule_clocks is missing",
        "insert into rota.schedule_clocks",
    ),
    (
        plant_clock_that_was_ahead,
        1,
        "schedules ahead",
        f"report has decided about all instants up to {INSTANT}",
        "add it again",
    ),
]

REQUIRED_PACKAGES = {
    **dict.fromkeys(
        ("plant_pooler_for_notifications", "plant_pooler_alone", "plant_pooler_without_synchronous_commits"),
        None if find_pgbouncer() else "pgbouncer",
    ),
    **dict.fromkeys(
        ("plant_clock_a_minute_behind", "plant_snapshot_of_forty_minutes"), None if LIBFAKETIME else "libfaketime"
    ),
}
"""Function that plants a fault -> package that it needs."""


@pytest.mark.parametrize(
    ("plant", "code", "check", "finding", "do"), FAULTS, ids=[plant.__name__ for plant, *_ in FAULTS]
)
async def test_a_planted_fault_is_the_only_finding_and_comes_with_its_remedy(
    installation: Installation, plant: Plant, code: int, check: str, finding: str, do: str
) -> None:
    if missing := REQUIRED_PACKAGES.get(plant.__name__):
        pytest.skip(f"the package {missing} is not installed")
    async with plant(installation):
        text = await installation.rota("check", **installation.environ)
        result = await installation.rota("check", "--json", **installation.environ)

    assert (text.code, result.code) == (code, code), text.err

    if code != 1:
        assert re.search(finding, text.err)
        assert re.search(do, text.err)
        return
    (found,) = result.json["findings"]
    assert found["check"] == check
    assert re.search(finding, found["finding"])
    assert re.search(do, found["do"])
    assert re.fullmatch(f"{check}: .*{finding}.*\n    .*{do}.*\n", text.out)


async def test_a_pooler_with_a_direct_url_is_no_finding(installation: Installation) -> None:
    if find_pgbouncer() is None:
        pytest.skip("the package pgbouncer is not installed")
    with pgbouncer(installation.dsn, installation.rota.folder) as pooled:
        result = await installation.rota("check", "--json", DATABASE_URL=pooled, ROTA_DIRECT_URL=installation.dsn)
    assert (result.code, result.json["findings"]) == (0, [])


async def test_control_characters_in_names_do_not_reach_the_terminal(installation: Installation) -> None:
    """Clients that insert jobs choose the names."""
    hostile_name = "mail\N{RIGHT-TO-LEFT OVERRIDE}\N{LEFT-TO-RIGHT ISOLATE}; rm"
    await register_daemon(installation.conn, handlers=["shop.works"])
    await make_job(installation.conn, handler=hostile_name, queue=hostile_name)
    await make_dead_letter(installation.conn, handler=hostile_name, queue=hostile_name)
    await installation.conn.execute("select rota.pause_queue($1, $1), rota.pause_handler($1, $1)", hostile_name)
    lists = (["check"], ["status"], ["queue", "list"], ["handler", "list"], ["job", "list"], ["dead", "summary"])
    results = {
        " ".join(each): await installation.rota(*each) for each in (*lists, ["check", "--json"], ["status", "--json"])
    }

    for command, result in results.items():
        shown = result.out + result.err
        assert "mail" in shown, command
        assert all(char.isprintable() or char == "\n" for char in shown), command
    assert any(hostile_name in each["finding"] for each in results["check --json"].json["findings"])
    assert "resume 'mail\\u202e\\u2066; rm'" in results["check"].out


async def test_a_check_that_the_database_rejects_is_a_finding_and_the_others_still_run(
    installation: Installation,
) -> None:
    await installation.conn.execute("select rota.pause_queue('mail')")
    await installation.conn.execute("alter table rota.dead_letters rename to dead_letters_elsewhere")
    try:
        result = await installation.rota("check", "--json")
    finally:
        await installation.conn.execute("alter table rota.dead_letters_elsewhere rename to dead_letters")

    assert result.code == 1
    found = {(each["check"], each["object"]) for each in result.json["findings"]}
    assert found >= {("paused", "the queue mail"), ("incomplete", "dead letters"), ("schema", "dead_letters")}
