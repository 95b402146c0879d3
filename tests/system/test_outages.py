"""The database goes away, is slow, or loses packets: daemons stay up and recover by themselves."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from command_line import Shell
from network_faults import FaultyProxy, is_heartbeat, is_listener, isolated_network, reason_namespaces_unavailable
from waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from fleets import Fleet
    from processes import DaemonProcess
    from servers import DurableServer

NAMESPACES_UNAVAILABLE = reason_namespaces_unavailable()


def read_probes(daemon: DaemonProcess) -> tuple[int, int]:
    """Return the HTTP status of (liveness, readiness)."""
    return daemon.get("healthz")[0], daemon.get("readyz")[0]


def dispatcher_health(daemon: DaemonProcess) -> dict[str, Any]:
    """Return what /healthz reports of the dispatcher; the status must be 200."""
    status, body = daemon.get("healthz")
    assert status == 200
    health: dict[str, Any] = json.loads(body)["services"]["dispatcher"]
    return health


async def test_no_kind_of_outage_ends_a_daemon(fleet: Fleet) -> None:
    """Liveness stays 200, because a restart would not help; readiness turns to 503 and recovers."""
    with FaultyProxy(fleet.dsn) as proxy:
        daemon = fleet.daemons.start(dsn=proxy.dsn, ROTA_LOG_LEVEL="debug")
        await fleet.wait_for_state(await fleet.enqueue("work"), "succeeded")
        assert read_probes(daemon) == (200, 200)

        proxy.refuse()
        meanwhile = await fleet.enqueue("work")
        daemon.wait_for("service.failed")
        for sqlstate, text, kind in (
            ("57P03", "the database system is starting up", "CannotConnectNowError"),
            ("53300", "sorry, too many clients already", "TooManyConnectionsError"),
            ("57P01", "terminating connection due to administrator command", "AdminShutdownError"),
        ):
            proxy.answer(sqlstate, text)
            daemon.wait_for("service.failed", kind=kind)
            assert daemon.get("healthz")[0] == 200
        await eventually(lambda: read_probes(daemon) == (200, 503), what="a red readiness")
        assert await fleet.state(meanwhile) == "due"

        proxy.heal()

        await fleet.wait_for_state(meanwhile, "succeeded", within=25)
        await eventually(lambda: read_probes(daemon) == (200, 200), within=20)
        assert daemon.unexpected_output() == []
        assert len(daemon.events("node.started")) == 1


async def test_a_daemon_exits_when_its_url_leads_to_another_installation(fleet: Fleet) -> None:
    """The idempotency keys there have another prefix, so two attempts of one job could have different keys."""
    daemon = fleet.daemons.start()
    await fleet.execute("update rota.meta set installation_id = gen_random_uuid()")
    await fleet.fetch(
        "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and application_name ~ '^rota'"
    )
    assert daemon.wait_for_exit() == 3
    assert "another installation" in daemon.output_text()
    assert "Traceback" not in daemon.output_text()


async def test_a_missing_socket_file_ends_no_daemon(restartable_fleet: Fleet, own_server: DurableServer) -> None:
    """A stopped server removes its socket, which is another error than a refused connection."""
    daemon = restartable_fleet.daemons.start()
    own_server.stop()
    daemon.wait_for("service.failed", service="dispatcher")
    await eventually(lambda: dispatcher_health(daemon)["age_s"] > 1, what="a stale dispatcher")
    health = dispatcher_health(daemon)
    assert (health["failures"] > 0, health["database_away"]) == (True, True)

    own_server.start()
    job = await restartable_fleet.enqueue("work")

    await restartable_fleet.wait_for_state(job, "succeeded")

    assert daemon.alive
    assert daemon.unexpected_output() == []


async def test_a_dead_listening_connection_is_noticed_and_delays_no_job(fleet: Fleet) -> None:
    """Polling finds the job, and a round trip detects the dead connection."""
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


async def test_a_full_notification_queue_delays_no_job(restartable_fleet: Fleet, own_server: DurableServer) -> None:
    """A listener with an open transaction can fill it, until no NOTIFY on the server commits."""
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
    lost = await restartable_fleet.enqueue("raises_permanent")
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


async def test_jobs_inserted_by_two_phase_commit_run_like_others(
    restartable_fleet: Fleet, own_server: DurableServer
) -> None:
    """PREPARE TRANSACTION fails after a NOTIFY, so the insert must not notify."""
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
    """A slow heartbeat must not pause for ten times its duration."""
    with FaultyProxy(fleet.dsn) as proxy:
        daemon = fleet.daemons.start(dsn=proxy.dsn, ROTA_LEASE="6s")
        job = await fleet.enqueue("work", {"seconds": 8})
        await fleet.wait_for_execution(job)
        proxy.slow(is_heartbeat, 0.2)

        await fleet.wait_for_state(job, "succeeded", within=30)

        assert len(await fleet.executions(job)) == 1
        assert daemon.metric("rota_leases_lost_total") == 0


async def test_a_claim_that_took_long_does_not_delay_later_jobs(fleet: Fleet) -> None:
    """The server may have stalled, or the process may have been stopped."""
    with FaultyProxy(fleet.dsn) as proxy:
        daemon = fleet.daemons.start(dsn=proxy.dsn, ROTA_POLL_INTERVAL="500ms")
        daemon.wait_for("listener.up")
        proxy.slow(lambda name: name.startswith("rota ") and not is_listener(name) and not is_heartbeat(name), 2.5)
        await eventually(lambda: dispatcher_health(daemon)["age_s"] > 2, what="a slow claim")
        proxy.heal()
        await eventually(lambda: dispatcher_health(daemon)["age_s"] < 1, what="the end of the slow claim")

        job = await fleet.enqueue("work")

        await fleet.wait_for_execution(job, within=2.5)


@pytest.mark.skipif(NAMESPACES_UNAVAILABLE is not None, reason=str(NAMESPACES_UNAVAILABLE))
async def test_a_node_cut_off_for_two_leases_gives_its_job_up_and_cannot_settle_it(fleet: Fleet) -> None:
    """It interrupts the handler before another node can claim the job.

    The link of its network namespace is taken down, so there is no FIN and no RST.
    """
    with isolated_network() as network, FaultyProxy(fleet.dsn, host=network.address) as proxy:
        cut_off = fleet.daemons.start(dsn=proxy.dsn, within=network.command_prefix)
        job = await fleet.enqueue("work", {"seconds": 9})
        await fleet.wait_for_execution(job)
        other = fleet.daemons.start()

        network.cut()
        before, after = await fleet.wait_for_execution(job, 2)
        assert (before["pid"], after["pid"]) == (cut_off.pid, other.pid)

        first, second = await fleet.executions(job)
        # The handler cannot reach the database, so its log line is the evidence.
        assert first["stopped_at"] is None or first["stopped_at"] < second["started_at"]

        network.reconnect()

        cut_off.wait_for("lease.lost", within=40)
        await fleet.wait_for_state(job, "succeeded")
        ended = await fleet.fetch("select fence_token, attempts from rota.job_runs where job_id = $1", job)
        assert [tuple(row) for row in ended] == [(after["fence_token"], 2)]

        again = await fleet.enqueue("work")
        other.kill()
        await fleet.wait_for_state(again, "succeeded", within=30)
        assert cut_off.alive
        assert cut_off.unexpected_output() == []


@pytest.mark.skipif(NAMESPACES_UNAVAILABLE is not None, reason=str(NAMESPACES_UNAVAILABLE))
async def test_a_thread_that_waits_for_a_server_behind_a_cut_link_is_released(fleet: Fleet) -> None:
    """Only its driver can interrupt it, and would by default wait for two hours."""
    pytest.importorskip("psycopg")
    with isolated_network() as network, FaultyProxy(fleet.dsn, host=network.address) as proxy:
        cut_off = fleet.daemons.start(dsn=proxy.dsn, within=network.command_prefix, WITNESS_DSN="")
        await fleet.enqueue("transactional thread", {"seconds": 300})
        asleep = "select exists (select from pg_stat_activity where query like 'select pg_sleep%')"
        await eventually(lambda: fleet.value(asleep))

        network.cut()

        cut_off.wait_for("lease.lost", within=40)
        network.reconnect()

        assert cut_off.alive


@pytest.mark.parametrize("on_the_way", ["", "handlers"])
async def test_cut_connections_cause_no_second_execution(fleet: Fleet, on_the_way: str) -> None:
    """After a lost reply to COMMIT, the daemon looks the outcome up or sends it again with the same token."""
    daemon = fleet.daemons.start(ROTA_LEASE="10s")
    jobs = [await fleet.enqueue("transactional", {"seconds": 0.02}) for _ in range(200)]
    cuts = 0

    async def is_done() -> bool:
        nonlocal cuts
        cuts += await fleet.value(
            """
            select count(pg_terminate_backend(pid)) from pg_stat_activity
            where application_name ~ '^rota .*' and application_name like '%' || $1 and random() < 0.2
            """,
            on_the_way,
        )
        return not await fleet.value("select exists (select from rota.jobs where state = 'running' or attempt = 0)")

    await eventually(is_done, within=30)
    await fleet.execute("update rota.jobs set run_at = now()")
    await fleet.wait_until_empty()

    assert cuts
    assert daemon.alive
    assert daemon.unexpected_output() == []

    effects = await fleet.fetch("select job_id, count(*) as count from effects group by 1 order by 1")
    assert [(row["job_id"], row["count"]) for row in effects] == [(job, 1) for job in jobs]

    outcomes = await fleet.fetch("select distinct outcome from rota.job_runs")
    assert [row["outcome"] for row in outcomes] == ["succeeded"]


async def test_an_interruption_during_begin_leaves_no_open_transaction(fleet: Fleet) -> None:
    """It is unknown whether the transaction has begun, so the connection must not serve another job."""
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
    assert daemon.unexpected_output() == []
    assert daemon.alive


async def test_status_watch_shows_an_outage_and_continues_afterwards(fleet: Fleet, tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    os.set_blocking(screen, False)
    shown = ""

    def has_shown(words: str) -> bool:
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
            await eventually(lambda: has_shown("no daemon is alive"), within=20)
            proxy.refuse()
            await eventually(lambda: has_shown("no database answers"), within=20)
            proxy.heal()
            shown = ""
            fleet.daemons.start()
            await eventually(lambda: has_shown("slots"), within=20)
            watching.send_signal(signal.SIGINT)
            # Keep reading: a terminal that is not read fills up and blocks the writer.
            await eventually(lambda: has_shown("\x1b[?1049l") and watching.returncode is not None, within=20)
            assert watching.returncode == 0
        finally:
            with suppress(ProcessLookupError):
                watching.kill()
            await watching.wait()
            os.close(screen)
            os.close(terminal)
