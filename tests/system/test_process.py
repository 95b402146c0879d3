"""The daemon as a process: how handlers, signals, pipes and forks affect it, and how it exits."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING

import pytest

from network_faults import free_port
from process_app import PROCESS_TREE
from processes import is_running
from rota.daemon.daemon import HANDLER_LEFT_BEHIND
from waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from fleets import Fleet


@pytest.mark.parametrize("by", ["exit", "interrupt", "exit in a task", "stop"])
async def test_a_handler_that_breaks_the_main_loop_makes_the_daemon_drain_and_exit_with_1(
    fleet: Fleet, by: str
) -> None:
    """Other jobs finish or are released with their attempt, and the log names the handler."""
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="4s")
    short = await fleet.enqueue("work", {"seconds": 2})
    long = await fleet.enqueue("work", {"seconds": 600})
    await fleet.wait_for_execution(short)
    await fleet.wait_for_execution(long)
    guilty = await fleet.enqueue("breaks_loop", {"by": by})
    broken = daemon.wait_for("loop.broken")
    assert f"breaks_loop (job {guilty})" in broken["suspects"]
    assert daemon.wait_for_exit() == 1
    assert await fleet.state(short) == "succeeded"

    job = await fleet.job(long)
    assert job is not None
    assert (job["state"], job["attempt"], job["releases"], job["losses"]) == ("scheduled", 0, 1, 0)
    assert not await fleet.value("select count(*) from rota.nodes")


async def test_a_handler_that_cancels_all_tasks_fails_alone(fleet: Fleet) -> None:
    """It cannot cancel the daemon's loops or other attempts from its context."""
    daemon = fleet.daemons.start()
    neighbour = await fleet.enqueue("work", {"seconds": 2})
    await fleet.wait_for_execution(neighbour)
    guilty = await fleet.enqueue("breaks_loop", {"by": "cancel"}, max_attempts=1)
    await fleet.wait_for_state(guilty, "dead")
    assert daemon.wait_for("handler.cancelled_others", handler="breaks_loop")["job_id"] == guilty
    assert "cancelled its own task" in await fleet.value(
        "select error from rota.dead_letters where job_id = $1", guilty
    )

    await fleet.wait_for_state(neighbour, "succeeded")
    await fleet.wait_for_state(await fleet.enqueue("work"), "succeeded")
    assert daemon.stop() == 0


async def test_a_handler_that_closes_the_listening_socket_makes_the_daemon_drain_and_exit_with_1(
    fleet: Fleet,
) -> None:
    """Other jobs finish or are released, and the log names the jobs that may have caused it."""
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="3s")
    short, long = await fleet.enqueue("work", {"seconds": 2}), await fleet.enqueue("work", {"seconds": 600})
    await fleet.wait_for_execution(short)
    await fleet.wait_for_execution(long)
    guilty = await fleet.enqueue("breaks_loop", {"by": "close listening"})
    assert f"breaks_loop (job {guilty})" in daemon.wait_for("socket.lost")["suspects"]
    assert daemon.wait_for_exit() == 1
    assert await fleet.state(short) == "succeeded"

    for job in (long, guilty):
        row = await fleet.job(job)
        assert row is not None
        assert (row["state"], row["releases"], row["losses"]) == ("scheduled", 1, 0)


async def test_a_handler_that_crashes_the_interpreter_is_named_in_the_stack_dump(fleet: Fleet) -> None:
    """The dump has the stacks of all threads, without values."""
    daemon = fleet.daemons.start()
    await fleet.enqueue("breaks_loop", {"by": "crash"})
    assert daemon.wait_for_exit() == -signal.SIGSEGV
    assert "in breaks_loop" in daemon.output_text()


async def test_a_handler_that_floods_the_main_loop_loses_no_lease(fleet: Fleet) -> None:
    daemon = fleet.daemons.start()
    neighbours = [await fleet.enqueue("work", {"seconds": 3}), await fleet.enqueue("thread", {"seconds": 3})]
    for job in neighbours:
        await fleet.wait_for_execution(job)
    await fleet.enqueue("breaks_loop", {"by": "flood"})
    for job in (*neighbours, await fleet.enqueue("work")):
        await fleet.wait_for_state(job, "succeeded")

    assert not await fleet.value("select count(*) from rota.attempts where outcome = 'lost'")
    assert daemon.get("healthz")[0] == 200


async def test_large_payloads_run_in_bounded_memory_while_the_daemon_answers(fleet: Fleet) -> None:
    """30 jobs of 1 MB would need 400 MB together. They wait in their slots, and small jobs run meanwhile."""
    daemon = fleet.daemons.start(ROTA_QUEUES="default:200", ROTA_PAYLOAD_MAX_BYTES_IN_FLIGHT=str(4 << 20))
    before = daemon.rss()
    await fleet.execute(
        """
        insert into rota.jobs (handler, payload, timeout)
        select 'work', jsonb_build_object('seconds', 0.01, 'rows', (select jsonb_agg(jsonb_build_object('a', n)) from
        generate_series(1, 70000) as n)), '60 seconds' from generate_series(1, 30)
        """
    )
    await fleet.wait_for_state(await fleet.enqueue("noop"), "succeeded", within=10)
    max_rss = 0

    async def is_done() -> bool:
        nonlocal max_rss
        max_rss = max(max_rss, daemon.rss())
        assert daemon.get("healthz")[0] == 200
        return not await fleet.value("select exists (select from rota.jobs)")

    await eventually(is_done, within=60, what="the end of all jobs")
    assert await fleet.value("select count(*) from rota.job_runs where outcome = 'succeeded'") == 31
    assert max_rss - before < 200 * 2**20, f"{max_rss >> 20} MiB"


async def test_a_log_that_is_not_read_stops_neither_jobs_nor_the_shutdown(fleet: Fleet) -> None:
    """The pipe is full, and the lines are counted as dropped."""
    reader, writer = os.pipe()
    port = free_port()
    try:
        daemon = fleet.daemons.launch(output=writer, ROTA_HTTP_PORT=str(port), ROTA_LOG_LEVEL="debug")
        os.close(writer)
        await fleet.wait_for_state(await fleet.enqueue("prints", {"lines": 100_000, "text": "x" * 100}), "succeeded")
        job = await fleet.enqueue("work", {"seconds": 4})
        await fleet.wait_for_execution(job)

        def has_dropped_lines() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                lines = answer.read().decode().splitlines()
            (count,) = [line.split()[1] for line in lines if line.startswith("rota_log_lines_dropped_total")]
            return float(count) > 10_000

        await eventually(has_dropped_lines, what="the count of dropped lines")
        await fleet.wait_for_state(job, "succeeded")
        assert not await fleet.value("select count(*) from rota.attempts")
        assert daemon.stop(within=10) == 0
    finally:
        os.close(reader)


async def test_sighup_reloads_sigusr1_dumps_and_other_signals_are_ignored(fleet: Fleet, tmp_path: Path) -> None:
    """None of them ends the daemon or disturbs a job."""
    settings = tmp_path / "rota.toml"
    settings.write_text('[log]\nlevel = "info"\n')
    daemon = fleet.daemons.start(ROTA_CONFIG=str(settings), ROTA_LOG_LEVEL="")
    job = await fleet.enqueue("work", {"seconds": 6})
    await fleet.wait_for_execution(job)
    settings.write_text('[log]\nlevel = "debug"\n')
    daemon.send(signal.SIGHUP)
    daemon.wait_for("node.reloaded", log_level="debug")
    await fleet.wait_for_state(await fleet.enqueue("noop"), "succeeded")
    daemon.wait_for("jobs.claimed")
    settings.write_text("nonsense")
    daemon.send(signal.SIGHUP)
    daemon.wait_for("node.reload_failed")
    daemon.send(signal.SIGUSR1)
    dumped = daemon.wait_for("stacks")
    assert any(name.startswith("MainThread") for name in dumped["threads"])

    (waits_at,) = [stack for name, stack in dumped["tasks"].items() if name.endswith(f" job {job}")]
    assert any("in wait_seconds" in place for place in waits_at)

    for number in (signal.SIGUSR2, signal.SIGALRM):
        daemon.send(number)
        daemon.wait_for("signal.ignored", signal=number.name)
    await fleet.wait_for_state(job, "succeeded")
    assert daemon.stop() == 0


async def test_sighup_reconnects_only_when_the_url_in_the_file_has_changed(fleet: Fleet, tmp_path: Path) -> None:
    url = tmp_path / "url"
    url.write_text(fleet.dsn)
    daemon = fleet.daemons.start(DATABASE_URL="", ROTA_DATABASE_URL_FILE=str(url))
    daemon.send(signal.SIGHUP)
    daemon.wait_for("node.reloaded")
    await fleet.wait_for_state(await fleet.enqueue("noop"), "succeeded")
    assert not daemon.events("listener.down")
    url.write_text(f"{fleet.dsn}{'&' if '?' in fleet.dsn else '?'}connect_timeout=9")
    daemon.send(signal.SIGHUP)
    daemon.wait_for("listener.down")
    await fleet.wait_for_state(await fleet.enqueue("noop"), "succeeded")


async def test_sigquit_releases_jobs_at_once(fleet: Fleet) -> None:
    """A handler that does not stop is left behind after half a second."""
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="60s", ROTA_DRAIN_GRACE="60s")
    soft, hard = (
        await fleet.enqueue("work", {"seconds": 60}),
        await fleet.enqueue("thread", {"seconds": 60, "deaf": True}),
    )
    await fleet.wait_for_execution(soft)
    await fleet.wait_for_execution(hard)
    daemon.send(signal.SIGQUIT)
    assert daemon.wait_for_exit(within=8) == HANDLER_LEFT_BEHIND

    for job in (soft, hard):
        row = await fleet.job(job)
        assert row is not None
        assert (row["state"], row["attempt"], row["losses"]) == ("scheduled", 0, 0)


async def test_sigusr1_dumps_the_stacks_while_a_handler_blocks_the_main_loop(fleet: Fleet) -> None:
    daemon = fleet.daemons.start()
    await fleet.wait_for_execution(await fleet.enqueue("blocks", {"seconds": 3}))
    daemon.send(signal.SIGUSR1)
    dumped = daemon.wait_for("stacks", within=3)
    assert any(
        "in blocks" in place for place in next(s for n, s in dumped["threads"].items() if n.startswith("MainThread"))
    )


@pytest.mark.parametrize("by", ["regex on the loop", "regex in a thread"])
async def test_a_handler_that_holds_the_interpreter_lock_is_named(fleet: Fleet, by: str) -> None:
    """The advice is to run it in a process."""
    daemon = fleet.daemons.start()
    guilty = await fleet.enqueue(by)
    blocked = daemon.wait_for("loop.blocked")
    assert f"{by} (job {guilty})" in blocked["suspects"]
    assert "runs_in='process'" in blocked["do"]
    assert "held the interpreter" in blocked["do"]


@pytest.mark.skipif(
    shutil.which("unshare") is None or os.geteuid() != 0, reason="a pid namespace takes unshare and root"
)
async def test_as_pid_1_the_daemon_reaps_orphans_and_passes_signals_on(fleet: Fleet) -> None:
    """In a container, the first process inherits every orphan."""
    daemon = fleet.daemons.start(within=("unshare", "--pid", "--fork", "--mount-proc", "--kill-child"))
    for _ in range(10):
        await fleet.wait_for_state(await fleet.enqueue("leaves_orphan"), "succeeded")

    def list_children() -> list[int]:
        found = subprocess.run(["pgrep", "-P", str(daemon.pid)], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    (init,) = list_children()

    def has_only_the_daemon_left() -> bool:
        found = subprocess.run(["pgrep", "-P", str(init)], capture_output=True, text=True, check=False)
        return len(found.stdout.split()) == 1

    await eventually(has_only_the_daemon_left, what="the end of all zombies")
    os.kill(init, signal.SIGTERM)

    assert daemon.wait_for_exit() == 0
    assert daemon.events("node.stopped")


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are found through /proc")
@pytest.mark.parametrize("kind", ["process", "command"])
async def test_a_killed_daemon_takes_all_processes_of_its_handlers_along(
    fleet: Fleet, tmp_path: Path, kind: str
) -> None:
    """This includes grandchildren in process groups of their own; an ended job leaves no process behind."""
    pids = tmp_path / "pids"
    settings = tmp_path / "rota.toml"
    settings.write_text(
        f"[handlers.command.family]\nargv = {json.dumps([sys.executable, '-c', PROCESS_TREE, str(pids)])}\n"
    )
    daemon = fleet.daemons.start(ROTA_CONFIG=str(settings))
    handler = "command.family" if kind == "command" else "starts_family"
    await fleet.enqueue(handler, {"pids": str(pids)})
    await eventually(pids.exists, what="the family")
    family = [int(pid) for pid in pids.read_text(encoding="ascii").split()]
    keepers = list_session_keepers(daemon.pid)
    assert len(keepers) == 1
    assert all(is_running(pid) for pid in family)
    daemon.kill()
    await eventually(lambda: not any(is_running(pid) for pid in (*family, *keepers)), within=5, what="the family's end")


def list_session_keepers(pid: int) -> list[int]:
    """Return the processes that watch the daemon and end its handlers' processes when it dies."""
    found = subprocess.run(
        ["pgrep", "-P", str(pid), "-f", "session_keeper"], capture_output=True, text=True, check=False
    )
    return [int(each) for each in found.stdout.split()]


async def test_a_fork_of_a_handler_keeps_neither_the_port_nor_the_sessions_of_a_dead_daemon(fleet: Fleet) -> None:
    port = str(free_port())
    daemon = fleet.daemons.start(ROTA_HTTP_PORT=port)
    await fleet.wait_for_state(await fleet.enqueue("transactional thread", {"seconds": 0}), "succeeded")
    job = await fleet.enqueue("leaves_a_fork", {"seconds": 20})
    await fleet.wait_for_state(job, "succeeded")
    daemon.kill()

    async def has_no_session() -> bool:
        return not await fleet.value(
            "select exists (select from pg_stat_activity where application_name like 'rota %')"
        )

    await eventually(has_no_session, within=5, what="the end of the dead daemon's sessions")
    assert fleet.daemons.start(ROTA_HTTP_PORT=port).get("healthz")[0] == 200
    os.kill(int(await fleet.value("select result from rota.job_runs where job_id = $1", job)), signal.SIGKILL)
