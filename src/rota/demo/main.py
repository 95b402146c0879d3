"""Run the demo: start a server, play the story, check the promises, report, and remove all files."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from rota.db.migrate import migrate
from rota.demo.checks import Evidence, check_all
from rota.demo.fleet import LEASE, MAX_STALL, REAP_INTERVAL, DemoFailed, Fleet
from rota.demo.observer import Observer
from rota.demo.records import with_leases
from rota.demo.screen import Screen, short
from rota.demo.story import HANDLERS, Story
from rota.embedded import EmbeddedPostgres
from rota.errors import RotaError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from rota.db.pool import Connection
    from rota.demo.records import Execution

__all__ = ["main"]

WORLD = Path(__file__).with_name("world.sql")

MAX_SECONDS = 85.0
"""The demo gives up after this time."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

END_TEXTS = {
    "killed": "killed",
    "Snooze": "snoozed",
    "StaleToken": "refused",
    "CancelledError": "interrupted",
    "ConnectionError": "failed",
    "Permanent": "dead letter",
    "returned": "done again",
}
"""end of an execution in the journal -> text on the screen"""

NEXT_STEPS = (
    ("rota dev --app yourapp:app", "run your app with a database on this machine"),
    ("rota --help", "list all commands"),
    ("README.md", "read the first steps, and how to deploy"),
)


def main(*, json_output: bool = False) -> int:
    """Run the demo. Return the exit code: 0 if every promise held, 130 if interrupted. Leaves no process and no file."""
    screen = Screen(quiet=json_output)
    report: dict[str, Any] = {"ok": False, "lease_s": LEASE, "reap_interval_s": REAP_INTERVAL}
    code = 1
    try:
        code = _run(screen, report)
    except (KeyboardInterrupt, asyncio.CancelledError):
        report["error"] = "interrupted"
        screen.plain("Interrupted. All processes are stopped, and all files are removed.", style="yellow")
        code = 130
    except RotaError as error:
        report["error"] = str(error)
        screen.plain(str(error), style="red")
        code = error.exit_code
    report["seconds"] = round(screen.elapsed, 2)
    report["acts"] = [{"title": title, "seconds": seconds} for title, seconds in screen.acts]
    if json_output:
        sys.stdout.write(json.dumps(report, default=str) + "\n")
        sys.stdout.flush()
    return code


def _run(screen: Screen, report: dict[str, Any]) -> int:
    screen.title("rota demo", "This kills and pauses daemons, then checks every promise. It takes half a minute.")
    with ExitStack() as stack:
        stack.enter_context(_interrupted_by_signals())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-demo-", ignore_cleanup_errors=True)))
        if os.geteuid() == 0:
            folder.chmod(0o755)  # the server runs as another user, who must reach its data folder
        server = stack.enter_context(EmbeddedPostgres(data=folder / "data", sync=False))
        fleet = Fleet(folder, server.dsn)
        stack.callback(fleet.kill_all)
        stack.callback(_ignore_stop_signals)
        return asyncio.run(_play(folder, server.dsn, fleet, screen, report))


async def _play(folder: Path, dsn: str, fleet: Fleet, screen: Screen, report: dict[str, Any]) -> int:
    with _cancelled_by_signals():
        await migrate(dsn)
        db, progress_db = await asyncpg.connect(dsn), await asyncpg.connect(dsn)
        try:
            await db.execute(WORLD.read_text("utf-8"))
            observer = Observer(folder=folder, fleet=fleet, db=db)
            story = Story(fleet=fleet, screen=screen, observer=observer, db=db, progress_db=progress_db)
            try:
                with screen.live():
                    await _play_story(story, fleet, screen)
                evidence = Evidence(
                    facts=story.facts,
                    executions=await with_leases(db, observer.executions()),
                    letters=observer.letters(),
                    daemons=fleet.daemons,
                )
                return await _check_and_report(evidence, db, fleet, screen, report)
            except DemoFailed as error:
                _report_failure(error, fleet, screen, report)
                return 1
            finally:
                report["stood_still_s"] = round(fleet.longest_stall, 2)
        finally:
            db.terminate()
            progress_db.terminate()


async def _play_story(story: Story, fleet: Fleet, screen: Screen) -> None:
    screen.scene.daemons = fleet.daemons
    try:
        async with asyncio.timeout(MAX_SECONDS), asyncio.TaskGroup() as group:
            background = [
                group.create_task(story.update_progress(), name="progress"),
                group.create_task(fleet.restart_killed(), name="restarts"),
            ]
            await story.play()
            for task in background:
                task.cancel()
    except TimeoutError as error:
        raise DemoFailed(f"it did not end within {MAX_SECONDS:g} s") from error
    except ExceptionGroup as group:
        if (failures := group.subgroup(DemoFailed)) is None:
            raise
        raise _first_failure(failures) from group


def _first_failure(group: ExceptionGroup[DemoFailed]) -> DemoFailed:
    first = group.exceptions[0]
    return _first_failure(first) if isinstance(first, ExceptionGroup) else first


async def _check_and_report(
    evidence: Evidence, db: Connection, fleet: Fleet, screen: Screen, report: dict[str, Any]
) -> int:
    facts = evidence.facts
    checks = await check_all(db, evidence)
    jobs = await _jobs(db, evidence.executions)
    screen.act("The outcome of every job")
    screen.table(
        [("jobs", "right"), ("handler", "left"), ("executions", "right"), ("effects", "right"), ("outcome", "left")],
        _rows_by_handler(jobs, {*(letter["job_id"] for letter in evidence.letters), *await _jobs_with_entries(db)}),
    )
    screen.say("Jobs with more than one execution: daemon, last four digits of the fence token, and end of each:")
    for job in jobs:
        if len(job["executions"]) > 1:
            screen.say(f"{job['handler']} {job['job_id']}: {_executions_text(job)}", bullet="·")
    screen.act("The promises")
    screen.checks(checks)
    all_passed = all(check.passed for check in checks)
    report |= {
        "ok": all_passed,
        "checks": [check.as_json() for check in checks],
        "jobs": jobs,
        "dead_letters": facts.dead_letters,
        "refused": facts.refusals,
        "took_over_after_s": {
            str(job_id): round(at - facts.killed_at, 3) for job_id, (at, _, _) in facts.taken_over.items()
        },
        "killed": facts.killed_daemon,
        "stopped": facts.paused_daemon,
        "daemons": [asdict(life) for daemon in fleet.daemons for life in daemon.lives],
    }
    screen.close_act()
    screen.plain()
    if all_passed:
        summary = f"All {len(checks)} promises held, for {len(jobs)} jobs, in {screen.elapsed:.0f} s."
        screen.plain(summary, style="bold green")
    else:
        broken = sum(not check.passed for check in checks)
        screen.plain(
            f"{broken} of {len(checks)} promises did not hold. They are marked with ✗ above.", style="bold red"
        )
        _report_stall(fleet, screen)
        _show_logs(fleet, screen, report)
    screen.plain()
    screen.plain("Where to go next", style="bold")
    screen.table([("", "left"), ("", "left")], NEXT_STEPS)
    return 0 if all_passed else 1


async def _jobs(db: Connection, executions: Sequence[Execution]) -> list[dict[str, Any]]:
    rows = await db.fetch(
        "select inserted.job_id, inserted.handler, status.state as ended_as, status.attempt as attempts, status.fence_token"
        " from demo.inserted left join rota.job_status as status using (job_id) order by job_id"
    )
    by_job: dict[int, list[Execution]] = {}
    for execution in executions:
        by_job.setdefault(execution.job_id, []).append(execution)
    return [{**dict(row), "executions": [each.as_json() for each in by_job.get(row["job_id"], ())]} for row in rows]


async def _jobs_with_entries(db: Connection) -> set[int]:
    return {row["job_id"] for row in await db.fetch("select job_id from demo.entries")}


def _rows_by_handler(jobs: Sequence[dict[str, Any]], with_effect: AbstractSet[int]) -> list[list[str]]:
    rows = []
    for handler in HANDLERS:
        own_jobs = [job for job in jobs if job["handler"] == handler]
        outcomes = dict.fromkeys(str(job["ended_as"]) for job in own_jobs)
        executions = sum(len(job["executions"]) for job in own_jobs)
        effects = sum(job["job_id"] in with_effect for job in own_jobs)
        rows.append([str(len(own_jobs)), handler, str(executions), str(effects), ", ".join(outcomes)])
    return rows


def _executions_text(job: dict[str, Any]) -> str:
    """Describe a job's executions: the daemon, the fence token and the end of each."""
    texts = []
    for execution in job["executions"]:
        is_settled = execution["fence_token"] == job["fence_token"] and job["ended_as"] == "succeeded"
        end = "[green]counted[/]" if is_settled else f"[dim]{END_TEXTS.get(execution['how'], execution['how'])}[/]"
        texts.append(f"{execution['daemon']} [cyan]{short(execution['fence_token'])}[/] {end}")
    return " → ".join(texts)


def _report_failure(error: DemoFailed, fleet: Fleet, screen: Screen, report: dict[str, Any]) -> None:
    report["error"] = str(error)
    screen.close_act()
    screen.plain()
    screen.plain(f"The demo could not go on: {error}.", style="bold red")
    _report_stall(fleet, screen)
    _show_logs(fleet, screen, report)


def _report_stall(fleet: Fleet, screen: Screen) -> None:
    if fleet.longest_stall > MAX_STALL:
        screen.plain(
            f"The machine did not run this process for {fleet.longest_stall:.1f} s, which is too long for leases of {LEASE:g} s. "
            "Try again when it is less busy."
        )


def _show_logs(fleet: Fleet, screen: Screen, report: dict[str, Any]) -> None:
    report["logs"] = fleet.tails()
    for letter, lines in report["logs"].items():
        screen.plain(f"The end of {letter}'s log:", style="bold")
        for line in lines:
            screen.plain(f"  {line}", style="dim")


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Outside the event loop, turn every stop signal into a KeyboardInterrupt, so that everything is cleaned up."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Inside the event loop, cancel the current task on every stop signal."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None  # noqa: S101  this runs in a task
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.default_int_handler)


def _ignore_stop_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
