"""The database goes away, comes back, is slow, or its packets vanish: the daemon stays up and goes on by itself."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import asyncpg
import pytest

from command_line import Shell
from network_faults import FaultyProxy, is_heartbeat, is_listener, isolated_network, reason_namespaces_unavailable
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from fleets import Fleet
    from processes import DaemonProcess
    from servers import DurableServer

NO_ISLAND = reason_namespaces_unavailable()
LEASE_S = 3.0


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_b67_a_restart_of_the_server_under_a_running_job_is_no_second_execution(
    restartable_fleet: Fleet, own_server: DurableServer, how: str
) -> None:
    """The lease lives on the job's row, not in a session: the holder extends it over a new connection."""
    daemons = [restartable_fleet.daemons.start(ROTA_LEASE="6s") for _ in range(2)]
    job = await restartable_fleet.enqueue("work", {"seconds": 8})
    await restartable_fleet.wait_for_execution(job)

    if how == "kill":
        own_server.kill()
    own_server.restart()

    await restartable_fleet.wait_for_state(job, "succeeded")
    failed = await restartable_fleet.fetch("select outcome, error_kind, error from rota.attempts")
    assert failed == [], "nothing went wrong with the first execution"
    assert len(await restartable_fleet.executions(job)) == 1
    assert await restartable_fleet.value("select attempts from rota.job_runs where job_id = $1", job) == 1
    assert all(daemon.alive for daemon in daemons)


async def test_b67_the_server_restarts_between_the_handlers_end_and_its_settlement(
    restartable_fleet: Fleet, own_server: DurableServer
) -> None:
    """What has been done and can't be written yet waits, with its slot taken; it isn't done again."""
    daemon = restartable_fleet.daemons.start(ROTA_LEASE="10s", WITNESS_DSN="")
    job = await restartable_fleet.enqueue("work", {"seconds": 1})

    async def running() -> bool:
        return await restartable_fleet.state(job) == "running"

    await eventually(running)
    own_server.stop()
    daemon.wait_for("service.failed", service="settle")
    own_server.start()

    await restartable_fleet.wait_for_state(job, "succeeded")
    assert await restartable_fleet.value("select attempts from rota.job_runs where job_id = $1", job) == 1


async def passing(seconds: float) -> None:
    """Return when so much time has passed."""
    until = time.monotonic() + seconds
    await eventually(lambda: time.monotonic() >= until, within=seconds + 10)


def pages(daemon: DaemonProcess) -> tuple[int, int]:
    """What the probes are told: (liveness, readiness)."""
    return daemon.get("healthz")[0], daemon.get("readyz")[0]


async def test_b81_an_outage_of_any_kind_ends_no_daemon(fleet: Fleet) -> None:
    """Refused, starting up, too many connections, shutting down, cut: one after the other, longer than readiness trusts.

    Liveness stays green, for a restart would mend nothing; readiness turns red; afterwards it goes on by itself.
    """
    with FaultyProxy(fleet.dsn) as proxy:
        daemon = fleet.daemons.start(dsn=proxy.dsn)
        assert pages(daemon) == (200, 200)
        before = await fleet.enqueue("work")
        await fleet.wait_for_state(before, "succeeded")

        ways: list[Callable[[], None]] = [
            proxy.refuse,
            lambda: proxy.answer("57P03", "the database system is starting up"),
            lambda: proxy.answer("53300", "sorry, too many clients already"),
            lambda: proxy.answer("57P01", "terminating connection due to administrator command"),
        ]
        proxy.refuse()  # first: else it is claimed on the way
        meanwhile = await fleet.enqueue("work")
        began = time.monotonic()
        for number, away in enumerate(ways, 1):
            away()
            await passing(began + number * 4.2 - time.monotonic())
            assert daemon.get("healthz")[0] == 200
        assert pages(daemon) == (200, 503)
        assert "the database was last reached" in daemon.get("readyz")[1]
        assert daemon.alive
        assert await fleet.state(meanwhile) == "due"

        proxy.heal()

        await fleet.wait_for_state(meanwhile, "succeeded", within=25)
        await eventually(lambda: pages(daemon) == (200, 200), within=20)
        assert daemon.noise() == []
        assert len(daemon.events("node.started")) == 1


async def test_another_installation_under_the_same_url_takes_a_new_start(fleet: Fleet) -> None:
    """Its keys begin otherwise: attempts of one job would have two of them, depending on which daemon makes them."""
    daemon = fleet.daemons.start()
    await fleet.execute("update rota.meta set installation_id = gen_random_uuid()")
    await fleet.fetch(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name ~ '^rota'"
    )
    assert daemon.ends() == 3
    assert "another installation" in daemon.said()
    assert "Traceback" not in daemon.said()


async def test_b81_a_socket_that_is_gone_ends_no_daemon(restartable_fleet: Fleet, own_server: DurableServer) -> None:
    """A stopped server takes its socket along, which is another error than a refused connection."""
    daemon = restartable_fleet.daemons.start()
    own_server.stop()
    daemon.wait_for("service.failed", service="dispatcher")
    await passing(2)
    status, body = daemon.get("healthz")
    assert status == 200
    told = json.loads(body)["services"]["dispatcher"]
    assert told["failures"] > 0
    assert told["age_s"] > 2
    assert told["database_away"]
    own_server.start()
    job = await restartable_fleet.enqueue("work")

    await restartable_fleet.wait_for_state(job, "succeeded")

    assert daemon.alive
    assert daemon.noise() == []


async def test_b79_a_listener_that_hears_nothing_any_more_is_noticed_and_holds_up_no_job(fleet: Fleet) -> None:
    """Packets of the listening connection vanish: nobody is told. The poll finds the job; a round trip finds the fault."""
    with FaultyProxy(fleet.dsn) as proxy:
        daemon = fleet.daemons.start(dsn=proxy.dsn, ROTA_POLL_INTERVAL="1s")
        daemon.wait_for("listener.up")
        warm = await fleet.enqueue("work")
        await fleet.wait_for_state(warm, "succeeded")

        proxy.freeze(is_listener)
        frozen = time.monotonic()
        job = await fleet.enqueue("work")
        await fleet.wait_for_execution(job, within=1.0 + 1.0)
        daemon.wait_for("listener.down", within=15)
        assert time.monotonic() - frozen < 15
        await eventually(lambda: daemon.metric("rota_listener_up") == 0, within=2)

        proxy.heal()
        await eventually(lambda: daemon.metric("rota_listener_up") == 1, within=20)
        assert len(daemon.events("listener.up")) == 2


async def test_b79_a_full_queue_of_notifications_holds_up_no_job(
    restartable_fleet: Fleet, own_server: DurableServer
) -> None:
    """Somebody listens and leaves a transaction open, until no NOTIFY on the whole server can commit: it was but a hint."""
    if await restartable_fleet.value("select current_setting('server_version_num')::int") < 170000:
        pytest.skip("the queue of notifications holds 8 GB before PostgreSQL 17")
    await restartable_fleet.execute("alter system set max_notify_queue_pages = 64")
    own_server.restart()
    daemon = restartable_fleet.daemons.start(ROTA_POLL_INTERVAL="1s")
    daemon.wait_for("listener.up")
    running = await restartable_fleet.enqueue("work", {"seconds": 600})
    await restartable_fleet.wait_for_execution(running)

    deaf, loud = await asyncpg.connect(own_server.dsn), await asyncpg.connect(own_server.dsn)
    await deaf.execute("listen elsewhere; begin; select 1")
    with pytest.raises(asyncpg.ProgramLimitExceededError):
        await loud.execute("select pg_notify('elsewhere', n || repeat('x', 7000)) from generate_series(1, 100000) as n")

    job = await restartable_fleet.enqueue("work")
    lost = await restartable_fleet.enqueue("gives_up")
    await restartable_fleet.execute(
        "insert into rota.schedules (name, handler, every) values ('beat', 'work', '1 second')"
    )
    await restartable_fleet.execute("select rota.pause_queue('mail'), rota.pause_handler('mail')")
    await restartable_fleet.execute("select rota.resume_queue('mail'), rota.resume_handler('mail')")
    assert await restartable_fleet.value("select rota.cancel($1)", running) == "requested"
    await restartable_fleet.wait_for_state(job, "succeeded")
    await restartable_fleet.wait_for_state(lost, "dead")
    await restartable_fleet.wait_for_state(running, "cancelled")
    assert not daemon.events("settlement.rejected")
    assert daemon.stop() == 0

    await deaf.close()
    assert await loud.fetchval("select pg_notification_queue_usage()") == 0
    await loud.close()


async def test_what_two_phases_commit_runs_like_all_else(restartable_fleet: Fleet, own_server: DurableServer) -> None:
    """PREPARE TRANSACTION refuses whoever has notified, so that a waiting dispatcher would keep such callers from inserting."""
    await restartable_fleet.execute("alter system set max_prepared_transactions = 5")
    own_server.restart()
    daemon = restartable_fleet.daemons.start()
    daemon.wait_for("listener.up")
    caller = await restartable_fleet.connection()
    await caller.execute("begin; set local rota.notify = off")
    job = await restartable_fleet.enqueue("work")
    await caller.execute("prepare transaction 'first'")
    await caller.execute("commit prepared 'first'")
    await restartable_fleet.wait_for_state(job, "succeeded")


async def test_slow_answers_cost_no_lease(fleet: Fleet) -> None:
    """A heartbeat that took a second must not rest ten: the database was slow, not away."""
    with FaultyProxy(fleet.dsn) as proxy:
        daemon = fleet.daemons.start(dsn=proxy.dsn, ROTA_LEASE="6s")
        job = await fleet.enqueue("work", {"seconds": 12})
        await fleet.wait_for_execution(job)
        proxy.slow(is_heartbeat, 0.2)

        await fleet.wait_for_state(job, "succeeded", within=30)

        assert len(await fleet.executions(job)) == 1
        assert daemon.metric("rota_leases_lost_total") == 0


async def test_a_look_that_took_long_does_not_put_off_the_next_ones(fleet: Fleet) -> None:
    """A server that stalled, or a process that was held still, in the middle of a look: what comes in next starts as ever."""
    with FaultyProxy(fleet.dsn) as proxy:
        daemon = fleet.daemons.start(dsn=proxy.dsn, ROTA_POLL_INTERVAL="500ms")
        daemon.wait_for("listener.up")
        proxy.slow(lambda name: name.startswith("rota ") and not is_listener(name) and not is_heartbeat(name), 2.5)
        await passing(4)
        proxy.heal()
        await passing(3)  # the last slow answer has come in

        job = await fleet.enqueue("work")

        await fleet.wait_for_execution(job, within=2.5)


@pytest.mark.skipif(NO_ISLAND is not None, reason=str(NO_ISLAND))
async def test_b59_a_node_cut_off_for_two_leases_gives_its_job_up_and_cannot_settle_it(fleet: Fleet) -> None:
    """By its own clock it interrupts the handler before another node can have been given the job; then it comes back.

    The cable of its network namespace is pulled: no FIN, no RST, only silence.
    """
    with isolated_network() as away, FaultyProxy(fleet.dsn, host=away.address) as proxy:
        cut_off = fleet.daemons.start(dsn=proxy.dsn, within=away.inside)
        job = await fleet.enqueue("work", {"seconds": 9})
        await fleet.wait_for_execution(job)
        other = fleet.daemons.start()

        away.cut()
        before, after = await fleet.wait_for_execution(job, 2)
        assert (before["pid"], after["pid"]) == (cut_off.pid, other.pid)
        first, second = await fleet.executions(job)
        # Its handler can't tell the witness over the cut: what it logs has to do.
        assert first["stopped_at"] is None or first["stopped_at"] < second["started_at"]
        away.reconnect()

        cut_off.wait_for("lease.lost", within=40)
        await fleet.wait_for_state(job, "succeeded")
        ended = await fleet.fetch("select fence_token, attempts from rota.job_runs where job_id = $1", job)
        assert [tuple(row) for row in ended] == [(after["fence_token"], 2)]
        again = await fleet.enqueue("work")
        other.kill()
        await fleet.wait_for_state(again, "succeeded", within=30)
        assert cut_off.alive
        assert cut_off.noise() == []


@pytest.mark.skipif(NO_ISLAND is not None, reason=str(NO_ISLAND))
async def test_a_thread_that_waits_for_a_server_behind_a_cut_link_is_given_back(fleet: Fleet) -> None:
    """Nothing can interrupt it but its own driver, which by itself would wait for two hours."""
    pytest.importorskip("psycopg")
    with isolated_network() as away, FaultyProxy(fleet.dsn, host=away.address) as proxy:
        cut_off = fleet.daemons.start(dsn=proxy.dsn, within=away.inside, WITNESS_DSN="")
        await fleet.enqueue("transactional thread", {"seconds": 300})
        asleep = "select exists (select from pg_stat_activity where query like 'select pg_sleep%')"
        await eventually(lambda: fleet.value(asleep))

        away.cut()

        cut_off.wait_for("lease.lost", within=40)
        away.reconnect()
        assert cut_off.alive


@pytest.mark.parametrize("on_the_way", ["", "handlers"])
async def test_b83_connections_cut_in_the_middle_cost_no_second_execution(fleet: Fleet, on_the_way: str) -> None:
    """A reply that is lost after COMMIT leaves the outcome unknown; it is asked for, or sent again under the same token."""
    daemon = fleet.daemons.start(ROTA_LEASE="10s")
    jobs = [await fleet.enqueue("transactional", {"seconds": 0.02}) for _ in range(200)]
    cuts = 0

    async def done() -> bool:
        nonlocal cuts
        cuts += await fleet.value(
            """
            select count(pg_terminate_backend(pid)) from pg_stat_activity
            where application_name ~ '^rota .*' and application_name like '%' || $1 and random() < 0.2
            """,
            on_the_way,
        )
        return not await fleet.value("select exists (select from rota.jobs where state = 'running' or attempt = 0)")

    await eventually(done, within=30)
    await fleet.execute("update rota.jobs set run_at = now()")
    await fleet.wait_until_empty()

    assert cuts
    assert daemon.alive
    assert daemon.noise() == []
    effects = await fleet.fetch("select job_id, count(*) as count from effects group by 1 order by 1")
    assert [(row["job_id"], row["count"]) for row in effects] == [(job, 1) for job in jobs]
    outcomes = await fleet.fetch("select distinct outcome from rota.job_runs")
    assert [row["outcome"] for row in outcomes] == ["succeeded"]


async def test_an_interruption_in_the_middle_of_begin_leaves_no_transaction_behind(fleet: Fleet) -> None:
    """Who is cut off there can't know whether the transaction has begun: its connection must not go to the next job."""
    daemon = fleet.daemons.start(WITNESS_DSN="", ROTA_QUEUES="default:10")
    await fleet.execute(
        """
        insert into rota.jobs (handler, payload, max_attempts, timeout)
        select 'transactional', '{"seconds": 0}', 1, (1 + n % 100) * interval '0.5 milliseconds'
        from generate_series(1, 1000) as n
        """
    )

    await fleet.wait_until_empty()

    succeeded = await fleet.value("select count(*) from rota.job_runs where outcome = 'succeeded'")
    assert await fleet.value("select count(*) from effects") == succeeded
    assert await fleet.value("select count(*) from rota.dead_letters") == 1000 - succeeded
    assert 0 < succeeded < 1000, "some were cut off, and some were not"
    assert daemon.noise() == []
    assert daemon.alive


async def test_whoever_watches_is_told_of_the_outage_and_goes_on_watching(fleet: Fleet, tmp_path: Path) -> None:
    """A screen that goes out with the database has to be started anew in the very minute in which nobody has time for it."""
    screen, terminal = pty.openpty()
    os.set_blocking(screen, False)
    shown = ""

    def shows(words: str) -> bool:
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(screen, 1 << 16).decode(errors="replace")
        return words in shown

    with FaultyProxy(fleet.dsn) as proxy:
        environ = Shell(
            tmp_path, {"DATABASE_URL": proxy.dsn, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        ).environment()
        watching = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rota", "status", "--watch"),
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env=environ,
        )
        try:
            await eventually(lambda: shows("no daemon is alive"), within=20)
            proxy.refuse()
            await eventually(lambda: shows("no database answers"), within=20)
            proxy.heal()
            shown = ""
            fleet.daemons.start()
            await eventually(lambda: shows("slots"), within=20)
            watching.send_signal(signal.SIGINT)
            # Looking on: a screen that nobody reads is full after a while, and holds up whoever writes to it.
            await eventually(lambda: shows("\x1b[?1049l") and watching.returncode is not None, within=20)
            assert watching.returncode == 0
        finally:
            with suppress(ProcessLookupError):
                watching.kill()
            await watching.wait()
            os.close(screen)
            os.close(terminal)
