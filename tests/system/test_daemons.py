"""Daemons as processes: what happens to their jobs when one is killed, stopped, frozen or ordered to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from processes import SOURCE, START_TIMEOUT_S, frozen
from rota.daemon.daemon import HANDLER_LEFT_BEHIND
from waiting import eventually

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from fleets import Fleet

LEASE_S = 3.0
REAP_S = 0.5
MARGIN_S = 5.0


async def test_a_killed_daemons_job_runs_elsewhere_soon_after_its_lease(fleet: Fleet) -> None:
    """Another daemon has the job within the lease, one sweep and 5 s.

    The fence token is larger and the idempotency key is the same, so the effects can be told apart and made only once.
    """
    first = fleet.daemons.start()
    job = await fleet.enqueue("work", {"seconds": 60})
    await fleet.wait_for_execution(job)
    fleet.daemons.start()

    first.kill()
    killed = time.monotonic()

    before, after = await fleet.wait_for_execution(job, 2, within=LEASE_S + REAP_S + MARGIN_S)
    assert time.monotonic() - killed < LEASE_S + REAP_S + MARGIN_S
    assert before["pid"] == first.pid != after["pid"]
    assert before["fence_token"] < after["fence_token"]
    assert before["key"] == after["key"]
    assert (before["attempt"], after["attempt"]) == (1, 2)
    assert after["started_at"] - before["started_at"] > timedelta(seconds=LEASE_S - 0.1), "not before the lease's end"

    lost = await fleet.fetch("select outcome from rota.attempts where job_id = $1", job)
    assert [row["outcome"] for row in lost] == ["lost"]


async def test_a_graceful_stop_loses_no_job_and_uses_no_attempt(fleet: Fleet) -> None:
    """Running jobs finish, and the next daemon finds the others unchanged."""
    first = fleet.daemons.start(ROTA_QUEUES="default:5")
    jobs = [await fleet.enqueue("work", {"seconds": 1.0}) for _ in range(12)]
    await eventually(lambda: fleet.value("select count(*) >= 5 from executions"), what="five jobs under way")

    code = first.stop()

    assert code == 0

    rows = await fleet.fetch("select state, attempt from rota.jobs")
    assert rows, "some were still waiting"
    assert {(row["state"], row["attempt"]) for row in rows} == {("scheduled", 0)}
    assert await fleet.value("select bool_and(stopped_at is not null and reason is null) from executions")
    assert await fleet.value("select count(*) from rota.nodes") == 0

    fleet.daemons.start()
    await fleet.wait_until_empty()
    has_ended = await fleet.fetch("select job_id, outcome, attempts from rota.job_runs")
    assert {(row["outcome"], row["attempts"]) for row in has_ended} == {("succeeded", 1)}
    assert sorted(row["job_id"] for row in has_ended) == jobs
    assert await fleet.value("select count(*) from executions") == len(jobs)


async def test_jobs_claimed_ahead_of_two_busy_slots_are_given_back_without_an_attempt(fleet: Fleet) -> None:
    """After many quick jobs, a daemon claims more than it has slots for. When its slots get slow jobs, others must get the rest."""
    await fleet.execute("select rota.pause_queue('default', 'until all are stored')")
    await fleet.execute(
        "insert into rota.jobs (handler, payload, run_at) select case when n in (4001, 4002) then 'work' else 'noop' end,"
        " case when n in (4001, 4002) then jsonb_build_object('seconds', 600) end, now() - interval '1 hour' + n * interval '1 ms'"
        " from generate_series(1, 4500) as n"
    )
    fleet.daemons.start(ROTA_QUEUES="default:2")
    await fleet.execute("select rota.resume_queue('default')")

    await eventually(
        lambda: fleet.value(
            "select count(*) filter (where state = 'running') = 2 and count(*) > 2 and sum(releases) > 0 from rota.jobs"
        ),
        within=30,
        what="two slow jobs under way, and what was claimed ahead of them given back",
    )
    assert not await fleet.value("select max(attempt) from rota.jobs where state = 'scheduled'")
    fleet.daemons.start(ROTA_QUEUES="default:2")

    await eventually(
        lambda: fleet.value("select count(*) = 2 from rota.jobs"), within=30, what="only the slow jobs left"
    )
    assert await fleet.value("select max(attempts) from rota.job_runs") == 1


async def test_the_second_signal_interrupts_running_jobs_and_gives_their_attempts_back(fleet: Fleet) -> None:
    daemon = fleet.daemons.start()
    job = await fleet.enqueue("work", {"seconds": 60})
    thread = await fleet.enqueue("thread", {"seconds": 60})
    await fleet.wait_for_execution(job)
    await fleet.wait_for_execution(thread)
    daemon.send(signal.SIGTERM)
    daemon.wait_for("node.stopping", how="drain")
    assert daemon.alive

    daemon.send(signal.SIGTERM)

    assert daemon.wait_for_exit(within=5) == 0

    for each in (job, thread):
        row = await fleet.job(each)
        assert row is not None
        assert (row["state"], row["attempt"], row["releases"], row["losses"]) == ("scheduled", 0, 1, 0)
        ((reason,),) = [[found["reason"]] for found in await fleet.executions(each)]
        assert reason == "drain"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_third_signal_ends_the_process_immediately(fleet: Fleet, number: signal.Signals) -> None:
    """Even a handler that does not stop cannot prevent it; the lease brings its job back."""
    daemon = fleet.daemons.start(ROTA_DRAIN_GRACE="60s")
    job = await fleet.enqueue("thread", {"seconds": 60, "deaf": True})
    await fleet.wait_for_execution(job)
    daemon.send(number)
    daemon.wait_for("node.stopping", how="drain")
    daemon.send(number)
    daemon.wait_for("node.stopping", how="interrupt")

    daemon.send(number)

    assert daemon.wait_for_exit(within=5) == -number
    fleet.daemons.start()
    await fleet.wait_for_execution(job, 2)


async def test_a_handler_that_blocks_the_loop_does_not_prevent_the_stop(fleet: Fleet) -> None:
    """The log says what happens to the job."""
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="1s", ROTA_DRAIN_GRACE="500ms")
    job = await fleet.enqueue("blocks", {"seconds": 60})
    await fleet.wait_for_execution(job)

    assert daemon.stop(within=15) == 1

    assert "leases" in daemon.wait_for("node.hung")["why"]
    fleet.daemons.start()
    await fleet.wait_for_execution(job, 2)


async def test_the_third_signal_ends_a_process_whose_loop_is_blocked(fleet: Fleet) -> None:
    """A blocked loop never handles the second signal."""
    daemon = fleet.daemons.start(ROTA_DRAIN_GRACE="60s")
    await fleet.wait_for_execution(await fleet.enqueue("blocks", {"seconds": 60}))

    def is_handled_again() -> bool:  # the kernel merges equal signals that are pending
        daemon.send(signal.SIGTERM)
        return not daemon.alive

    await eventually(is_handled_again, within=5, what="the end of the process")

    assert daemon.wait_for_exit() == -signal.SIGTERM


async def test_a_thread_that_does_not_end_is_left_behind_and_its_job_waits_for_the_lease(fleet: Fleet) -> None:
    """The process ends at the deadline, and the next attempt begins only when the lease of this one is over."""
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="1s")
    job = await fleet.enqueue("thread", {"seconds": 60, "deaf": True})
    await fleet.wait_for_execution(job)

    assert daemon.stop(within=6) == HANDLER_LEFT_BEHIND

    daemon.wait_for("handler.stuck", job_id=job)
    assert len(daemon.events("handler.stuck", job_id=job)) == 1

    row = await fleet.job(job)
    assert row is not None
    assert (row["state"], row["attempt"]) == ("scheduled", 0)
    assert row["run_at"] > await fleet.value("select clock_timestamp() - interval '1 second'"), "not before the lease"


async def test_a_job_whose_release_is_rejected_does_not_keep_the_process_alive(fleet: Fleet) -> None:
    """Its lease expires later; the other job is released."""
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="1s")
    rejected, neighbour = [await fleet.enqueue("thread", {"seconds": 60, "deaf": True}) for _ in range(2)]
    for job in (rejected, neighbour):
        await fleet.wait_for_execution(job)
    await fleet.execute(
        f"""
        create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
        create trigger refuse before update on rota.jobs for each row when (new.job_id = {rejected} and new.state = 'scheduled')
        execute function refuse();
        """
    )

    assert daemon.stop(within=10) == HANDLER_LEFT_BEHIND

    daemon.wait_for("settlement.rejected", job_id=rejected)
    rows = [await fleet.job(job) for job in (rejected, neighbour)]
    assert [row and row["state"] for row in rows] == ["running", "scheduled"]


async def test_a_stop_while_the_app_is_imported_exits_with_0(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "slow_app.py").write_text(
        "import pathlib, threading\npathlib.Path(__file__).with_suffix('.seen').touch()\nthreading.Event().wait(60)\n"
    )
    daemon = fleet.daemons.launch(arguments=("--app", "slow_app:app"), PYTHONPATH=f"{tmp_path}{os.pathsep}{SOURCE}")
    await eventually((tmp_path / "slow_app.seen").exists, within=START_TIMEOUT_S, what="the import of the app")

    assert daemon.stop(within=5) == 0


async def test_a_stop_while_the_database_does_not_answer_exits_with_0(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        daemon = fleet.daemons.launch(dsn=f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/none")
        silent.settimeout(START_TIMEOUT_S)
        with silent.accept()[0]:
            assert daemon.stop(within=5) == 0


async def test_output_of_a_handler_appears_at_once(fleet: Fleet) -> None:
    """Python would buffer 8 KiB of a file's output, which a killed process loses."""
    daemon = fleet.daemons.start(PYTHONUNBUFFERED="")
    await fleet.enqueue("prints", {"text": "seen at once"})
    await eventually(lambda: "seen at once" in daemon.output_text(), what="the print")


@pytest.mark.parametrize("handler", ["forks", "forks_apart"])
async def test_a_signal_to_a_forked_child_does_not_stop_the_daemon(fleet: Fleet, handler: str) -> None:
    """The child inherits the daemon's signal handlers and its wake-up pipe."""
    daemon = fleet.daemons.start()
    for _ in range(3):
        await fleet.wait_for_state(await fleet.enqueue(handler, [-1, 2]), "succeeded")
    assert daemon.alive
    assert daemon.events("node.stopping") == []
    assert daemon.stop() == 0


@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", "<&- >&- 2>&-", "2>&1 | head -1"])
async def test_a_log_that_cannot_be_written_costs_no_job(fleet: Fleet, streams: str) -> None:
    """This happens when the disk is full or the log collector is gone."""
    shell = ("sh", "-c", f'"$@" {streams}', "sh")
    fleet.daemons.launch(within=shell)
    for handler in ("noop", "raises_permanent", "noop"):
        job = await fleet.enqueue(handler, {})
        await fleet.wait_for_state(job, "dead" if handler == "raises_permanent" else "succeeded")
    pid = await fleet.value("select pid from rota.nodes")
    os.kill(pid, signal.SIGTERM)

    async def is_deregistered() -> bool:
        return not await fleet.value("select count(*) from rota.nodes")

    await eventually(is_deregistered, what="the row of the daemon to be deleted")


async def test_a_frozen_daemons_late_writes_are_rejected(fleet: Fleet) -> None:
    """The process is stopped beyond its lease and then continues as if it still had the job.

    Its handler tries a checkpoint, progress and a transaction, and the daemon tries to settle.
    """
    zombie = fleet.daemons.start()
    job = await fleet.enqueue("ignores_interruption", {"seconds": 8})
    await fleet.wait_for_execution(job)

    with frozen(zombie):
        other = fleet.daemons.start()
        before, after = await fleet.wait_for_execution(job, 2)
        assert after["pid"] == other.pid
        row_before = await fleet.job(job)

    zombie.wait_for("lease.lost")

    assert [event["what"] for event in zombie.events("write.refused")] == ["checkpoint", "progress", "complete"]

    row = await fleet.job(job)
    assert row is not None
    assert row_before is not None
    assert row["fence_token"] == row_before["fence_token"] == after["fence_token"] > before["fence_token"]
    assert (row["checkpoint"], row["progress"], row["state"]) == (None, None, "running")
    assert await fleet.value("select count(*) from effects") == 0

    await fleet.wait_for_state(job, "succeeded")
    assert len(await fleet.executions(job)) == 2

    has_ended = await fleet.fetch("select fence_token, attempts from rota.job_runs where job_id = $1", job)
    assert [(each["fence_token"], each["attempts"]) for each in has_ended] == [(after["fence_token"], 2)]
    assert zombie.metric("rota_stale_writes_total") == 3
    assert zombie.metric("rota_leases_lost_total") == 1


async def test_leases_are_extended_until_the_last_job_of_a_drain_has_ended(fleet: Fleet) -> None:
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="30s")
    other = fleet.daemons.start()
    job = await fleet.enqueue("work", {"seconds": 6.5})
    (execution,) = await fleet.wait_for_execution(job)
    draining = daemon if execution["pid"] == daemon.pid else other
    draining.send(signal.SIGTERM)
    draining.wait_for("node.stopping", how="drain")

    leases: set[datetime] = set()

    async def has_ended() -> bool:
        row = await fleet.job(job)
        if row is not None:
            leases.add(row["lease_expires_at"])
        return row is None

    await eventually(has_ended, within=15, what="the end of the job")

    assert draining.wait_for_exit() == 0
    assert len(leases) >= 4, "extended again and again"
    assert await fleet.state(job) == "succeeded"
    assert len(await fleet.executions(job)) == 1
    assert await fleet.value("select attempts from rota.job_runs where job_id = $1", job) == 1


async def test_a_daemon_that_cannot_reach_the_database_at_its_start_exits(fleet: Fleet) -> None:
    """Daemons wait only for a database that they have reached before, so that a wrong URL is noticed."""
    daemon = fleet.daemons.launch(dsn="postgresql://nobody:s3cret@127.0.0.1:1/none")

    assert daemon.wait_for_exit() == 3

    result = daemon.output_text()
    assert "127.0.0.1:1" in result
    assert "s3cret" not in result
    assert "Traceback" not in result


async def test_a_job_that_kills_its_daemons_is_buried_and_jobs_beside_it_succeed(fleet: Fleet) -> None:
    await fleet.execute(
        """
        insert into rota.jobs (handler, run_at, backoff_base, payload)
        select 'work', now() - interval '1 minute', '200 ms', '{"seconds": 0.2}' from generate_series(1, 40)
        """
    )
    poison = await fleet.enqueue("kills", backoff_base="200 ms")
    await fleet.execute("update rota.jobs set losses = 2, attempt = 2")
    await fleet.execute(
        "insert into rota.attempts (job_id, fence_token, attempt, outcome, started_at) "
        "select job_id, n, n, 'lost', now() from rota.jobs, generate_series(1, 2) as n"
    )

    async def is_over() -> bool:
        return not await fleet.value("select exists (select from rota.jobs)")

    deaths = 0
    daemon = fleet.daemons.start(ROTA_QUEUES="default:50")

    async with asyncio.timeout(120):
        while not await is_over():
            if not daemon.alive:
                deaths += 1
                daemon = fleet.daemons.start(ROTA_QUEUES="default:50")
            await fleet.value("select pg_sleep(0.1)")

    assert await fleet.value("select count(*) from rota.job_runs where outcome = 'succeeded'") == 40

    letters = await fleet.fetch("select job_id, reason, losses from rota.dead_letters")
    assert [tuple(row) for row in letters] == [(poison, "poison", 3)]
    assert deaths <= 2
    assert (
        await fleet.value("select count(distinct job_id) from rota.attempts where outcome = 'lost' and fence_token > 2")
        > 1
    )
