"""The commands: `rota bench drain | latency | enqueue | floor | stored | spike | scrape | priority | fleet | prune | growth`."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rota.bench.database import BenchDatabase, server_to_measure, temporary_database
from rota.bench.drain import measure_drain
from rota.bench.enqueue import measure_enqueue
from rota.bench.figures import Comparison, Figures, Reporter
from rota.bench.fleet import measure_fleet
from rota.bench.floor import measure_floor
from rota.bench.growth import measure_growth
from rota.bench.latency import measure_latency
from rota.bench.priority import MAX_PROBES, measure_priority
from rota.bench.prune import measure_pruning
from rota.bench.scrape import measure_scrape
from rota.bench.spike import measure_spike
from rota.bench.stored import measure_stored
from rota.db import queries

if sys.platform == "win32":
    from asyncio import run
else:
    from uvloop import run

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

bench_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    help="Measure rota on a server, in a temporary database.",
)

Jobs = Annotated[int, typer.Option(min=1, help="Number of jobs.")]
Count = Annotated[int, typer.Option("--daemons", min=1, help="Number of daemons.")]
Slots = Annotated[int, typer.Option(min=1, max=10_000, help="Number of jobs that each daemon runs at once.")]
Schedules = Annotated[int, typer.Option(min=1, help="Number of stored schedules.")]
Dsn = Annotated[str | None, typer.Option(help="URL of the server. [default: DATABASE_URL]")]
Embedded = Annotated[bool, typer.Option("--embedded", help="Start a server with fsync in a temporary folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@bench_app.command()
def drain(
    *,
    jobs: Jobs = 200_000,
    count: Count = 1,
    slots: Slots = 100,
    floor: Annotated[bool, typer.Option(help="Also measure the floor, before and after.")] = True,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure how fast daemons drain a backlog.

    The jobs do nothing. The rate is compared with the floor.
    """

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        return await measure_drain(database, reporter, jobs=jobs, count=count, slots=slots, floor=floor)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def latency(
    *,
    rate: Annotated[float, typer.Option(min=0.1, max=5000, help="Inserts per second.")] = 50,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Duration of the measurement.")] = 20,
    count: Count = 1,
    slots: Slots = 100,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure the start delay of single jobs.

    This is the time from the INSERT of a job to the start of its handler.
    """
    if rate * seconds < 1:
        raise typer.BadParameter("--rate times --seconds is less than one job. Raise --rate or --seconds")

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        return await measure_latency(database, reporter, rate=rate, seconds=seconds, count=count, slots=slots)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def enqueue(*, jobs: Jobs = 50_000, dsn: Dsn = None, embedded: Embedded = False, as_json: Json = False) -> None:
    """Compare rota.enqueue_many with a bare COPY.

    Both insert the same rows, in turns.
    """

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        return await measure_enqueue(database, reporter, jobs=jobs)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def floor(*, jobs: Jobs = 100_000, dsn: Dsn = None, embedded: Embedded = False, as_json: Json = False) -> None:
    """Measure the floor: claims and settlements only.

    Without a daemon, this is the highest rate that the schema allows on this server.
    """

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        with reporter.progress("floor", jobs) as advance:
            per_second = await measure_floor(database, jobs, advance)
        return Figures(jobs=jobs, seconds=jobs / per_second, floor_per_second=per_second)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def stored(
    *,
    schedules: Schedules = 1_000_000,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="Seconds for which idle daemons are measured.")] = 30,
    count: Count = 1,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure the poll of many stored schedules.

    None of them is due. Also measures the cost of an idle daemon.
    """

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        return await measure_stored(database, reporter, schedules=schedules, count=count, seconds=seconds)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def spike(
    *,
    schedules: Schedules = 1_000_000,
    due: Annotated[int, typer.Option(min=1, help="Number of them that are due at one instant.")] = 100_000,
    count: Count = 1,
    slots: Slots = 1000,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure many schedules due at one instant.

    The measurement starts right after a checkpoint, and ends when all jobs of the schedules are done.
    """
    if schedules % due:
        raise typer.BadParameter("--schedules must be a multiple of --due, because every nth schedule is made due")

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        return await measure_spike(database, reporter, schedules=schedules, due=due, count=count, slots=slots)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def scrape(
    *,
    jobs: Annotated[
        int, typer.Option(min=1, max=queries.MAX_SAMPLED_DEAD_LETTERS, help="Number of stored jobs.")
    ] = 100_000,
    names: Annotated[int, typer.Option(min=1, help="Number of handlers, and of queues, that the jobs have.")] = 10_000,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure scrapes of /metrics with many jobs.

    The daemon doesn't know the jobs' handlers and queues.
    """

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        return await measure_scrape(database, reporter, jobs=jobs, names=names)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def priority(
    *,
    jobs: Jobs = 500_000,
    probes: Annotated[int, typer.Option(min=5, max=MAX_PROBES, help="Number of single jobs to send.")] = 150,
    milliseconds: Annotated[int, typer.Option(min=0, max=60_000, help="Duration of each job of the backlog.")] = 0,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure the start delay of urgent jobs.

    They are inserted behind a backlog of due jobs. The daemon has the default settings.
    """

    async def work(database: BenchDatabase, reporter: Reporter) -> Figures:
        return await measure_priority(database, reporter, jobs=jobs, probes=probes, milliseconds=milliseconds)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def fleet(
    *,
    jobs: Jobs = 200_000,
    counts: Annotated[str, typer.Option("--daemons", help="Numbers of daemons, separated by commas.")] = "1,2,4,8",
    slots: Slots = 100,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure several daemons on this machine.

    Prints the rate and the processor time per job for each number of daemons, and where the time goes.
    """
    numbers = _numbers("--daemons", counts)

    async def work(database: BenchDatabase, reporter: Reporter) -> Comparison:
        return await measure_fleet(database, reporter, jobs=jobs, counts=numbers, slots=slots)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def prune(
    *,
    jobs: Jobs = 200_000,
    expired: Annotated[int, typer.Option(min=1, help="Number of expired rows of each kind.")] = 500_000,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Number of drains with and without pruning.")] = 4,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure what deleting history costs.

    Daemons drain a backlog with and without expired history to delete, in turns.
    """

    async def work(database: BenchDatabase, reporter: Reporter) -> Comparison:
        return await measure_pruning(database, reporter, jobs=jobs, expired=expired, rounds=rounds)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def growth(
    *,
    jobs: Jobs = 30_000,
    sizes: Annotated[
        str, typer.Option(help="Numbers of future jobs, of due jobs and of ledger rows, separated by commas.")
    ] = "10000,100000,1000000",
    handlers: Annotated[str, typer.Option(help="Numbers of handlers.")] = "1,50,500",
    queues: Annotated[str, typer.Option(help="Numbers of queues.")] = "1,50,1000",
    idle: Annotated[str, typer.Option(help="Numbers of idle daemons.")] = "1,8,32",
    full: Annotated[bool, typer.Option("--full", help="Add 10,000,000 to --sizes. This takes much longer.")] = False,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure how the cost of a job grows.

    Prints processor time, write-ahead log and buffers per job, for growing numbers of jobs, ledger rows, handlers, queues and idle
    daemons. One of them grows at a time.
    """
    stored = _numbers("--sizes", sizes) + ([10_000_000] if full else [])

    async def work(database: BenchDatabase, reporter: Reporter) -> Comparison:
        return await measure_growth(
            database,
            reporter,
            jobs=jobs,
            curves=[
                ("future jobs", stored),
                ("due backlog", stored),
                ("ledger rows", stored),
                ("handlers", _numbers("--handlers", handlers)),
                ("queues", _numbers("--queues", queues)),
                ("idle daemons", _numbers("--idle", idle)),
            ],
        )

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


def _numbers(option: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise typer.BadParameter(f"{option} must be positive numbers separated by commas, not {text!r}")
    return numbers


def _run(
    work: Callable[[BenchDatabase, Reporter], Awaitable[Figures | Comparison]],
    *,
    dsn: str | None,
    embedded: bool,
    as_json: bool,
) -> None:
    reporter = Reporter(as_json=as_json)

    async def measure_and_print(server: str) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  this runs in a task
        if sys.platform != "win32":
            # Without this handler, SIGTERM would leave the database and the daemons behind.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with temporary_database(server) as database:
            figures = await work(database, reporter)
            reporter.print_result(figures, await database.describe_machine())

    with server_to_measure(dsn, embedded=embedded) as server:
        try:
            run(measure_and_print(server))
        except asyncio.CancelledError:
            raise typer.Exit(128 + signal.SIGTERM) from None
