"""Kill, stop and cut off daemons and servers while jobs flow in, heal everything, and hold what happened against the laws.

The plan of faults follows from the seed; when they strike does not, quite: a seed is a place to begin to look. The laws
are in chaos_checks.py, the jobs in process_app.py. Exit code 1, with the seed and the evidence, where a law was broken.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg

from chaos_checks import TRANSITIONS, Disturbance, End, Evidence, Execution, Transition, violations
from fleets import CONNECTION_ERRORS
from process_app import EFFECTS, WITNESS
from processes import DaemonProcess, Daemons
from servers import DurableServer, durable_server, embedded, make_durable_template, memory_folder
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from asyncpg import Connection, Record

LEASE_S = 3.0
REAP_S = 0.5
MARGIN_S = 4.0
"""Seconds granted beyond what the settings promise, to a machine with more to do than it has cores."""
DRAINED_WITHIN_S = 90.0
SLOWEST_AFTERWARDS = 0.3
"""The least share of the throughput before that must be there after."""
BURST = 2000

JOBS = {
    "noop": 20,
    "work": 20,
    "slow": 6,
    "transactional": 15,
    "once": 6,
    "flaky": 10,
    "thread": 6,
    "steps": 6,
    "snoozes": 4,
    "unique": 5,
}
"""kind -> how often, in a hundred or so."""

FAULTS = {
    "kill_daemon": 5,
    "halt_daemon": 5,
    "drain_daemon": 4,
    "cut_backends": 6,
    "restart_server": 2,
    "kill_server": 2,
    "hold_locks": 4,
    "hold_snapshot": 2,
    "cancel": 4,
    "redrive": 3,
}


EXPECTED = {
    *(
        "RuntimeError",
        "InterruptedError",
        "Timeout",
        "LeaseExpired",
        "StaleToken",
        "interrupted",
        "snoozed",
        "cancelled",
    ),
    *("ConnectionDoesNotExistError", "ConnectionLost", "InternalClientError", "InterfaceError", "TimeoutError"),
    *("AdminShutdownError", "CannotConnectNowError", "CrashShutdownError", "IdleInTransactionSessionTimeoutError"),
    *("FileNotFoundError", "ConnectionRefusedError", "ConnectionResetError", "BrokenPipeError", "QueryCanceledError"),
}
"""What an attempt may fail of here: what its handler was asked for, and what a cut connection raises."""


class Fault(NamedTuple):
    """What strikes, when, for how long, and whom: a share of whatever there is then to choose from."""

    at: float
    kind: str
    seconds: float
    pick: float


def plan(dice: random.Random, seconds: float) -> list[Fault]:
    """Lay down all faults of a run."""
    faults, at = [], 1.0
    while at < seconds:
        (kind,) = dice.choices([*FAULTS], weights=[*FAULTS.values()])
        faults.append(Fault(round(at, 1), kind, round(dice.uniform(0.3, 1.0) ** 2 * 8, 1), dice.random()))
        at += dice.uniform(0.3, 3.0)
    return faults


@dataclass(slots=True)
class Seat:
    """Where a daemon should be running; when it dies, another one takes the seat after a while."""

    daemon: DaemonProcess
    busy: bool = False
    """A fault has it in hand."""


@dataclass(slots=True)
class World:
    """Everything a fault can touch, and what has been noted for the verdict."""

    server: DurableServer
    witness: str
    daemons: Daemons
    dice: random.Random
    seats: list[Seat] = field(default_factory=list)
    server_in_hand: asyncio.Lock = field(default_factory=asyncio.Lock)
    healed: bool = False
    acknowledged: list[int] = field(default_factory=list)
    process_ends: dict[int, float] = field(default_factory=dict)
    killed: list[tuple[int, float]] = field(default_factory=list)
    halted: set[int] = field(default_factory=set)
    disturbances: list[Disturbance] = field(default_factory=list)
    faulty_ends: list[str] = field(default_factory=list)

    def note(self, what: str, **fields: Any) -> None:
        """Print one line of the story."""
        say(f"{time.monotonic() - STARTED:6.1f}  {what}", *(f"{name}={value}" for name, value in fields.items()))

    async def client(self, stack: AsyncExitStack) -> Connection[Record]:
        """Connect as a client does that comes again until it gets through."""

        async def reached() -> Connection[Record] | None:
            try:
                return await asyncpg.connect(self.server.dsn, timeout=5, server_settings={"application_name": "client"})
            except CONNECTION_ERRORS:
                return None

        connection = await eventually(reached, within=60, what="a server that takes connections")
        stack.callback(connection.terminate)
        return connection

    def free_seat(self, pick: float) -> Seat | None:
        """Choose a daemon for a fault; one at least is spared, for somebody has to take over."""
        free = [seat for seat in self.seats if not seat.busy and seat.daemon.alive]
        return free[int(pick * len(free))] if len(free) > 1 else None


STARTED = time.monotonic()


def say(*words: str) -> None:
    """Write a line, at once: who watches a run of minutes wants to see it."""
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


async def pass_time(seconds: float) -> None:
    """Return when so much time has passed."""
    until = time.monotonic() + seconds
    await eventually(lambda: time.monotonic() >= until, within=seconds + 60)


# What is done to the world.


async def kill_daemon(world: World, fault: Fault) -> None:
    """Kill -9; another one comes after a while."""
    if (seat := world.free_seat(fault.pick)) is None:
        return
    seat.busy = True
    seat.daemon.kill()
    world.killed.append((seat.daemon.pid, time.time()))
    world.note("killed", pid=seat.daemon.pid)
    await take_seat_again(world, seat, fault.seconds)


async def halt_daemon(world: World, fault: Fault) -> None:
    """Hold a process still, mostly beyond its leases, and let it go on as a zombie."""
    if (seat := world.free_seat(fault.pick)) is None:
        return
    seat.busy = True
    world.halted.add(seat.daemon.pid)
    seat.daemon.send(signal.SIGSTOP)
    world.note("halted", pid=seat.daemon.pid, seconds=fault.seconds)
    await pass_time(fault.seconds)
    seat.daemon.send(signal.SIGCONT)
    seat.busy = False


async def drain_daemon(world: World, fault: Fault) -> None:
    """Tell a daemon to stop, as a deployment does."""
    if (seat := world.free_seat(fault.pick)) is None:
        return
    seat.busy = True
    seat.daemon.send(signal.SIGTERM)
    world.note("told to stop", pid=seat.daemon.pid)
    if fault.pick * 7 % 1 < 0.3:
        await pass_time(0.5)
        seat.daemon.send(signal.SIGTERM)
    with suppress(AssertionError):
        await eventually(lambda: not seat.daemon.alive, within=20)
    if seat.daemon.alive:
        world.faulty_ends.append(f"{seat.daemon.pid} did not end within 20 s of SIGTERM")
        seat.daemon.kill()
    elif seat.daemon.popen.returncode != 0 and seat.daemon.events("node.started"):
        world.faulty_ends.append(f"{seat.daemon.pid} ended with {seat.daemon.popen.returncode} after SIGTERM")
    await take_seat_again(world, seat, fault.seconds / 4)


async def take_seat_again(world: World, seat: Seat, after: float) -> None:
    """Start the next daemon where one has ended."""
    world.process_ends[seat.daemon.pid] = time.time()
    await pass_time(after)
    seat.daemon = world.daemons.launch()
    seat.busy = False


async def cut_backends(world: World, fault: Fault) -> None:
    """Terminate some connections, whatever they are doing."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            cut = await conn.fetch(
                """
                select pg_terminate_backend(pid)
                from pg_stat_activity
                where backend_type = 'client backend' and pid <> pg_backend_pid() and random() < $1
                """,
                fault.pick,
            )
            world.note("cut backends", count=len(cut))


async def restart_server(world: World, fault: Fault) -> None:
    """Fast shutdown, and start again."""
    await server_away(world, world.server.stop, "server restarted", fault.seconds / 4)


async def kill_server(world: World, fault: Fault) -> None:
    """Kill -9 the server, and start it again."""
    await server_away(world, world.server.kill, "server killed", fault.seconds / 2)


async def server_away(world: World, end: Callable[[], None], how: str, seconds: float) -> None:
    """Take the server away for a while."""
    async with world.server_in_hand:
        began = time.time()
        end()
        world.note(how, seconds=seconds)
        await pass_time(seconds)
        world.server.start()
        away = time.time() - began
        # Who has waited so long may pause as long again before the next try.
        world.disturbances.append(Disturbance(began, time.time() + away * 1.5 + 2))


async def hold_locks(world: World, fault: Fault) -> None:
    """Lock some jobs' rows, as a careless client might."""
    began = time.time()
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            async with conn.transaction():
                held = await conn.fetch("select from rota.jobs where random() < 0.5 limit 20 for update skip locked")
                world.note("locks held", rows=len(held), seconds=fault.seconds)
                await pass_time(fault.seconds)
    world.disturbances.append(Disturbance(began, time.time() + REAP_S))


async def hold_snapshot(world: World, fault: Fault) -> None:
    """Keep vacuum from clearing anything away."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            async with conn.transaction(isolation="repeatable_read"):
                await conn.fetchval("select count(*) from rota.jobs")
                world.note("snapshot held", seconds=fault.seconds * 2)
                await pass_time(fault.seconds * 2)


async def cancel(world: World, _: Fault) -> None:
    """Cancel some jobs, waiting or running."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            rows = await conn.fetch(
                "select rota.cancel(job_id) from (select job_id from rota.jobs order by random() limit 5) as some"
            )
            world.note("cancelled", answers=[row[0] for row in rows])


async def redrive(world: World, _: Fault) -> None:
    """Send some dead letters back."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            row = await conn.fetchrow('select * from rota.redrive_many("limit" => 20)')
            world.note("redriven", count=row and row["redriven"])


STRIKE: dict[str, Callable[[World, Fault], Coroutine[Any, Any, None]]] = {
    "kill_daemon": kill_daemon,
    "halt_daemon": halt_daemon,
    "drain_daemon": drain_daemon,
    "cut_backends": cut_backends,
    "restart_server": restart_server,
    "kill_server": kill_server,
    "hold_locks": hold_locks,
    "hold_snapshot": hold_snapshot,
    "cancel": cancel,
    "redrive": redrive,
}


# What goes on meanwhile.


async def insert_jobs(world: World, count: int, seconds: float) -> None:
    """Insert jobs of all kinds by plain SQL, a few at a time, over so many seconds."""
    began, dice = time.monotonic(), world.dice
    batch = 10
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        for done in range(0, count, batch):
            rows = [some_job(dice) for _ in range(batch)]
            try:
                async with asyncio.timeout(10):
                    added = await conn.fetch(INSERT, *zip(*rows, strict=True))
                world.acknowledged += [row["job_id"] for row in added]
            except CONNECTION_ERRORS:
                conn.terminate()
                conn = await world.client(stack)
            await pass_time(max(0.0, began + seconds * done / count - time.monotonic()))


INSERT = """
insert into rota.jobs (
    handler, payload, run_at, priority, max_attempts, backoff_base, backoff_cap, timeout, unique_key
)
select handler, payload::jsonb, now() + delay * interval '1 second', priority, attempts, interval '200 milliseconds',
    interval '1 second', timeout * interval '1 second', unique_key
from unnest($1::text[], $2::text[], $3::float8[], $4::int2[], $5::int4[], $6::float8[], $7::text[])
    as given (handler, payload, delay, priority, attempts, timeout, unique_key)
on conflict do nothing
returning job_id
"""


def some_job(dice: random.Random) -> tuple[str, str, float, int, int, float | None, str | None]:
    """Draw a job: handler, payload, delay, priority, max_attempts, timeout, unique_key."""
    (kind,) = dice.choices([*JOBS], weights=[*JOBS.values()])
    handler, payload, timeout, key = kind, "{}", None, None
    match kind:
        case "slow":
            handler, payload = "work", f'{{"seconds": {dice.uniform(1, 5):.2f}}}'
            timeout = dice.choice([None, 2.0, 20.0])
        case "work" | "once":
            payload = f'{{"seconds": {dice.uniform(0, 0.3):.3f}}}'
        case "transactional":
            payload = f'{{"seconds": {dice.choice([0.0, 0.05, 0.5])}}}'
        case "thread":
            payload = f'{{"seconds": {dice.uniform(0, 4):.2f}, "deaf": {dice.choice(["true", "false"])}}}'
        case "unique":
            handler, payload, key = "work", '{"seconds": 0.3}', f"key {dice.randrange(5)}"
    delay = dice.choice([0.0, 0.0, 0.0, dice.uniform(0, 5), -60.0])
    attempts = 3 if kind == "flaky" or timeout else 20  # what fails again and again shall come to an end
    return handler, payload, delay, dice.randrange(10), attempts, timeout, key


async def keep_seats_taken(world: World) -> None:
    """Do what a service manager does: start what has ended by itself, and remember that it had no reason to."""

    def look() -> bool:
        for seat in world.seats:
            if seat.busy or seat.daemon.alive:
                continue
            code, said = seat.daemon.popen.returncode, seat.daemon.output_text()
            if code != 3:  # no database at the start: to be started again is right
                world.faulty_ends.append(f"{seat.daemon.pid} ended by itself with {code}:\n{said[-3000:]}")
            world.note("ended by itself", pid=seat.daemon.pid, code=code)
            world.process_ends[seat.daemon.pid] = time.time()
            seat.daemon = world.daemons.launch()
        return world.healed

    async def looked() -> bool:
        await pass_time(0.3)
        return look()

    await eventually(looked, within=24 * 3600)


async def throughput(world: World) -> float:
    """Put a burst of small jobs in and tell how many a second get done."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        began = time.monotonic()
        added = await conn.fetch(
            "insert into rota.jobs (handler) select 'noop' from generate_series(1, $1) returning job_id", BURST
        )
        world.acknowledged += [row["job_id"] for row in added]
        last = [row["job_id"] for row in added]

        async def done() -> bool:
            return not await conn.fetchval("select exists (select from rota.jobs where job_id = any ($1))", last)

        await eventually(done, within=60, what=f"the end of {BURST} small jobs")
        return BURST / (time.monotonic() - began)


async def drained(world: World) -> None:
    """Return when no job is left; whatever was lost must have been taken back by then."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        healed_at = told_at = time.monotonic()

        async def empty() -> bool:
            nonlocal told_at
            if time.monotonic() > told_at + 5:
                told_at = time.monotonic()
                left = await conn.fetch(
                    """
                    select handler, losses > 1 as suspect, state, count(*), min(run_at - now()) as first_in
                    from rota.jobs group by 1, 2, 3 order by 4 desc limit 6
                    """
                )
                world.note("left", rows=[tuple(map(str, row)) for row in left])
            expired = await conn.fetchval(
                "select count(*) from rota.jobs where state = 'running' and lease_expires_at < now() - $1 * interval '1 s'",
                REAP_S + MARGIN_S,
            )
            if expired and time.monotonic() > healed_at + 2 * (LEASE_S + REAP_S + MARGIN_S):
                raise AssertionError(f"{expired} running jobs whose lease has expired, and nobody takes them back")
            return not await conn.fetchval("select exists (select from rota.jobs)")

        await eventually(empty, within=DRAINED_WITHIN_S, what="the end of the last job")


# The verdict.


async def gather(world: World) -> Evidence:
    """Collect what is known from both servers."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        transitions = await conn.fetch(
            """
            select job_id, fence_token, kind, handler, unique_key,
                extract(epoch from lease_expires_at)::float8 as lease, extract(epoch from at)::float8 as at
            from transitions order by at
            """
        )
        ends = await conn.fetch(
            """
            select job_id, outcome, fence_token from rota.job_runs
            union all select job_id, 'dead', fence_token from rota.dead_letters
            """
        )
        left = await conn.fetch("select jobs::text as row from rota.jobs limit 20")
        effects = await conn.fetch("select job_id, step from effects")
        seen = await asyncpg.connect(world.witness)
        stack.callback(seen.terminate)
        executions = await seen.fetch(
            """
            select job_id, fence_token, handler, pid, extract(epoch from started_at)::float8 as started,
                extract(epoch from stopped_at)::float8 as stopped
            from executions where started_at is not null
            """
        )
    return Evidence(
        acknowledged=world.acknowledged,
        transitions=[Transition(*row) for row in transitions],
        executions=[Execution(*row) for row in executions],
        ends=[End(*row) for row in ends],
        left_over=[row["row"] for row in left],
        effects=[(row["job_id"], row["step"]) for row in effects],
        process_ends=world.process_ends,
        killed=world.killed,
        halted=frozenset(world.halted),
        disturbances=world.disturbances,
        reaped_within=REAP_S + MARGIN_S,
    )


async def failed_attempts(world: World) -> dict[str, int]:
    """Say of what attempts failed, and how often."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        rows = await conn.fetch(
            "select coalesce(error_kind, outcome) as kind, count(*) as count from rota.attempts group by 1 order by 2 desc"
        )
        return {row["kind"]: row["count"] for row in rows}


async def strike(world: World, faults: Sequence[Fault], seconds: float) -> None:
    """Let the faults strike, each at its time, and return when all are over."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for fault in faults:
            await pass_time(max(0.0, began + fault.at - time.monotonic()))
            group.create_task(STRIKE[fault.kind](world, fault))
        await pass_time(max(0.0, began + seconds - time.monotonic()))


async def run(world: World, *, seconds: float, daemons: int, jobs: int) -> list[str]:
    """Run the whole story; return what is wrong."""
    faults = plan(world.dice, seconds)
    world.seats = [Seat(world.daemons.launch()) for _ in range(daemons)]
    for seat in world.seats:
        seat.daemon.wait_for("node.started", within=30)
    before = max([await throughput(world) for _ in range(2)])
    world.note("throughput", jobs_per_second=round(before))
    wrong: list[str] = []
    async with asyncio.TaskGroup() as group:
        keeper = group.create_task(keep_seats_taken(world))
        async with asyncio.TaskGroup() as storm:
            storm.create_task(insert_jobs(world, jobs, seconds))
            storm.create_task(strike(world, faults, seconds))
        world.note("healed", faults=len(faults))
        try:
            await drained(world)
            world.note("drained")
            after = max([await throughput(world) for _ in range(2)])
            world.note("throughput", jobs_per_second=round(after), ratio=round(after / before, 2))
            if after < before * SLOWEST_AFTERWARDS:
                wrong.append(f"throughput fell from {before:.0f} to {after:.0f} jobs a second")
            await drained(world)
        except AssertionError as error:
            wrong.append(str(error))
        world.healed = True
        await keeper
    for seat in world.seats:
        code = seat.daemon.stop()
        world.process_ends[seat.daemon.pid] = time.time()
        if code != 0:
            wrong.append(f"{seat.daemon.pid} ended with {code} at the end")
    seen = await gather(world)
    world.note(
        "seen",
        jobs=len({step.job_id for step in seen.transitions}),
        claims=sum(step.kind == "claimed" for step in seen.transitions),
        executions=len(seen.executions),
        **{end: sum(each.outcome == end for each in seen.ends) for end in sorted({each.outcome for each in seen.ends})},
    )
    failures = await failed_attempts(world)
    world.note("attempts that failed", **failures)
    unexpected = [f"attempts failed with {kind}, which no fault explains" for kind in failures if kind not in EXPECTED]
    return [*wrong, *unexpected, *world.faulty_ends, *noise(world.daemons.started), *violations(seen)]


def noise(daemons: Sequence[DaemonProcess]) -> list[str]:
    """What the daemons wrote that is no log line: tracebacks of ours, warnings of the interpreter."""
    found = []
    for daemon in daemons:
        lines = [line for line in daemon.unexpected_output() if not line.startswith("rota: ")]
        if lines:
            found.append(f"{daemon.pid} wrote:\n" + "\n".join(lines[-60:]))
    return found


async def prepare(server: DurableServer, witness: str) -> None:
    """Make the tables in which everything is written down."""
    for dsn, statements in ((server.dsn, TRANSITIONS + ";" + EFFECTS), (witness, WITNESS)):
        conn = await asyncpg.connect(dsn)
        try:
            await conn.execute(statements)
        finally:
            await conn.close()


def main() -> int:
    """Run one seed; 0 if all laws held."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options.add_argument("--minutes", type=float, default=0.7, help="how long faults strike; healing comes on top")
    options.add_argument("--daemons", type=int, default=3)
    options.add_argument("--jobs", type=int, default=2000)
    given = options.parse_args()
    say(f"seed {given.seed}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-chaos-", dir=memory_folder())))
        folder.chmod(0o755)
        for name in ("template", "witness", "logs"):
            (folder / name).mkdir()
        make_durable_template(folder / "template")
        server = stack.enter_context(durable_server(folder / "template"))
        witness = stack.enter_context(embedded(folder / "witness", sync=False)).dsn
        environ = {
            "WITNESS_DSN": witness,
            "ROTA_LEASE": f"{LEASE_S}s",
            "ROTA_LEASE_REAP_INTERVAL": f"{REAP_S}s",
            "ROTA_DRAIN_TIMEOUT": "2s",
            "ROTA_LOG_LEVEL": "info",
        }
        daemons = stack.enter_context(Daemons(folder / "logs", server.dsn, app="process_app:app", environ=environ))
        world = World(server, witness, daemons, random.Random(given.seed))
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(prepare(server, witness))
            wrong = runner.run(run(world, seconds=given.minutes * 60, daemons=given.daemons, jobs=given.jobs))
    if wrong:
        say(f"\nseed {given.seed}: {len(wrong)} laws or promises broken", *(f"\n- {each}" for each in wrong))
        return 1
    say(f"seed {given.seed}: all laws held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
