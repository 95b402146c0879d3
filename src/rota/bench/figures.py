"""The figures of a bench, printed as a JSON object or as a table with explanations."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rota.bench.ground import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measured figures. A figure that this bench does not measure is None."""

    seconds: float
    jobs: int | None = None
    schedules: int | None = None
    probes: int | None = None
    jobs_per_second: float | None = None
    floor_per_second: float | None = None
    ratio_to_floor: float | None = None
    enqueued_per_second: float | None = None
    copied_per_second: float | None = None
    ratio_to_copy: float | None = None
    fires_per_second: float | None = None
    lateness_p50_ms: float | None = None
    lateness_p99_ms: float | None = None
    look_ms: float | None = None
    look_ms_at_few: float | None = None
    look_pages: int | None = None
    look_pages_at_few: int | None = None
    idle_core_percent: float | None = None
    idle_statements_per_second: float | None = None
    scrape_p50_ms: float | None = None
    scrape_p99_ms: float | None = None
    scrape_series: int | None = None
    scrape_bytes: int | None = None
    sample_ms: float | None = None
    cpu_us_per_job: float | None = None
    start_p50_ms: float | None = None
    start_p99_ms: float | None = None
    start_max_ms: float | None = None
    equal_p50_ms: float | None = None
    equal_p99_ms: float | None = None
    insert_p50_ms: float | None = None
    insert_p99_ms: float | None = None
    claim_p50_ms: float | None = None
    claim_p99_ms: float | None = None
    statements_per_job: float | None = None
    commits_per_job: float | None = None
    wal_bytes_per_job: float | None = None
    dead_tuples: int | None = None
    rss_mb: float | None = None
    rss_quarter_mb: float | None = None
    daemons: int | None = None
    slots: int | None = None


MEANING = {
    "jobs_per_second": (
        "{:,.0f}",
        "from the resume of the queue to the last job in the ledger, on the database's clock",
    ),
    "floor_per_second": ("{:,.0f}", "the claim and the settlement alone: two connections, batches of 500, no daemon"),
    "ratio_to_floor": ("{:.2f}", "jobs_per_second / floor_per_second: the share that remains with a daemon"),
    "enqueued_per_second": ("{:,.0f}", "by rota.enqueue_many on asyncpg, in one transaction: the median of the rounds"),
    "copied_per_second": ("{:,.0f}", "by a bare COPY of the same rows, ready-made, in turns with it"),
    "ratio_to_copy": ("{:.2f}", "enqueued_per_second / copied_per_second"),
    "fires_per_second": ("{:,.0f}", "from the instant at which they were due to the last one recorded"),
    "lateness_p50_ms": (
        "{:,.1f}",
        "half of the fires were recorded and their jobs enqueued so soon after their instant",
    ),
    "lateness_p99_ms": ("{:,.1f}", "… 99 of 100"),
    "look_ms": ("{:.2f}", "one look for due schedules where none is due, as a daemon sees it: the median"),
    "look_ms_at_few": ("{:.2f}", "… where only a thousand were stored"),
    "look_pages": ("{:,}", "pages that such a look touches"),
    "look_pages_at_few": ("{:,}", "… where only a thousand were stored"),
    "idle_core_percent": ("{:.2f}", "processor time of a daemon with nothing to do, of one core"),
    "idle_statements_per_second": (
        "{:.2f}",
        "sent by a daemon with nothing to do (without pg_stat_statements: its commits)",
    ),
    "scrape_p50_ms": ("{:.2f}", "half of the scrapes of /metrics were answered so soon"),
    "scrape_p99_ms": ("{:.2f}", "… 99 of 100"),
    "scrape_series": ("{:,}", "time series in each"),
    "scrape_bytes": ("{:,}", "its size"),
    "sample_ms": ("{:.1f}", "the query of every 15 seconds from which the gauges of all these jobs come: the median"),
    "cpu_us_per_job": (
        "{:.1f}",
        "processor time of the daemons for each job, in microseconds; the server's not included",
    ),
    "start_p50_ms": (
        "{:.2f}",
        "half of the jobs were in their handler so soon after their INSERT was sent (commit included), or their instant",
    ),
    "start_p99_ms": ("{:.2f}", "… 99 of 100"),
    "start_max_ms": ("{:.2f}", "… all"),
    "probes": (
        "{:,}",
        "jobs that were sent one by one while the backlog lasted; the delays above are those of the urgent ones",
    ),
    "equal_p50_ms": (
        "{:.2f}",
        "half of the probes with the backlog's priority, an earlier run_at and another handler were in their handler so soon",
    ),
    "equal_p99_ms": ("{:.2f}", "… 99 of 100"),
    "insert_p50_ms": ("{:.2f}", "of it, the INSERT and its commit, as its client sees them"),
    "insert_p99_ms": ("{:.2f}", "… 99 of 100"),
    "claim_p50_ms": ("{:.2f}", "from the INSERT's now() to the claim, by the database's clock"),
    "claim_p99_ms": ("{:.2f}", "… 99 of 100"),
    "statements_per_job": (
        "{:.4f}",
        "sent by the daemons, housekeeping included (without pg_stat_statements: their commits)",
    ),
    "commits_per_job": ("{:.4f}", "transactions of this database, without the bench's own questions"),
    "wal_bytes_per_job": ("{:,.0f}", "write-ahead log of the whole server; after a checkpoint more, by full pages"),
    "dead_tuples": ("{:,}", "in rota.jobs at the end: what autovacuum hasn't come to yet"),
    "rss_mb": ("{:.1f}", "resident memory of the largest daemon at the end"),
    "rss_quarter_mb": ("{:.1f}", "… after a quarter of the jobs: the two should be alike"),
}


class Show:
    """Shows progress on standard error if it is a terminal, and the result on standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._beside = Console(stderr=True)

    @contextmanager
    def step(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar. Yields a function to call with the number done since the last call."""
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._beside, disable=not self._beside.is_terminal) as progress:
            bar = progress.add_task(what, total=total)
            yield lambda done: progress.advance(bar, done)

    def result(self, figures: Figures, machine: Machine) -> None:
        """Print the figures and the machine that they were measured on."""
        found = {name: value for name, value in asdict(figures).items() if value is not None}
        if self._as_json:
            rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in found.items()}
            print(json.dumps(rounded | {"machine": asdict(machine)}))  # noqa: T201  the output itself
            return
        out = Console()
        table = Table(box=None, pad_edge=False, header_style="")
        table.add_column(_headline(figures), no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("", style="dim")
        for name, (form, meaning) in MEANING.items():
            if name in found:
                table.add_row(name, form.format(found[name]), meaning)
        out.print(table)
        slots = f" of {figures.slots} slots" if figures.slots else ""
        setting = f"{figures.daemons} daemon(s){slots}, " if figures.daemons else ""
        out.print(
            f"{setting}{machine.cores} cores for all of it, PostgreSQL {machine.postgresql}, fsync {machine.fsync}, "
            f"synchronous_commit {machine.synchronous_commit}, shared_buffers {machine.shared_buffers}, jit {machine.jit}",
            style="dim",
            highlight=False,
        )


def _headline(figures: Figures) -> str:
    what = (
        f"{figures.jobs:,} jobs" if figures.jobs is not None else f"{figures.schedules:,} schedules stored, none due,"
    )
    beside = f", {figures.schedules:,} schedules stored" if figures.jobs is not None and figures.schedules else ""
    return f"{what} in {figures.seconds:.2f} s{beside}"
