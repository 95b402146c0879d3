"""The acts of the demo, in order. Each act does something to the daemons, waits for the effect, and prints it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from rota.demo.fleet import LEASE, POLL_INTERVAL, REAP_INTERVAL, RESTART_AFTER, DemoFailed
from rota.demo.observer import wait_for
from rota.demo.records import Facts
from rota.demo.screen import listed, plural, short

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.demo.fleet import Daemon, Fleet
    from rota.demo.observer import Observer
    from rota.demo.screen import Screen

JOBS = Path(__file__).with_name("jobs.sql")

HANDLERS = {
    "email": "quick",
    "transfer": "slow, its effect in job.transaction()",
    "report": "slow, in a thread that nothing can interrupt",
    "charge": "slow, runs at most once",
    "webhook": "fails twice, then succeeds",
    "import": "fails until its cause is repaired",
    "embargo": "snoozes once, then succeeds",
    "digest": "inserted twice under one unique_key",
    "newsletter": "cancelled while it waits",
    "thumbnail": "kills the daemon that runs it",
}
"""handler -> description of its jobs"""

SLOW_HANDLERS = {"transfer", "report", "charge"}


class Story:
    """Plays the acts on the connection `db`. The progress display polls on its own connection, `progress_db`."""

    def __init__(
        self, *, fleet: Fleet, screen: Screen, observer: Observer, db: Connection, progress_db: Connection
    ) -> None:
        self._fleet = fleet
        self._screen = screen
        self._observer = observer
        self._db = db
        self._progress_db = progress_db
        self._is_over = False
        self.facts = Facts()

    async def update_progress(self) -> None:
        """Update the progress display at the bottom of the terminal until the story is over."""
        scene = self._screen.scene
        while not self._is_over:
            await self._observer.read_nodes(self._progress_db)
            scene.states = {
                row["state"]: row["jobs"]
                for row in await self._progress_db.fetch(
                    "select state, count(*) as jobs from rota.job_status group by state"
                )
            }
            running: dict[str, list[str]] = {}
            for row in await self._progress_db.fetch(
                "select handler, leased_by from rota.jobs where state = 'running'"
            ):
                running.setdefault(self._observer.process_name(row["leased_by"]), []).append(row["handler"])
            scene.running = running
            await asyncio.sleep(0.15)

    async def play(self) -> None:
        """Play all acts. Raises DemoFailed if an act can't go on."""
        await self._start_daemons()
        await self._insert_jobs()
        killed, paused = await self._choose_daemons()
        await self._kill_and_pause(killed, paused)
        await self._resume(paused)
        await self._poison()
        await self._redrive()
        await self._stop()
        self._is_over = True

    async def _start_daemons(self) -> None:
        version = await self._db.fetchval("show server_version")
        self._screen.act("A server, and three daemons")
        self._screen.say(f"The demo runs its own PostgreSQL {version}, in a folder that is removed at the end.")
        for daemon in self._fleet.daemons:
            self._fleet.start(daemon)
        await self._observer.wait_until_all_run()
        pids = ", ".join(f"[bold]{daemon.letter}[/] (pid {daemon.life.pid})" for daemon in self._fleet.daemons)
        self._screen.say(f"The daemons are equal processes, started with `rota run`: {pids}.")
        self._screen.say(
            f"[yellow]Lease {LEASE:g} s, reap interval {REAP_INTERVAL:g} s[/]: short, to keep the demo short. The defaults are "
            "30 s and 5 s."
        )

    async def _insert_jobs(self) -> None:
        self._screen.act("Jobs, by plain SQL")
        await self._db.execute(JOBS.read_text("utf-8"))
        rows = await self._db.fetch("select handler, count(*) as jobs from demo.inserted group by handler")
        counts = {row["handler"]: row["jobs"] for row in rows}
        self._screen.sql(
            "insert into rota.jobs (handler, payload)\nselect 'email', … from generate_series(1, 40);  -- …"
        )
        self._screen.table(
            [("jobs", "right"), ("handler", "left"), ("description", "left")],
            [[str(counts[name]), name, description] for name, description in HANDLERS.items() if name in counts],
        )

    async def _choose_daemons(self) -> tuple[Daemon, Daemon]:
        """Wait until all daemons run slow jobs. Return the daemon to kill, which runs a charge, and the one to pause."""

        async def find_daemons() -> tuple[Daemon, Daemon] | None:
            claims = await self._observer.read_claims()
            begun = self._observer.journalled_tokens("began")
            running = {
                name: {each.handler for each in held if each.fence_token in begun} for name, held in claims.items()
            }
            if any(handlers - SLOW_HANDLERS for handlers in running.values()):
                return None
            to_kill = [d for d in self._fleet.daemons if {"charge", "transfer"} <= running.get(d.name, set())]
            to_pause = [
                d
                for d in self._fleet.daemons
                if {"report", "transfer"} <= running.get(d.name, set()) and d not in to_kill
            ]
            return (to_kill[0], to_pause[0]) if to_kill and to_pause else None

        return await wait_for(
            find_daemons, within=10, failure="the slow jobs are not distributed over the daemons as the demo needs it"
        )

    async def _kill_and_pause(self, killed: Daemon, paused: Daemon) -> None:
        facts, screen = self.facts, self._screen
        screen.act(f"kill -9 {killed.letter}, SIGSTOP {paused.letter}")
        facts.killed_daemon, facts.paused_daemon = killed.name, paused.name
        facts.paused_at = self._fleet.pause(paused)
        facts.killed_at = self._fleet.kill(killed)
        claims = await self._observer.read_claims()
        facts.held_by_killed, facts.held_by_paused = claims.get(killed.name, ()), claims.get(paused.name, ())
        lost = [each for each in (*facts.held_by_killed, *facts.held_by_paused) if each.handler != "charge"]
        charges = [each.job_id for each in facts.held_by_killed if each.handler == "charge"]
        if not lost or not charges or not facts.held_by_paused:
            raise DemoFailed("the daemons ran no jobs when they were killed and paused")
        screen.say(f"[red]{killed.name} is killed[/] while it runs {listed(facts.held_by_killed)}.")
        screen.say(
            f"[yellow]{paused.name} is paused[/] while it runs {listed(facts.held_by_paused)}. It will miss its heartbeats."
        )
        screen.say(
            f"Like systemd, the demo restarts a killed daemon after {RESTART_AFTER:g} s: {killed.letter} becomes "
            f"{killed.letter}2."
        )
        reported: set[int] = set()

        async def all_reported() -> bool:
            await self._observer.read_nodes()
            for row in await self._db.fetch(
                "select job_id, fence_token, node, extract(epoch from seen_at)::float8 as at from demo.leases"
                " where what = 'claimed' and job_id = any($1) order by fence_token",
                [each.job_id for each in lost],
            ):
                held = next(each for each in lost if each.job_id == row["job_id"])
                if row["fence_token"] > held.fence_token and held.job_id not in reported:
                    reported.add(held.job_id)
                    life = self._observer.process_name(row["node"])
                    facts.taken_over[held.job_id] = row["at"], life, row["fence_token"]
                    before = facts.killed_daemon if held in facts.held_by_killed else facts.paused_daemon
                    screen.event(
                        row["at"] - facts.killed_at,
                        f"{held} of {before}: its lease has expired, and [green]{life} has claimed it[/]",
                    )
            if charges[0] not in reported and (at := await self._observer.read_death(charges[0])):
                reported.add(charges[0])
                screen.event(
                    at - facts.killed_at,
                    f"charge {charges[0]} of {facts.killed_daemon}: [red]dead letter[/], because an at-most-once job is never "
                    "retried",
                )
            return len(reported) == len(lost) + 1

        await wait_for(
            all_reported,
            within=LEASE + REAP_INTERVAL + 8,
            failure="not all jobs of the killed and the paused daemon were claimed again",
        )

    async def _resume(self, paused: Daemon) -> None:
        facts, screen = self.facts, self._screen
        screen.act(f"SIGCONT {paused.letter}: a zombie")
        facts.resumed_at = self._fleet.resume(paused)
        screen.say(
            f"{paused.name} continues after {facts.resumed_at - facts.paused_at:.1f} s. Its handlers try to finish jobs that "
            "other daemons have claimed meanwhile."
        )
        tokens = {each.fence_token for each in facts.held_by_paused}
        ids = {each.job_id for each in facts.held_by_paused}

        async def all_refused() -> bool:
            refused = {event["job_id"] for event in paused.events() if _is_refusal(event)}
            return tokens <= self._observer.journalled_tokens("ended") and ids <= refused

        await wait_for(all_refused, within=10, failure="the resumed daemon's late writes were not all refused")
        await self._collect_refusals(paused)
        for held in facts.held_by_paused:
            events = [event for event in facts.refusals if event["job_id"] == held.job_id]
            writes = [event["what"] for event in events if event["event"] == "write.refused"]
            _, life, token = facts.taken_over[held.job_id]
            result = f"Refused: {listed(writes)}" if writes else "Interrupted, wrote nothing"
            stale = f"token [cyan]{short(held.fence_token)}[/] is stale, {life} has [cyan]{short(token)}[/]"
            screen.say(f"{held}: {stale}. [green]{result}[/]", bullet="[green]✓[/]")
        screen.say(f"{paused.name}'s metrics show rota_stale_writes_total {facts.stale_writes:g}.")
        await self._observer.wait_until_no_jobs("the slow jobs did not end in time")
        screen.say("The daemons that claimed them have finished all of them.")

    async def _collect_refusals(self, paused: Daemon) -> None:
        """Read the refusals from the log and from the metrics, and repeat until both agree."""
        facts, deadline = self.facts, time.monotonic() + 10
        while time.monotonic() < deadline:
            facts.refusals = [event for event in paused.events() if _is_refusal(event)]
            facts.stale_writes = await self._observer.read_metric(paused, "rota_stale_writes_total")
            if facts.stale_writes == sum(event["event"] == "write.refused" for event in facts.refusals):
                return
            await asyncio.sleep(POLL_INTERVAL)

    async def _poison(self) -> None:
        facts, screen, db = self.facts, self._screen, self._db
        await self._observer.wait_until_all_run()
        screen.act("A poison job")
        facts.neighbour_job_ids = [
            row["job_id"]
            for row in await db.fetch(
                "insert into rota.jobs (handler, payload)"
                " select 'email', '{\"seconds\": 0.7}' from generate_series(1, 12) returning job_id"
            )
        ]
        began = time.time()
        facts.poison_job_id = await db.fetchval("insert into rota.jobs (handler) values ('thumbnail') returning job_id")
        screen.say(
            f"thumbnail {facts.poison_job_id} kills every process that runs it. "
            f"{plural(len(facts.neighbour_job_ids), 'email')} run beside it. "
            "After each kill its lease must expire before it runs again."
        )

        async def is_dead() -> bool:
            for execution in self._observer.executions():
                if execution.job_id != facts.poison_job_id or execution.ended_at is None:
                    continue
                if execution.life not in [life for _, life in facts.poison_deaths]:
                    facts.poison_deaths.append((execution.ended_at, execution.life))
                    screen.event(
                        execution.ended_at - began,
                        f"[red]{execution.life} is killed[/] (loss {len(facts.poison_deaths)}); its row is rolled back",
                    )
            return await self._observer.read_death(facts.poison_job_id) is not None

        await wait_for(is_dead, within=45, failure="the poison job did not become a dead letter")
        facts.poison_losses = await db.fetchval(
            "select losses from rota.dead_letters where job_id = $1", facts.poison_job_id
        )
        at = await self._observer.read_death(facts.poison_job_id) or time.time()
        screen.event(
            at - began,
            f"[green]dead letter[/] with the reason poison after {facts.poison_losses} losses: it kills no more daemons",
        )
        await self._observer.wait_until_no_jobs("the jobs beside the poison job did not end in time")
        interrupted = await db.fetchval(
            "select count(distinct job_id) from rota.attempts where outcome = 'lost' and job_id = any($1)",
            facts.neighbour_job_ids,
        )
        screen.say(
            f"{interrupted or 'None'} of the {len(facts.neighbour_job_ids)} emails beside it lost a daemon. All of them have "
            "succeeded."
        )

    async def _redrive(self) -> None:
        facts, screen, db = self.facts, self._screen, self._db
        screen.act("Dead letters, and redrive")
        facts.dead_letters = [
            dict(row)
            for row in await db.fetch(
                "select job_id, handler, reason, attempt, losses, delivery, error_kind, error"
                " from rota.dead_letters order by job_id"
            )
        ]
        screen.table(
            [("job", "right"), ("handler", "left"), ("reason", "left"), ("attempts", "right"), ("last error", "left")],
            [
                [
                    str(row["job_id"]),
                    row["handler"],
                    f"[red]{row['reason']}[/]",
                    str(row["attempt"]),
                    escape(_last_line(row["error"])),
                ]
                for row in facts.dead_letters
            ],
        )
        screen.say("The causes are repaired, and the dead letters are redriven:")
        screen.sql("select * from rota.redrive_many(note => 'repaired')")
        await db.execute("insert into demo.repaired (handler) values ('import'), ('thumbnail')")
        before = {row["job_id"] for row in facts.dead_letters}
        redriven = await db.fetchval("select redriven from rota.redrive_many(note => 'repaired')")
        remaining = [row["job_id"] for row in await db.fetch("select job_id from rota.dead_letters")]
        facts.redriven_job_ids, facts.discarded_job_ids = sorted(before - set(remaining)), remaining
        await self._observer.wait_until_no_jobs("the redriven jobs did not end in time")
        outcomes = await db.fetch(
            "select job_id, handler, outcome from rota.job_runs where job_id = any($1) order by job_id",
            facts.redriven_job_ids,
        )
        for row in outcomes:
            screen.say(f"{row['handler']} {row['job_id']}: [green]{row['outcome']}[/]", bullet="[green]✓[/]")
        if redriven != len(facts.redriven_job_ids):
            raise DemoFailed(
                f"redrive_many() returned {redriven}, but {len(facts.redriven_job_ids)} dead letters were redriven"
            )
        screen.say("redrive_many() skips at-most-once jobs. A person checks the charge, and discards it:")
        for job_id in remaining:
            screen.sql(f"select rota.discard({job_id}, 'charged by hand')")
            await db.execute("select rota.discard($1, 'charged by hand')", job_id)

    async def _stop(self) -> None:
        facts, screen, db = self.facts, self._screen, self._db
        await self._observer.wait_until_all_run()
        screen.act("A graceful stop")
        facts.running_at_stop = [
            row["job_id"]
            for row in await db.fetch(
                "insert into rota.jobs (handler, payload)"
                " select 'transfer', '{\"seconds\": 1.2}' from generate_series(1, 6) returning job_id"
            )
        ]

        async def all_run() -> bool:
            running = {each.job_id for each in self._observer.executions() if each.ended_at is None}
            return set(facts.running_at_stop) <= running

        await wait_for(all_run, within=8, failure="the last jobs did not start on all daemons")
        began = time.monotonic()
        await self._fleet.stop(within=15)
        facts.stop_seconds = time.monotonic() - began
        codes = [daemon.life.exit_code for daemon in self._fleet.daemons]
        screen.say(
            f"All three got SIGTERM while they ran {plural(len(facts.running_at_stop), 'transfer')}. They stopped claiming, "
            f"finished these jobs, and exited after {facts.stop_seconds:.1f} s (exit codes {listed(codes)})."
        )
        screen.close_act()


def _is_refusal(event: dict[str, Any]) -> bool:
    return event.get("event") in {"write.refused", "lease.lost"}


def _last_line(error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return lines[-1] if lines else ""
