"""The acts of the demo, in order. Each act does something to the daemons, waits for the effect, and prints it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from rich.markup import escape

from rota.demo.fleet import LEASE, POLL_INTERVAL, REAP_INTERVAL, RESTART_AFTER, DemoFailed
from rota.demo.json_lines import read_json_lines
from rota.demo.records import Execution, Facts, HeldClaim, executions_from, with_leases
from rota.demo.screen import listed, plural, short

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from uuid import UUID

    from rota.db.pool import Connection
    from rota.demo.fleet import Daemon, Fleet
    from rota.demo.screen import Screen

T = TypeVar("T")

JOBS = Path(__file__).with_name("jobs.sql")

KINDS = {
    "email": "quick",
    "transfer": "slow, its effect in job.transaction()",
    "report": "slow, in a thread that nothing can interrupt",
    "charge": "slow, at most once",
    "webhook": "fails twice, then succeeds",
    "import": "fails until its cause is repaired",
    "embargo": "snoozes once, then succeeds",
    "digest": "inserted twice under one unique_key",
    "newsletter": "cancelled while it waits",
    "thumbnail": "kills the daemon that runs it",
}


SLOW = {"transfer", "report", "charge"}


class Story:
    """Plays the acts on the connection `db`. The progress display polls on its own connection, `onlooker`."""

    def __init__(self, *, folder: Path, fleet: Fleet, screen: Screen, db: Connection, onlooker: Connection) -> None:
        self._folder = folder
        self._fleet = fleet
        self._screen = screen
        self._db = db
        self._onlooker = onlooker
        self._nodes: dict[UUID, str] = {}
        self._is_over = False
        self.facts = Facts()

    async def update_progress(self) -> None:
        """Update the progress display at the bottom of the terminal until the story is over."""
        scene = self._screen.scene
        while not self._is_over:
            self._learn_nodes(await self._onlooker.fetch("select node_id, pid from rota.nodes"))
            scene.states = {
                row["state"]: row["jobs"]
                for row in await self._onlooker.fetch(
                    "select state, count(*) as jobs from rota.job_status group by state"
                )
            }
            running: dict[str, list[str]] = {}
            for row in await self._onlooker.fetch("select handler, leased_by from rota.jobs where state = 'running'"):
                running.setdefault(self._nodes.get(row["leased_by"], "?"), []).append(row["handler"])
            scene.running = running
            await asyncio.sleep(0.15)

    async def play(self) -> None:
        """Play all acts. Raises DemoFailed if an act can't go on."""
        await self._start_daemons()
        await self._insert_jobs()
        killed, paused = await self._choose()
        await self._kill_and_stop(killed, paused)
        await self._wake(paused)
        await self._poison()
        await self._redrive()
        await self._stop()
        self._is_over = True

    async def _start_daemons(self) -> None:
        version = await self._db.fetchval("show server_version")
        self._screen.act("A server, and three daemons")
        self._screen.say(f"PostgreSQL {version} of its own, in a folder that is removed at the end.")
        for daemon in self._fleet.daemons:
            self._fleet.start(daemon)
        await self._all_up()
        pids = ", ".join(f"[bold]{daemon.letter}[/] (pid {daemon.life.pid})" for daemon in self._fleet.daemons)
        self._screen.say(f"Real processes, all alike, started with `rota run`: {pids}.")
        self._screen.say(
            f"[yellow]Lease {LEASE:g} s, reaper every {REAP_INTERVAL:g} s[/]: the shortest possible, so that you needn't "
            f"wait. The defaults are 30 s and 5 s."
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
            [("jobs", "right"), ("handler", "left"), ("what it is like", "left")],
            [[str(counts[kind]), kind, says] for kind, says in KINDS.items() if kind in counts],
        )

    async def _choose(self) -> tuple[Daemon, Daemon]:
        """Wait until all daemons run slow jobs. Return the daemon to kill, which runs a charge, and the one to pause."""

        async def spread() -> tuple[Daemon, Daemon] | None:
            holding = await self._holding()
            begun = {
                line["fence_token"] for line in read_json_lines(self._folder / "journal") if line["what"] == "began"
            }
            slow = {
                name: {each.handler for each in held if each.fence_token in begun} for name, held in holding.items()
            }
            if any(handlers - SLOW for handlers in slow.values()):
                return None
            with_charge = [d for d in self._fleet.daemons if {"charge", "transfer"} <= slow.get(d.name, set())]
            zombies = [
                d
                for d in self._fleet.daemons
                if {"report", "transfer"} <= slow.get(d.name, set()) and d not in with_charge
            ]
            return (with_charge[0], zombies[0]) if with_charge and zombies else None

        return await self._until(
            spread, within=10, what="the slow jobs did not spread over the daemons as the demo needs it"
        )

    async def _kill_and_stop(self, killed: Daemon, paused: Daemon) -> None:
        facts, screen = self.facts, self._screen
        screen.act(f"kill -9 {killed.letter}, SIGSTOP {paused.letter}")
        facts.killed_daemon, facts.paused_daemon = killed.name, paused.name
        facts.paused_at = self._fleet.pause(paused)
        facts.killed_at = self._fleet.kill(killed)
        holding = await self._holding()
        facts.held_by_killed, facts.held_by_paused = holding.get(killed.name, ()), holding.get(paused.name, ())
        lost = [each for each in (*facts.held_by_killed, *facts.held_by_paused) if each.handler != "charge"]
        charges = [each.job_id for each in facts.held_by_killed if each.handler == "charge"]
        if not lost or not charges or not facts.held_by_paused:
            raise DemoFailed("the daemons had no jobs left at the moment when they were killed and stopped")
        screen.say(f"[red]{killed.name} is killed[/] in the middle of {listed(facts.held_by_killed)}.")
        screen.say(
            f"[yellow]{paused.name} is stopped[/] in the middle of {listed(facts.held_by_paused)}. It will miss its "
            f"heartbeats."
        )
        screen.say(
            f"A killed daemon is started again after {RESTART_AFTER:g} s, by the demo, as systemd would: "
            f"{killed.letter} becomes {killed.letter}2."
        )
        reported: set[int] = set()

        async def all_reported() -> bool:
            await self._learn_now()
            for row in await self._db.fetch(
                "select job_id, fence_token, node, extract(epoch from seen_at)::float8 as at from demo.leases"
                " where what = 'claimed' and job_id = any($1) order by fence_token",
                [each.job_id for each in lost],
            ):
                held = next(each for each in lost if each.job_id == row["job_id"])
                if row["fence_token"] > held.fence_token and held.job_id not in reported:
                    reported.add(held.job_id)
                    life = self._nodes.get(row["node"], "?")
                    facts.taken_over[held.job_id] = row["at"], life, row["fence_token"]
                    before = facts.killed_daemon if held in facts.held_by_killed else facts.paused_daemon
                    screen.happened(
                        row["at"] - facts.killed_at,
                        f"{held}, claimed by {before}: its lease has expired, [green]{life} has it now[/]",
                    )
            if charges[0] not in reported and (at := await self._died_at(charges[0])):
                reported.add(charges[0])
                screen.happened(
                    at - facts.killed_at,
                    f"charge {charges[0]}, claimed by {facts.killed_daemon}: [red]dead letter[/], because at most once means "
                    "no second try",
                )
            return len(reported) == len(lost) + 1

        patience = LEASE + REAP_INTERVAL + 8
        await self._until(
            all_reported, within=patience, what="not all jobs of the killed and the stopped daemon were taken over"
        )

    async def _wake(self, paused: Daemon) -> None:
        facts, screen = self.facts, self._screen
        screen.act(f"{paused.letter} wakes up: a zombie")
        facts.resumed_at = self._fleet.resume(paused)
        asleep = facts.resumed_at - facts.paused_at
        screen.say(
            f"SIGCONT after {asleep:.1f} s. {paused.name}'s handlers go on where they were, and try to finish jobs that "
            f"other daemons have claimed."
        )
        tokens = {each.fence_token for each in facts.held_by_paused}
        ids = {each.job_id for each in facts.held_by_paused}

        async def over() -> bool:
            ended = {
                line["fence_token"] for line in read_json_lines(self._folder / "journal") if line["what"] == "ended"
            }
            return tokens <= ended and ids <= {event["job_id"] for event in paused.events() if _is_refusal(event)}

        await self._until(over, within=10, what="the woken daemon's late writes were neither refused nor given up")
        await self._collect_refusals(paused)
        for held in facts.held_by_paused:
            events = [event for event in facts.refusals if event["job_id"] == held.job_id]
            writes = [event["what"] for event in events if event["event"] == "write.refused"]
            _, life, token = facts.taken_over[held.job_id]
            did = f"Refused: {listed(writes)}" if writes else "Interrupted, wrote nothing"
            stale = f"token [cyan]{short(held.fence_token)}[/] is stale, {life} has [cyan]{short(token)}[/]"
            screen.say(f"{held}: {stale}. [green]{did}[/]", bullet="[green]✓[/]")
        screen.say(f"{paused.name}'s /metrics say: rota_stale_writes_total {facts.stale_writes:g}")
        await self._nothing_under_way("the slow jobs did not end in time")
        screen.say("All of them have finished with their new owners.")

    async def _collect_refusals(self, paused: Daemon) -> None:
        """Read the refusals from the log and the metrics until both agree, since they can't be read at the same moment."""
        facts, deadline = self.facts, time.monotonic() + 10
        while time.monotonic() < deadline:
            facts.refusals = [event for event in paused.events() if _is_refusal(event)]
            facts.stale_writes = await self._metric(paused, "rota_stale_writes_total")
            if facts.stale_writes == sum(event["event"] == "write.refused" for event in facts.refusals):
                return
            await asyncio.sleep(POLL_INTERVAL)

    async def _poison(self) -> None:
        facts, screen, db = self.facts, self._screen, self._db
        await self._all_up()
        screen.act("A poisonous job")
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
            f"thumbnail {facts.poison_job_id} kills every process that runs it; "
            f"{plural(len(facts.neighbour_job_ids), 'email')} run beside it. "
            "Each time its lease has to expire before it may run again."
        )

        async def is_dead() -> bool:
            for execution in self._executions():
                if execution.job_id != facts.poison_job_id or execution.ended_at is None:
                    continue
                if execution.life not in [life for _, life in facts.poison_deaths]:
                    facts.poison_deaths.append((execution.ended_at, execution.life))
                    screen.happened(
                        execution.ended_at - began,
                        f"[red]{execution.life} dies[/] of it (loss {len(facts.poison_deaths)}); its row is rolled back",
                    )
            return await self._died_at(facts.poison_job_id) is not None

        await self._until(is_dead, within=45, what="the poisonous job did not become a dead letter")
        facts.poison_losses = await db.fetchval(
            "select losses from rota.dead_letters where job_id = $1", facts.poison_job_id
        )
        at = await self._died_at(facts.poison_job_id) or time.time()
        screen.happened(
            at - began,
            f"[green]dead letter[/], as poison, after {facts.poison_losses} losses, so that it kills no more daemons",
        )
        await self._nothing_under_way("the jobs beside the poisonous job did not end in time")
        hurt = await db.fetchval(
            "select count(distinct job_id) from rota.attempts where outcome = 'lost' and job_id = any($1)",
            facts.neighbour_job_ids,
        )
        screen.say(
            f"Of the {len(facts.neighbour_job_ids)} emails beside it {hurt or 'none'} lost a daemon; all have succeeded, "
            "and none became a dead letter."
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
        left = [row["job_id"] for row in await db.fetch("select job_id from rota.dead_letters")]
        facts.redriven_job_ids, facts.discarded_job_ids = sorted(before - set(left)), left
        await self._nothing_under_way("the redriven jobs did not end in time")
        back = await db.fetch(
            "select job_id, handler, outcome from rota.job_runs where job_id = any($1) order by job_id",
            facts.redriven_job_ids,
        )
        for row in back:
            screen.say(f"{row['handler']} {row['job_id']}: [green]{row['outcome']}[/]", bullet="[green]✓[/]")
        if redriven != len(facts.redriven_job_ids):
            raise DemoFailed(
                f"redrive_many() said {redriven}, but {len(facts.redriven_job_ids)} dead letters went back"
            )
        screen.say("A job that runs at most once is never redriven in bulk. A person has checked it and discards it:")
        for job_id in left:
            screen.sql(f"select rota.discard({job_id}, 'charged by hand')")
            await db.execute("select rota.discard($1, 'charged by hand')", job_id)

    async def _stop(self) -> None:
        facts, screen, db = self.facts, self._screen, self._db
        await self._all_up()
        screen.act("A graceful stop")
        facts.running_at_stop = [
            row["job_id"]
            for row in await db.fetch(
                "insert into rota.jobs (handler, payload)"
                " select 'transfer', '{\"seconds\": 1.2}' from generate_series(1, 6) returning job_id"
            )
        ]

        async def in_the_middle() -> bool:
            begun = {each.job_id for each in self._executions() if each.ended_at is None}
            return set(facts.running_at_stop) <= begun

        await self._until(in_the_middle, within=8, what="the last jobs did not start on all daemons")
        began = time.monotonic()
        await self._fleet.stop(within=15)
        facts.stop_seconds = time.monotonic() - began
        codes = [daemon.life.exit_code for daemon in self._fleet.daemons]
        screen.say(
            f"SIGTERM to all three in the middle of {plural(len(facts.running_at_stop), 'transfer')}. They stopped claiming, "
            f"finished those, and were gone after {facts.stop_seconds:.1f} s (exit codes {listed(codes)})."
        )
        screen.close_act()

    # Helpers of the acts.

    def _executions(self) -> list[Execution]:
        return executions_from(read_json_lines(self._folder / "journal"), self._fleet.daemons)

    async def executions(self) -> Sequence[Execution]:
        """Return all executions in the journal, with their leases as the trigger has recorded them."""
        return await with_leases(self._db, self._executions())

    def letters(self) -> list[dict[str, Any]]:
        """Return all letters in the mailbox."""
        return read_json_lines(self._folder / "mailbox")

    def _learn_nodes(self, rows: Iterable[Any]) -> None:
        names = {life.pid: life.name for daemon in self._fleet.daemons for life in daemon.lives}
        for row in rows:
            if row["pid"] in names:
                self._nodes.setdefault(row["node_id"], names[row["pid"]])
        known = set(self._nodes.values())
        for daemon in self._fleet.daemons:
            if daemon.lives and daemon.state == "starting" and daemon.name in known:
                daemon.state = "running"

    async def _learn_now(self) -> None:
        self._learn_nodes(await self._db.fetch("select node_id, pid from rota.nodes"))

    async def _all_up(self) -> None:
        async def up() -> bool:
            await self._learn_now()
            return all(daemon.state == "running" and daemon.is_alive for daemon in self._fleet.daemons)

        await self._until(up, within=20, what="not all daemons came up")

    async def _holding(self) -> dict[str, list[HeldClaim]]:
        await self._learn_now()
        holding: dict[str, list[HeldClaim]] = {}
        for row in await self._db.fetch(
            "select job_id, handler, fence_token, leased_by from rota.jobs where state = 'running' order by job_id"
        ):
            name = self._nodes.get(row["leased_by"], "?")
            holding.setdefault(name, []).append(HeldClaim(row["job_id"], row["handler"], row["fence_token"]))
        return holding

    async def _died_at(self, job_id: int) -> float | None:
        at: float | None = await self._db.fetchval(
            "select extract(epoch from finished_at)::float8 from rota.dead_letters where job_id = $1", job_id
        )
        return at

    async def _nothing_under_way(self, otherwise: str) -> None:
        async def idle() -> bool:
            return not await self._db.fetchval("select exists (select from rota.jobs)")

        await self._until(idle, within=20, what=otherwise)

    async def _metric(self, daemon: Daemon, name: str) -> float:
        addresses = [event["http"] for event in daemon.events() if event.get("event") == "node.started"]
        with suppress(aiohttp.ClientError, OSError, ValueError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session,
                session.get(f"{addresses[-1]}/metrics") as answer,
            ):
                for line in (await answer.text()).splitlines():
                    if line.startswith(f"{name} "):
                        return float(line.split()[1])
        return -1.0

    async def _until(self, fact: Callable[[], Awaitable[T | None]], *, within: float, what: str) -> T:
        """Return the first truthy value of `fact`. Raises DemoFailed with the text `what` if none comes within so many seconds."""
        deadline = time.monotonic() + within
        while not (value := await fact()):
            if time.monotonic() > deadline:
                raise DemoFailed(f"{what} (waited {within:g} s)")
            await asyncio.sleep(POLL_INTERVAL / 4)
        return value


def _is_refusal(event: dict[str, Any]) -> bool:
    return event.get("event") in {"write.refused", "lease.lost"}


def _last_line(error: str | None) -> str:
    lines = (error or "").strip().splitlines()
    return lines[-1] if lines else ""
