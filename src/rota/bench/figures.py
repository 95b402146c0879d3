"""The figures of a measurement, printed as a JSON object or as a table with explanations."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rota.bench.database import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measured figures. A figure that the command does not measure is None."""

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
    server_cpu_us_per_job: float | None = None
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


FEW = 100.0
"""Smaller numbers are printed with two decimals."""

PIPED_WIDTH = 200
"""Width of a comparison that is not printed on a terminal."""

EXPLANATIONS = {
    "jobs_per_second": (
        "{:,.0f}",
        "from the resume of the queue to the last job in the ledger, on the database's clock",
    ),
    "floor_per_second": ("{:,.0f}", "only claims and settlements: two connections, batches of 500, no daemon"),
    "ratio_to_floor": ("{:.2f}", "jobs_per_second / floor_per_second"),
    "enqueued_per_second": ("{:,.0f}", "rota.enqueue_many on asyncpg, in one transaction: median of the rounds"),
    "copied_per_second": ("{:,.0f}", "a bare COPY of the same rows: median of the rounds"),
    "ratio_to_copy": ("{:.2f}", "enqueued_per_second / copied_per_second"),
    "fires_per_second": ("{:,.0f}", "from their instant to the last recorded fire"),
    "lateness_p50_ms": ("{:,.1f}", "from the instant until the fire is recorded and its job enqueued: median"),
    "lateness_p99_ms": ("{:,.1f}", "the same: 99th percentile"),
    "look_ms": ("{:.2f}", "one poll for due schedules of which none is due, as a daemon sees it: median"),
    "look_ms_at_few": ("{:.2f}", "the same with only a thousand schedules stored"),
    "look_pages": ("{:,}", "pages that such a poll reads"),
    "look_pages_at_few": ("{:,}", "the same with only a thousand schedules stored"),
    "idle_core_percent": ("{:.2f}", "processor time of an idle daemon, in percent of one core"),
    "idle_statements_per_second": (
        "{:.2f}",
        "statements of an idle daemon (its commits, if pg_stat_statements is missing)",
    ),
    "scrape_p50_ms": ("{:.2f}", "one scrape of /metrics: median"),
    "scrape_p99_ms": ("{:.2f}", "the same: 99th percentile"),
    "scrape_series": ("{:,}", "time series in a scrape"),
    "scrape_bytes": ("{:,}", "size of a scrape"),
    "sample_ms": ("{:.1f}", "the query for the gauges of these jobs, which runs every 15 seconds: median"),
    "cpu_us_per_job": ("{:.1f}", "processor time of the daemons per job in microseconds, without the server's"),
    "server_cpu_us_per_job": ("{:.1f}", "the same of the whole server, with its background processes"),
    "start_p50_ms": (
        "{:.2f}",
        "from the sending of a job's INSERT, or from its schedule's instant, to the start of its handler: median",
    ),
    "start_p99_ms": ("{:.2f}", "the same: 99th percentile"),
    "start_max_ms": ("{:.2f}", "the same: maximum"),
    "probes": ("{:,}", "jobs sent one by one during the backlog; start_*_ms are the delays of the urgent ones"),
    "equal_p50_ms": (
        "{:.2f}",
        "start delay of probes with the backlog's priority, an earlier run_at and another handler: median",
    ),
    "equal_p99_ms": ("{:.2f}", "the same: 99th percentile"),
    "insert_p50_ms": ("{:.2f}", "the INSERT and its commit, as the client sees them: median"),
    "insert_p99_ms": ("{:.2f}", "the same: 99th percentile"),
    "claim_p50_ms": ("{:.2f}", "from the INSERT's now() to the claim, on the database's clock: median"),
    "claim_p99_ms": ("{:.2f}", "the same: 99th percentile"),
    "statements_per_job": (
        "{:.4f}",
        "statements of the daemons, with housekeeping (their commits, if pg_stat_statements is missing)",
    ),
    "commits_per_job": ("{:.4f}", "transactions in this database, without the bench's own"),
    "wal_bytes_per_job": (
        "{:,.0f}",
        "write-ahead log of the whole server. It is larger after a checkpoint: full pages",
    ),
    "dead_tuples": ("{:,}", "dead rows in rota.jobs at the end, which autovacuum has not removed yet"),
    "rss_mb": ("{:.1f}", "resident memory of the largest daemon at the end"),
    "rss_quarter_mb": ("{:.1f}", "the same after a quarter of the jobs. A difference points to a leak"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several measurements of one run: one row each, with the same keys. A value that can't be measured is None."""

    title: str
    rows: Sequence[Mapping[str, str | float | int | None]]
    notes: Sequence[str]


class Reporter:
    """Shows progress on standard error if it is a terminal, and prints the result on standard output."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._stderr = Console(stderr=True)

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar. Yields a function that advances the bar by a number."""
        columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._stderr, disable=not self._stderr.is_terminal) as progress:
            bar = progress.add_task(title, total=total)
            yield lambda done: progress.advance(bar, done)

    def print_result(self, figures: Figures | Comparison, machine: Machine) -> None:
        """Print the figures and the machine on which they were measured."""
        if isinstance(figures, Comparison):
            self._print_comparison(figures, machine)
            return
        measured = {name: value for name, value in asdict(figures).items() if value is not None}
        if self._as_json:
            rounded = {k: round(v, 5) if isinstance(v, float) else v for k, v in measured.items()}
            print(json.dumps(rounded | {"machine": asdict(machine)}))  # noqa: T201  the output itself
            return
        out = Console()
        table = Table(box=None, pad_edge=False, header_style="")
        table.add_column(_headline(figures), no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("", style="dim")
        for name, (format_, explanation) in EXPLANATIONS.items():
            if name in measured:
                table.add_row(name, format_.format(measured[name]), explanation)
        out.print(table)
        slots = f" of {figures.slots} slots" if figures.slots else ""
        setting = f"{figures.daemons} daemon(s){slots}, " if figures.daemons else ""
        out.print(setting + _describe(machine), style="dim", highlight=False)

    def _print_comparison(self, comparison: Comparison, machine: Machine) -> None:
        if self._as_json:
            rows = [
                {name: round(value, 5) if isinstance(value, float) else value for name, value in row.items()}
                for row in comparison.rows
            ]
            print(json.dumps({"rows": rows, "machine": asdict(machine)}))  # noqa: T201  the output itself
            return
        out = Console()
        if not out.is_terminal:
            out = Console(width=PIPED_WIDTH)
        out.print(comparison.title, highlight=False)
        table = Table(box=None, pad_edge=False, header_style="")
        for name, value in comparison.rows[0].items():
            table.add_column(name, justify="left" if isinstance(value, str) else "right")
        for row in comparison.rows:
            table.add_row(*map(_format_cell, row.values()))
        out.print(table)
        for line in (*comparison.notes, _describe(machine)):
            out.print(line, style="dim", highlight=False)


def _format_cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.2f}" if value < FEW else f"{value:,.0f}"
    return value if isinstance(value, str) else f"{value:,}"


def _describe(machine: Machine) -> str:
    return (
        f"{machine.cores} cores for daemons and server, PostgreSQL {machine.postgresql}, fsync {machine.fsync}, "
        f"synchronous_commit {machine.synchronous_commit}, shared_buffers {machine.shared_buffers}, jit {machine.jit}"
    )


def _headline(figures: Figures) -> str:
    if figures.jobs is None:
        return f"{figures.schedules:,} schedules stored, none due, in {figures.seconds:.2f} s"
    stored = f", {figures.schedules:,} schedules stored" if figures.schedules else ""
    return f"{figures.jobs:,} jobs in {figures.seconds:.2f} s{stored}"
