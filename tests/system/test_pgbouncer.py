"""All traffic through PgBouncer in transaction mode, where each transaction may use another server connection."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

import pgbouncer_app
from command_line import Shell
from in_process_daemons import run_node
from pgbouncer_server import find_pgbouncer, pgbouncer
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleets import Fleet

pytestmark = pytest.mark.skipif(find_pgbouncer() is None, reason="the package pgbouncer is not installed")


@pytest.fixture
def pooled(fleet: Fleet, tmp_path: Path) -> Iterator[str]:
    """The DSN of a PgBouncer in front of the fleet's database."""
    with pgbouncer(fleet.dsn, tmp_path) as dsn:
        yield dsn


async def test_claims_settlements_heartbeats_and_transactions_work_through_a_pooler(fleet: Fleet, pooled: str) -> None:
    """Several daemons share five server connections."""
    daemons = [fleet.daemons.start(dsn=pooled) for _ in range(3)]
    small = [await fleet.enqueue("noop") for _ in range(500)]
    effects = [await fleet.enqueue("transactional", {"seconds": 0.02}) for _ in range(60)]
    steps = [await fleet.enqueue("steps", {"steps": 3}) for _ in range(10)]
    failing = [
        await fleet.enqueue("flaky", {"fails": 1}, max_attempts=2, backoff_base="0.1 s", backoff_cap="0.2 s")
        for _ in range(10)
    ]
    long = await fleet.enqueue("work", {"seconds": 7})  # more than two leases

    await fleet.wait_until_empty()

    ended = await fleet.fetch("select outcome, count(*) as count from rota.job_runs group by 1")
    assert {row["outcome"]: row["count"] for row in ended} == {"succeeded": len(small) + len(effects) + len(steps) + 1}
    assert await fleet.value("select count(*) from rota.dead_letters where attempt = 2") == len(failing)
    assert len(await fleet.executions(long)) == 1, "heartbeats went through"

    written = await fleet.fetch("select job_id, step, count(*) as count from effects group by 1, 2")
    assert {row["count"] for row in written} == {1}
    assert len(written) == len(effects) + 3 * len(steps)

    busy = await fleet.value("select count(*) from pg_stat_activity where datname = current_database()")
    assert busy <= 5 + 1 + 3 * 4, (
        "the daemons came through the pooler: only it, the witnesses and this test are connected"
    )

    for daemon in daemons:
        assert daemon.alive
        assert daemon.unexpected_output() == []
        assert daemon.events("service.failed") == []
        assert daemon.stop() == 0
    locks = await fleet.value("select count(*) from pg_locks where locktype = 'advisory'")
    assert locks == 0, "no session lock stays behind in a server connection"


async def test_transactions_of_threads_and_processes_leave_no_prepared_statement(
    fleet: Fleet, pooled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named statement would stay in the server connection and disturb the next client."""
    folder = str(Path(pgbouncer_app.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    async with run_node(pooled, pgbouncer_app.app, reference="pgbouncer_app:app", log__level="warning") as node:
        jobs = [await fleet.enqueue("thread") for _ in range(30)]
        jobs += [await fleet.enqueue("process") for _ in range(4)]
        await fleet.wait_until_empty()
        assert not node.events_named("job.settled", settlement="dead")
    assert await fleet.value("select count(*) from rota.job_runs where outcome = 'succeeded'") == len(jobs)


async def test_a_daemon_behind_a_pooler_warns_at_its_start_and_polls(fleet: Fleet, pooled: str) -> None:
    """LISTEN receives nothing through a pooler, and the warning says what to set."""
    daemon = fleet.daemons.start(dsn=pooled, ROTA_POLL_INTERVAL="500ms")

    advice = " ".join(event["advice"] for event in daemon.events("node.advised"))

    assert "notifications can't pass" in advice
    assert "500ms" in advice or "0.5 s" in advice
    assert "ROTA_DIRECT_URL" in advice
    assert daemon.events("listener.up") == []
    assert daemon.metric("rota_listener_up") == 0
    job = await fleet.enqueue("work")
    await fleet.wait_for_execution(job, within=2)


async def test_with_a_direct_url_inserts_and_cancellations_notify_at_once(fleet: Fleet, pooled: str) -> None:
    """Only the listening connection is direct. The poll interval is a minute, so polling cannot explain the result."""
    daemon = fleet.daemons.start(dsn=pooled, ROTA_DIRECT_URL=fleet.dsn, ROTA_POLL_INTERVAL="60s", ROTA_LEASE="30s")
    daemon.wait_for("listener.up")
    advice = " ".join(event["advice"] for event in daemon.events("node.advised"))
    assert "ROTA_DIRECT_URL" in advice

    async def is_listening() -> bool:
        return bool(
            await fleet.value("select exists (select from pg_locks where locktype = 'advisory' and mode = 'ShareLock')")
        )

    await eventually(is_listening, what="a dispatcher that waits to be told")
    assert daemon.metric("rota_listener_up") == 1

    job = await fleet.enqueue("work", {"seconds": 30})
    await fleet.wait_for_execution(job, within=3)
    assert await fleet.value("select rota.cancel($1)", job) == "requested"
    await fleet.wait_for_state(job, "cancelled", within=3)


async def test_a_migration_through_a_pooler_is_rejected_and_leaves_no_lock_behind(
    fleet: Fleet, pooled: str, tmp_path: Path
) -> None:
    """A session lock would stay in a server connection and block every later migration."""
    rota = Shell(tmp_path, {})
    for _ in range(2):
        refused = await rota("migrate", "--dsn", pooled)
        assert refused.code == 3
        assert "connection pooler" in refused.err
        assert "ROTA_DIRECT_URL" in refused.err
    for _ in range(6):
        checked = await rota("migrate", "--check", "--dsn", pooled)
        assert (checked.code, checked.err) == (0, "")
    assert (await rota("migrate", "--dsn", pooled, ROTA_DIRECT_URL=fleet.dsn)).code == 0
    assert await fleet.value("select count(*) from pg_locks where locktype = 'advisory'") == 0


async def test_a_client_enqueues_through_the_pooler_in_its_own_transaction(fleet: Fleet, pooled: str) -> None:
    fleet.daemons.start(dsn=pooled)
    conn = await asyncpg.connect(pooled, statement_cache_size=0)
    try:
        for turn in range(20):
            transaction = conn.transaction()
            await transaction.start()
            await conn.fetchval("select job_id from rota.enqueue(handler => 'work')")
            await (transaction.commit() if turn % 2 else transaction.rollback())
    finally:
        await conn.close()

    await fleet.wait_until_empty()

    assert await fleet.value("select count(*) from rota.job_runs") == 10
