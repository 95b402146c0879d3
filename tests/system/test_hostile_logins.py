"""Logins without rights beside real daemons: their locks, functions and objects stop no other login's jobs."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import asyncpg
import pytest

from command_line import Shell, running_command
from fleets import Fleet
from role_logins import role_database
from rota.db.migrate import migrate
from schedule_rows import make_due, make_schedule
from waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from processes import DaemonProcess
    from servers import Server

ADVISORY_KEYS = range(1, 5)
"""Second keys of the advisory locks that this release or an older one takes."""


@pytest.mark.parametrize("mode", ["", "_shared"])
async def test_a_login_that_holds_every_advisory_lock_stops_nothing(fleet: Fleet, mode: str) -> None:
    """PostgreSQL has no rights for advisory locks: every login may take and keep them."""
    stranger = await fleet.connection()
    for key in ADVISORY_KEYS:
        await stranger.execute(f"select pg_advisory_lock{mode}(1919906913, {key})")
    before = await fleet.value("select last_value from rota.fence_tokens")

    daemon = fleet.daemons.start(ROTA_POLL_INTERVAL="1s")
    daemon.wait_for("listener.up")
    for _ in range(3):
        await fleet.wait_for_execution(await fleet.enqueue("work"), within=5)
    await fleet.wait_until_empty()

    status, body = daemon.get("readyz")
    assert (status, json.loads(body)["reasons"]) == (200, [])
    assert daemon.events("service.failed") == []
    assert await fleet.value("select last_value from rota.fence_tokens") > before
    assert list((await migrate(fleet.dsn)).applied) == []

    await fleet.execute(f"drop table {await _coming_partition(fleet)}")
    assert await fleet.value("select made from rota.rotate_ledger()") == 1
    assert daemon.stop() == 0


async def _coming_partition(fleet: Fleet) -> str:
    return str(
        await fleet.value(
            "select inhrelid::regclass::text from pg_inherits where inhparent = 'rota.job_runs'::regclass "
            "and inhrelid <> 'rota.job_runs_default'::regclass order by 1 desc limit 1"
        )
    )


async def test_a_listener_takes_its_lock_when_a_hostile_login_releases_it(fleet: Fleet) -> None:
    """Until then, inserts notify anyway, and polling finds the jobs of lost notifications."""
    stranger = await fleet.connection()
    await stranger.execute("select pg_advisory_lock(1919906913, 1)")
    daemon = fleet.daemons.start(ROTA_POLL_INTERVAL="60s", ROTA_LEASE="30s")
    daemon.wait_for("listener.up")
    await fleet.wait_for_execution(await fleet.enqueue("work"), within=5)

    await stranger.execute("select pg_advisory_unlock_all()")

    async def has_listener_lock() -> bool:
        shared = "select exists (select from pg_locks where locktype = 'advisory' and mode = 'ShareLock' and granted)"
        return bool(await fleet.value(shared))

    await eventually(has_listener_lock, what="the listener's own lock")
    await fleet.wait_for_execution(await fleet.enqueue("work"), within=5)


async def _wait_until_not_ready(daemon: DaemonProcess, *, because: str, within: float = 8.0) -> list[str]:
    """Wait until /readyz answers 503 with that text and return its reasons; /healthz must stay 200."""

    def find_reasons() -> list[str] | None:
        status, body = daemon.get("readyz")
        found: list[str] = json.loads(body)["reasons"]
        return found if status == 503 and because in " ".join(found) else None

    found = await eventually(find_reasons, within=within, what=f"/readyz to answer 503 because of {because}")
    assert daemon.get("healthz")[0] == 200, "a restart would mend nothing"
    return found


async def _wait_until_ready(daemon: DaemonProcess, *, within: float = 20.0) -> None:
    await eventually(lambda: daemon.get("readyz")[0] == 200, within=within, what="/readyz to answer 200")


async def test_readyz_check_and_a_gauge_name_the_session_that_blocks_all_claims(fleet: Fleet, tmp_path: Path) -> None:
    """An operator learns which session to end, and how."""
    rota = Shell(tmp_path, {"DATABASE_URL": fleet.dsn})
    daemon = fleet.daemons.start(ROTA_POLL_INTERVAL="1s")
    await _wait_until_ready(daemon)
    blocker = await asyncpg.connect(fleet.dsn, server_settings={"application_name": "a report"})
    try:
        await blocker.execute("begin; lock table rota.jobs in access exclusive mode")
        who = f"pid {blocker.get_server_pid()} (user postgres, application a report)"

        reasons = await _wait_until_not_ready(daemon, because=who)
        assert any(reason.startswith("claims have waited") for reason in reasons), reasons
        assert daemon.metric("rota_lock_wait_seconds") >= 2

        checked = await rota("check")
        assert who in checked.out + checked.err
        assert f"pg_terminate_backend({blocker.get_server_pid()})" in checked.out + checked.err
        assert checked.code != 0
        assert [event["by"] for event in daemon.events("lock.blocked")] == [f"{who} holds a lock on rota.jobs"]
        await blocker.execute("rollback")
    finally:
        blocker.terminate()
    await _wait_until_ready(daemon)
    await fleet.wait_for_execution(await fleet.enqueue("work"))
    await eventually(lambda: daemon.metric("rota_lock_wait_seconds") == 0, what="the gauge to return to 0")


REJECT_WRITES = """
create function refuse() returns trigger language plpgsql as $$
begin raise exception using errcode = 'disk_full', message = 'could not extend file "base/1": No space left on device'; end $$;
create trigger refuse before {event} on {table} for each row execute function refuse()
"""


@pytest.mark.parametrize(
    ("event", "table", "what"), [("update", "rota.jobs", "claims"), ("delete", "rota.jobs", "settlements")]
)
async def test_readyz_is_503_while_the_database_rejects_writes(fleet: Fleet, event: str, table: str, what: str) -> None:
    """A full disk still answers every SELECT. Readiness returns by itself."""
    daemon = fleet.daemons.start(ROTA_LEASE="60s")
    await _wait_until_ready(daemon)
    await fleet.execute(REJECT_WRITES.format(event=event, table=table))
    await fleet.enqueue("work")

    reasons = await _wait_until_not_ready(daemon, because="No space left on device", within=12)
    assert what in " ".join(reasons)

    await fleet.execute(f"drop trigger refuse on {table}; drop function refuse()")
    await _wait_until_ready(daemon)
    await fleet.wait_until_empty()
    assert daemon.alive


async def test_a_command_that_waits_for_a_lock_names_the_blocking_session(fleet: Fleet, tmp_path: Path) -> None:
    await fleet.execute("select rota.pause_queue('mail')")
    blocker = await asyncpg.connect(fleet.dsn, server_settings={"application_name": "psql"})
    try:
        await blocker.execute("begin; select from rota.queues for update")
        rota = Shell(tmp_path, {"DATABASE_URL": fleet.dsn})
        with running_command(rota, "queue", "resume", "mail") as (process, output):
            finding = f"note: waiting: pid {blocker.get_server_pid()} (user postgres, application psql)"
            await eventually(lambda: finding in output(), what="the name of the session")
            await blocker.execute("rollback")
            assert process.wait(20) == 0
    finally:
        blocker.terminate()


LIST_LOCKABLE_RELATIONS = """
select string_agg(oid::regclass::text, ', ') from pg_class
where relkind in ('r', 'p', 'v') and has_table_privilege(current_user, oid, 'insert, update, delete')
"""


async def test_locks_that_public_may_take_block_no_command(server: Server, tmp_path: Path) -> None:
    """PUBLIC may update the view pg_settings, and may therefore lock it."""
    async with role_database(server, "lockable") as roles, roles.connect() as root:
        await root.execute(f"create role {roles.prefix}_stranger login password 'secret'")
        (tmp_path / "shop.py").write_text("import rota\napp = rota.App('shop')\n")
        rota = Shell(tmp_path, {"DATABASE_URL": roles.dsn("op"), "ROTA_APP": "shop:app"})
        async with roles.connect("stranger") as stranger:
            await stranger.execute("begin; set local search_path = ''")
            lockable = await stranger.fetchval(LIST_LOCKABLE_RELATIONS)
            assert lockable == "pg_settings"
            await stranger.execute(f"lock table {lockable} in access exclusive mode")
            for command in ("check", "status"):
                result = await rota(command)
                assert "waiting" not in result.err, result
                assert result.code in (0, 1), result


async def test_a_daemon_reports_rows_hidden_by_row_level_security(server: Server, tmp_path: Path) -> None:
    """Every query would find nothing, without an error or a log line."""
    finding = "row-level security is enabled on rota.jobs"
    async with role_database(server, "rls") as roles, roles.connect() as root, Fleet(roles.root, tmp_path) as fleet:
        daemon = fleet.daemons.start(dsn=roles.dsn("node"))
        await _wait_until_ready(daemon)
        await root.execute("alter table rota.jobs enable row level security")
        await _wait_until_not_ready(daemon, because="row-level security", within=12)

        checked = await Shell(tmp_path, {"DATABASE_URL": roles.dsn("op")})("check")
        assert (checked.code, finding in checked.out) == (1, True), checked

        refused = fleet.daemons.launch(dsn=roles.dsn("node"))
        assert refused.wait_for_exit() == 3
        assert finding in refused.output_text()


async def test_check_names_the_objects_and_rights_that_a_daemon_lacks(server: Server, tmp_path: Path) -> None:
    """It prints the statement that mends each one."""
    async with role_database(server, "rights") as roles, roles.connect() as root:
        await root.execute("alter table rota.jobs disable trigger wake")
        await root.execute(f"revoke delete on rota.attempts from {roles.prefix}_daemon")
        await root.execute(
            "alter table rota.fires replica identity nothing; create publication everything for table rota.fires"
        )
        (tmp_path / "shop.py").write_text("import rota\napp = rota.App('shop')\n")
        checked = await Shell(tmp_path, {"DATABASE_URL": roles.dsn("node"), "ROTA_APP": "shop:app"})("check")

        assert "alter table rota.jobs enable trigger wake" in checked.out
        assert "lacks DELETE on rota.attempts" in checked.out
        assert "alter table rota.fires replica identity default" in checked.out


async def test_why_and_job_show_name_the_session_that_locks_the_job(fleet: Fleet, tmp_path: Path) -> None:
    """Claims skip a locked row, so the job would only appear as due."""
    rota = Shell(tmp_path, {"DATABASE_URL": fleet.dsn})
    job_id = await fleet.enqueue("noop")
    other = await fleet.enqueue("noop")
    holder = await asyncpg.connect(fleet.dsn, server_settings={"application_name": "shop"})
    try:
        await holder.execute("begin; savepoint before")
        await holder.fetch("select from rota.jobs where job_id = $1 for no key update", job_id)
        who = f"pid {holder.get_server_pid()} (user postgres, application shop)"
        for command in (("why", job_id), ("job", "show", job_id)):
            assert who in (await rota(*command)).out
        assert (await rota("job", "show", job_id, "--json")).json["locked_by"] == who
        assert "locked" not in (await rota("why", other)).out
    finally:
        holder.terminate()


async def test_an_overdue_schedule_names_the_session_that_locks_its_clock(server: Server, tmp_path: Path) -> None:
    """The advice must not be to start a daemon."""
    async with role_database(server, "overdue") as roles, roles.connect() as root:
        schedule = await make_schedule(root, name="report", handler="ok", every=timedelta(seconds=1))
        await make_due(root, schedule, ago=timedelta(minutes=2))
        (tmp_path / "shop.py").write_text("import rota\napp = rota.App('shop')\n")
        rota = Shell(tmp_path, {"DATABASE_URL": roles.dsn("op"), "ROTA_APP": "shop:app"})
        async with roles.connect("app") as client:
            await client.execute("begin; savepoint before; update rota.schedules set every = interval '2 seconds'")
            who = f"pid {client.get_server_pid()} (user {roles.prefix}_app) locks its row"
            for command in (("check",), ("why", "report"), ("schedule", "show", "report")):
                assert who in (await rota(*command)).out, command
        await eventually(lambda: _names_no_session(rota), what="no session to be named")


async def _names_no_session(rota: Shell) -> bool:
    shown = await rota("schedule", "show", "report", "--json")
    return shown.json["locked_by"] is None


async def test_an_idle_transaction_timeout_of_the_database_ends_no_session_of_rota(
    fleet: Fleet, tmp_path: Path
) -> None:
    """Commands, and daemons at their start, use transactions of several round trips."""
    name = await fleet.value("select current_database()")
    await fleet.execute(f"alter database {name} set idle_in_transaction_session_timeout = 1")
    daemon = fleet.daemons.start()
    await _wait_until_ready(daemon)
    for command in ("status", "check"):
        result = await Shell(tmp_path, {"DATABASE_URL": fleet.dsn})(command)
        assert result.code in (0, 1), result
    assert daemon.stop() == 0
