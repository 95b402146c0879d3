"""The commands: `rota bench drain | latency | enqueue | floor | stored | spike | scrape | priority`."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rota.bench.drain import drain as measure_drain
from rota.bench.enqueue import measure_enqueue
from rota.bench.figures import Figures, Show
from rota.bench.floor import measure_floor
from rota.bench.ground import Ground, own_database, some_server
from rota.bench.latency import latency as measure_latency
from rota.bench.priority import MAX_PROBES
from rota.bench.priority import priority as measure_priority
from rota.bench.scrape import scrape as measure_scrape
from rota.bench.spike import spike as measure_spike
from rota.bench.stored import stored as measure_stored
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
    help="Measure rota on a server, in a database of its own.",
)

Jobs = Annotated[int, typer.Option(min=1, help="How many jobs.")]
Count = Annotated[int, typer.Option("--daemons", min=1, help="How many daemons.")]
Slots = Annotated[int, typer.Option(min=1, max=10_000, help="Slots of each daemon: jobs it runs at once.")]
Schedules = Annotated[int, typer.Option(min=1, help="How many schedules are stored.")]
Dsn = Annotated[str | None, typer.Option(help="The server, as a URL. Default: DATABASE_URL.")]
Embedded = Annotated[bool, typer.Option("--embedded", help="A server of its own, fsync on, in a temporary folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@bench_app.command()
def drain(
    *,
    jobs: Jobs = 200_000,
    count: Count = 1,
    slots: Slots = 500,
    floor: Annotated[bool, typer.Option(help="Measure the floor before and after, too.")] = True,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Drain a backlog of jobs that do nothing, and compare it with the floor."""

    async def work(ground: Ground, show: Show) -> Figures:
        return await measure_drain(ground, show, jobs=jobs, count=count, slots=slots, floor=floor)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def latency(
    *,
    rate: Annotated[float, typer.Option(min=0.1, max=5000, help="Inserts a second.")] = 50,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="For how long.")] = 20,
    count: Count = 1,
    slots: Slots = 100,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure the delay from a single INSERT to its handler."""
    if rate * seconds < 1:
        raise typer.BadParameter("at that rate, not one job is inserted in that time: raise --rate or --seconds")

    async def work(ground: Ground, show: Show) -> Figures:
        return await measure_latency(ground, show, rate=rate, seconds=seconds, count=count, slots=slots)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def enqueue(*, jobs: Jobs = 50_000, dsn: Dsn = None, embedded: Embedded = False, as_json: Json = False) -> None:
    """Insert many jobs from Python, in turns with a bare COPY of the same rows."""

    async def work(ground: Ground, show: Show) -> Figures:
        return await measure_enqueue(ground, show, jobs=jobs)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def floor(*, jobs: Jobs = 100_000, dsn: Dsn = None, embedded: Embedded = False, as_json: Json = False) -> None:
    """Run the claim and the settlement alone: what the schema allows on this server."""

    async def work(ground: Ground, show: Show) -> Figures:
        with show.step("floor", jobs) as tell:
            per_second = await measure_floor(ground, jobs, tell)
        return Figures(jobs=jobs, seconds=jobs / per_second, floor_per_second=per_second)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def stored(
    *,
    schedules: Schedules = 1_000_000,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="For how long idle daemons are watched.")] = 30,
    count: Count = 1,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure what a look at stored schedules costs of which none is due, and a daemon that has nothing to do."""

    async def work(ground: Ground, show: Show) -> Figures:
        return await measure_stored(ground, show, schedules=schedules, count=count, seconds=seconds)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def spike(
    *,
    schedules: Schedules = 1_000_000,
    due: Annotated[int, typer.Option(min=1, help="How many of them are due at one instant.")] = 100_000,
    count: Count = 1,
    slots: Slots = 1000,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Have many stored schedules fall due at one instant, right after a checkpoint, and measure until their jobs are done."""
    if schedules % due:
        raise typer.BadParameter("every nth schedule is made due, so --schedules must be a multiple of --due")

    async def work(ground: Ground, show: Show) -> Figures:
        return await measure_spike(ground, show, schedules=schedules, due=due, count=count, slots=slots)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def scrape(
    *,
    jobs: Annotated[
        int, typer.Option(min=1, max=queries.MAX_SAMPLED_DEAD_LETTERS, help="How many jobs are stored.")
    ] = 100_000,
    names: Annotated[int, typer.Option(min=1, help="Of how many handlers, in as many queues.")] = 10_000,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Scrape a daemon beside many jobs whose handlers and queues it doesn't know."""

    async def work(ground: Ground, show: Show) -> Figures:
        return await measure_scrape(ground, show, jobs=jobs, names=names)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


@bench_app.command()
def priority(
    *,
    jobs: Jobs = 500_000,
    probes: Annotated[int, typer.Option(min=5, max=MAX_PROBES, help="How many jobs are sent while it lasts.")] = 150,
    milliseconds: Annotated[int, typer.Option(min=0, max=60_000, help="How long each job of the backlog takes.")] = 0,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: Json = False,
) -> None:
    """Measure how soon urgent jobs start behind a backlog of due jobs, at the default settings."""

    async def work(ground: Ground, show: Show) -> Figures:
        return await measure_priority(ground, show, jobs=jobs, probes=probes, milliseconds=milliseconds)

    _run(work, dsn=dsn, embedded=embedded, as_json=as_json)


def _run(work: Callable[[Ground, Show], Awaitable[Figures]], *, dsn: str | None, embedded: bool, as_json: bool) -> None:
    show = Show(as_json=as_json)

    async def whole(server: str) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  we are in one
        if sys.platform != "win32":
            # Without it, a run that is ended leaves its database and its daemons behind.
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        async with own_database(server) as ground:
            figures = await work(ground, show)
            show.result(figures, await ground.machine())

    with some_server(dsn, embedded=embedded) as server:
        try:
            run(whole(server))
        except asyncio.CancelledError:
            raise typer.Exit(128 + signal.SIGTERM) from None
