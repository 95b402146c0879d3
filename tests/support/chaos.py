"""Kill, stop and cut off daemons and servers while jobs flow in, then restore everything and check the invariants.

The seed determines the plan of faults, but not the exact moments at which they happen. The invariants are in
chaos_checks.py, the jobs in process_app.py. The exit code is 1 if one is broken; the output has the seed and the
evidence.
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

from chaos_checks import TRANSITIONS, Disturbance, End, Evidence, Execution, Transition, find_violations
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
"""Seconds added to every deadline, for a loaded machine."""
DRAINED_WITHIN_S = 90.0
MIN_THROUGHPUT_RATIO = 0.3
"""The lowest allowed ratio of the throughput after the faults to that before."""
BURST_JOBS = 2000

JOB_WEIGHTS = {
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
"""Kind of job -> relative frequency."""

FAULT_WEIGHTS = {
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


EXPECTED_ERROR_KINDS = {
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
"""Errors with which attempts may fail here: requested by the handler's payload, or caused by lost connections."""


class Fault(NamedTuple):
    """One fault. `pick` chooses the target as a fraction of the candidates that exist at that time."""

    at: float
    kind: str
    seconds: float
    pick: float


def plan_faults(dice: random.Random, seconds: float) -> list[Fault]:
    """Plan all faults of a run."""
    faults, at = [], 1.0
    while at < seconds:
        (kind,) = dice.choices([*FAULT_WEIGHTS], weights=[*FAULT_WEIGHTS.values()])
        faults.append(Fault(round(at, 1), kind, round(dice.uniform(0.3, 1.0) ** 2 * 8, 1), dice.random()))
        at += dice.uniform(0.3, 3.0)
    return faults


@dataclass(slots=True)
class Seat:
    """One place for a daemon. When its daemon ends, another one is started there."""

    daemon: DaemonProcess
    busy: bool = False
    """A fault is acting on the daemon."""


@dataclass(slots=True)
class World:
    """Everything that a fault can change, and what is recorded for the checks."""

    server: DurableServer
    witness: str
    daemons: Daemons
    dice: random.Random
    seats: list[Seat] = field(default_factory=list)
    server_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    faults_over: bool = False
    acknowledged: list[int] = field(default_factory=list)
    process_ends: dict[int, float] = field(default_factory=dict)
    killed: list[tuple[int, float]] = field(default_factory=list)
    halted: set[int] = field(default_factory=set)
    disturbances: list[Disturbance] = field(default_factory=list)
    faulty_ends: list[str] = field(default_factory=list)

    def note(self, what: str, **fields: Any) -> None:
        """Print one line of progress."""
        write_line(f"{time.monotonic() - STARTED:6.1f}  {what}", *(f"{name}={value}" for name, value in fields.items()))

    async def client(self, stack: AsyncExitStack) -> Connection[Record]:
        """Connect as a client that retries until it succeeds."""

        async def connect() -> Connection[Record] | None:
            try:
                return await asyncpg.connect(self.server.dsn, timeout=5, server_settings={"application_name": "client"})
            except CONNECTION_ERRORS:
                return None

        connection = await eventually(connect, within=60, what="a server that accepts connections")
        stack.callback(connection.terminate)
        return connection

    def pick_free_seat(self, pick: float) -> Seat | None:
        """Choose a daemon for a fault, or None if it would be the last one."""
        free = [seat for seat in self.seats if not seat.busy and seat.daemon.alive]
        return free[int(pick * len(free))] if len(free) > 1 else None


STARTED = time.monotonic()


def write_line(*words: str) -> None:
    """Write a line and flush it."""
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


async def pass_time(seconds: float) -> None:
    """Wait for that many seconds."""
    until = time.monotonic() + seconds
    await eventually(lambda: time.monotonic() >= until, within=seconds + 60)


# The faults.


async def kill_daemon(world: World, fault: Fault) -> None:
    """Kill a daemon with SIGKILL and start another one after a while."""
    if (seat := world.pick_free_seat(fault.pick)) is None:
        return
    seat.busy = True
    seat.daemon.kill()
    world.killed.append((seat.daemon.pid, time.time()))
    world.note("killed", pid=seat.daemon.pid)
    await start_replacement(world, seat, fault.seconds)


async def halt_daemon(world: World, fault: Fault) -> None:
    """Stop a process with SIGSTOP, usually for longer than its leases, and let it continue."""
    if (seat := world.pick_free_seat(fault.pick)) is None:
        return
    seat.busy = True
    world.halted.add(seat.daemon.pid)
    seat.daemon.send(signal.SIGSTOP)
    world.note("halted", pid=seat.daemon.pid, seconds=fault.seconds)
    await pass_time(fault.seconds)
    seat.daemon.send(signal.SIGCONT)
    seat.busy = False


async def drain_daemon(world: World, fault: Fault) -> None:
    """Send SIGTERM to a daemon, as a deployment does."""
    if (seat := world.pick_free_seat(fault.pick)) is None:
        return
    seat.busy = True
    seat.daemon.send(signal.SIGTERM)
    world.note("draining", pid=seat.daemon.pid)
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
    await start_replacement(world, seat, fault.seconds / 4)


async def start_replacement(world: World, seat: Seat, after: float) -> None:
    """Start the next daemon in the seat after a while."""
    world.process_ends[seat.daemon.pid] = time.time()
    await pass_time(after)
    seat.daemon = world.daemons.launch()
    seat.busy = False


async def cut_backends(world: World, fault: Fault) -> None:
    """Terminate some server connections at random."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            terminated = await conn.fetch(
                """
                select pg_terminate_backend(pid)
                from pg_stat_activity
                where backend_type = 'client backend' and pid <> pg_backend_pid() and random() < $1
                """,
                fault.pick,
            )
            world.note("cut backends", count=len(terminated))


async def restart_server(world: World, fault: Fault) -> None:
    """Shut the server down fast, and start it again."""
    await take_server_away(world, world.server.stop, "server restarted", fault.seconds / 4)


async def kill_server(world: World, fault: Fault) -> None:
    """Kill the server with SIGKILL, and start it again."""
    await take_server_away(world, world.server.kill, "server killed", fault.seconds / 2)


async def take_server_away(world: World, end: Callable[[], None], how: str, seconds: float) -> None:
    """End the server, and start it after a while."""
    async with world.server_lock:
        began = time.time()
        end()
        world.note(how, seconds=seconds)
        await pass_time(seconds)
        world.server.start()
        away = time.time() - began
        # After an outage, the backoff of a client may last as long as the outage did.
        world.disturbances.append(Disturbance(began, time.time() + away * 1.5 + 2))


async def hold_locks(world: World, fault: Fault) -> None:
    """Lock the rows of some jobs in an open transaction."""
    began = time.time()
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            async with conn.transaction():
                locked_rows = await conn.fetch(
                    "select from rota.jobs where random() < 0.5 limit 20 for update skip locked"
                )
                world.note("locks held", rows=len(locked_rows), seconds=fault.seconds)
                await pass_time(fault.seconds)
    world.disturbances.append(Disturbance(began, time.time() + REAP_S))


async def hold_snapshot(world: World, fault: Fault) -> None:
    """Hold a snapshot so that vacuum cannot remove dead rows."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            async with conn.transaction(isolation="repeatable_read"):
                await conn.fetchval("select count(*) from rota.jobs")
                world.note("snapshot held", seconds=fault.seconds * 2)
                await pass_time(fault.seconds * 2)


async def cancel(world: World, _: Fault) -> None:
    """Cancel some waiting or running jobs."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            rows = await conn.fetch(
                "select rota.cancel(job_id) from (select job_id from rota.jobs order by random() limit 5) as some"
            )
            world.note("cancelled", answers=[row[0] for row in rows])


async def redrive(world: World, _: Fault) -> None:
    """Redrive some dead letters."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        with suppress(*CONNECTION_ERRORS):
            row = await conn.fetchrow('select * from rota.redrive_many("limit" => 20)')
            world.note("redriven", count=row and row["redriven"])


FAULT_FUNCTIONS: dict[str, Callable[[World, Fault], Coroutine[Any, Any, None]]] = {
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


# The load.


async def insert_jobs(world: World, count: int, seconds: float) -> None:
    """Insert jobs of all kinds in small batches over that many seconds."""
    began, dice = time.monotonic(), world.dice
    batch = 10
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        for inserted in range(0, count, batch):
            rows = [draw_job(dice) for _ in range(batch)]
            try:
                async with asyncio.timeout(10):
                    added = await conn.fetch(INSERT, *zip(*rows, strict=True))
                world.acknowledged += [row["job_id"] for row in added]
            except CONNECTION_ERRORS:
                conn.terminate()
                conn = await world.client(stack)
            await pass_time(max(0.0, began + seconds * inserted / count - time.monotonic()))


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


def draw_job(dice: random.Random) -> tuple[str, str, float, int, int, float | None, str | None]:
    """Draw a job: handler, payload, delay, priority, max_attempts, timeout, unique_key."""
    (kind,) = dice.choices([*JOB_WEIGHTS], weights=[*JOB_WEIGHTS.values()])
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
    attempts = 3 if kind == "flaky" or timeout else 20  # jobs that always fail must end soon
    return handler, payload, delay, dice.randrange(10), attempts, timeout, key


async def restart_ended_daemons(world: World) -> None:
    """Restart daemons that ended by themselves, as a service manager does, and record their exit as faulty."""

    def restart_all_ended() -> bool:
        for seat in world.seats:
            if seat.busy or seat.daemon.alive:
                continue
            code, output = seat.daemon.popen.returncode, seat.daemon.output_text()
            if code != 3:  # no database at the start, where a restart is correct
                world.faulty_ends.append(f"{seat.daemon.pid} ended by itself with {code}:\n{output[-3000:]}")
            world.note("ended by itself", pid=seat.daemon.pid, code=code)
            world.process_ends[seat.daemon.pid] = time.time()
            seat.daemon = world.daemons.launch()
        return world.faults_over

    async def check_after_pause() -> bool:
        await pass_time(0.3)
        return restart_all_ended()

    await eventually(check_after_pause, within=24 * 3600)


async def measure_throughput(world: World) -> float:
    """Insert a burst of small jobs and return how many finish per second."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        began = time.monotonic()
        added = await conn.fetch(
            "insert into rota.jobs (handler) select 'noop' from generate_series(1, $1) returning job_id", BURST_JOBS
        )
        world.acknowledged += [row["job_id"] for row in added]
        last = [row["job_id"] for row in added]

        async def are_finished() -> bool:
            return not await conn.fetchval("select exists (select from rota.jobs where job_id = any ($1))", last)

        await eventually(are_finished, within=60, what=f"the end of {BURST_JOBS} small jobs")
        return BURST_JOBS / (time.monotonic() - began)


async def wait_until_drained(world: World) -> None:
    """Wait until no job is left. Fail if expired leases are not reaped in time."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        healed_at = printed_at = time.monotonic()

        async def is_empty() -> bool:
            nonlocal printed_at
            if time.monotonic() > printed_at + 5:
                printed_at = time.monotonic()
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
                raise AssertionError(f"{expired} running jobs whose lease has expired, which no reaper takes back")
            return not await conn.fetchval("select exists (select from rota.jobs)")

        await eventually(is_empty, within=DRAINED_WITHIN_S, what="the end of the last job")


# The checks.


async def gather_evidence(world: World) -> Evidence:
    """Read the evidence from both servers."""
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


async def count_failed_attempts(world: World) -> dict[str, int]:
    """Return error kind -> number of failed attempts."""
    async with AsyncExitStack() as stack:
        conn = await world.client(stack)
        rows = await conn.fetch(
            "select coalesce(error_kind, outcome) as kind, count(*) as count from rota.attempts group by 1 order by 2 desc"
        )
        return {row["kind"]: row["count"] for row in rows}


async def run_faults(world: World, faults: Sequence[Fault], seconds: float) -> None:
    """Start each fault at its time and wait until all are over."""
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for fault in faults:
            await pass_time(max(0.0, began + fault.at - time.monotonic()))
            group.create_task(FAULT_FUNCTIONS[fault.kind](world, fault))
        await pass_time(max(0.0, began + seconds - time.monotonic()))


async def run(world: World, *, seconds: float, daemons: int, jobs: int) -> list[str]:
    """Run the faults and the checks; return the violations."""
    faults = plan_faults(world.dice, seconds)
    world.seats = [Seat(world.daemons.launch()) for _ in range(daemons)]
    for seat in world.seats:
        seat.daemon.wait_for("node.started", within=30)
    before = max([await measure_throughput(world) for _ in range(2)])
    world.note("throughput", jobs_per_second=round(before))
    failures: list[str] = []
    async with asyncio.TaskGroup() as group:
        keeper = group.create_task(restart_ended_daemons(world))
        async with asyncio.TaskGroup() as storm:
            storm.create_task(insert_jobs(world, jobs, seconds))
            storm.create_task(run_faults(world, faults, seconds))
        world.note("faults over", faults=len(faults))
        try:
            await wait_until_drained(world)
            world.note("drained")
            after = max([await measure_throughput(world) for _ in range(2)])
            world.note("throughput", jobs_per_second=round(after), ratio=round(after / before, 2))
            if after < before * MIN_THROUGHPUT_RATIO:
                failures.append(f"throughput fell from {before:.0f} to {after:.0f} jobs a second")
            await wait_until_drained(world)
        except AssertionError as error:
            failures.append(str(error))
        world.faults_over = True
        await keeper
    for seat in world.seats:
        code = seat.daemon.stop()
        world.process_ends[seat.daemon.pid] = time.time()
        if code != 0:
            failures.append(f"{seat.daemon.pid} ended with {code} at the end")
    evidence = await gather_evidence(world)
    world.note(
        "recorded",
        jobs=len({step.job_id for step in evidence.transitions}),
        claims=sum(step.kind == "claimed" for step in evidence.transitions),
        executions=len(evidence.executions),
        **{
            end: sum(each.outcome == end for each in evidence.ends)
            for end in sorted({each.outcome for each in evidence.ends})
        },
    )
    error_counts = await count_failed_attempts(world)
    world.note("failed attempts", **error_counts)
    unexpected = [
        f"attempts failed with {kind}, which no fault explains"
        for kind in error_counts
        if kind not in EXPECTED_ERROR_KINDS
    ]
    return [
        *failures,
        *unexpected,
        *world.faulty_ends,
        *unexpected_output(world.daemons.started),
        *find_violations(evidence),
    ]


def unexpected_output(daemons: Sequence[DaemonProcess]) -> list[str]:
    """Return the output of the daemons that is not log lines: tracebacks and interpreter warnings."""
    found = []
    for daemon in daemons:
        lines = [line for line in daemon.unexpected_output() if not line.startswith("rota: ")]
        if lines:
            found.append(f"{daemon.pid} wrote:\n" + "\n".join(lines[-60:]))
    return found


async def create_witness_tables(server: DurableServer, witness: str) -> None:
    """Create the tables that record transitions, effects and executions."""
    for dsn, statements in ((server.dsn, TRANSITIONS + ";" + EFFECTS), (witness, WITNESS)):
        conn = await asyncpg.connect(dsn)
        try:
            await conn.execute(statements)
        finally:
            await conn.close()


def main() -> int:
    """Run one seed; return 0 if all invariants held."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options.add_argument("--minutes", type=float, default=0.7, help="duration of the faults, without the recovery")
    options.add_argument("--daemons", type=int, default=3)
    options.add_argument("--jobs", type=int, default=2000)
    given = options.parse_args()
    write_line(f"seed {given.seed}")
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
            runner.run(create_witness_tables(server, witness))
            failures = runner.run(run(world, seconds=given.minutes * 60, daemons=given.daemons, jobs=given.jobs))
    if failures:
        write_line(f"\nseed {given.seed}: {len(failures)} invariants broken", *(f"\n- {each}" for each in failures))
        return 1
    write_line(f"seed {given.seed}: all invariants held")
    return 0


if __name__ == "__main__":
    sys.exit(main())
