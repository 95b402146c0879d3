"""Measure how the rate grows with the number of daemons on one machine, and what limits it."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from rota.bench.database import cores
from rota.bench.drain import drain_once
from rota.bench.figures import Comparison
from rota.db.connecting import close_connection, open_connection
from rota.supervision.loop import run_both

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Figures, Reporter

SAMPLE_SECONDS = 0.02

# Without a wait event, an active session runs on a core, or waits for one.
SAMPLE = """
select coalesce(wait_event_type || ':' || wait_event, 'running') from pg_stat_activity
where datname = current_database() and state = 'active' and pid <> pg_backend_pid()
"""
NOTES = (
    "gain: the rate compared with the first row. machine_percent: used part of all cores, by daemons and server together",
    "daemon_us, server_us: processor time per job in microseconds. sessions: what the daemons' active sessions were doing, sampled",
    "If machine_percent is near 100, the processor is the limit. Otherwise the sessions' wait events name it.",
)


async def measure_fleet(
    database: BenchDatabase, reporter: Reporter, *, jobs: int, counts: Sequence[int], slots: int
) -> Comparison:
    """Drain `jobs` jobs with each number of daemons."""
    rows: list[dict[str, str | float | int | None]] = []
    first = 0.0
    for count in counts:
        done = asyncio.Event()
        draining = _drain_and_set(done, drain_once(database, reporter, jobs=jobs, count=count, slots=slots))
        figures, sessions = await run_both(draining, _sample_sessions(database, done))
        rate = jobs / figures.seconds
        first = first or rate
        cpu_us = (figures.cpu_us_per_job or 0.0) + (figures.server_cpu_us_per_job or 0.0)
        rows.append(
            {
                "daemons": count,
                "jobs_per_second": rate,
                "gain": rate / first,
                "daemon_us": figures.cpu_us_per_job,
                "server_us": figures.server_cpu_us_per_job,
                "machine_percent": cpu_us * rate / 1e4 / cores() if cpu_us else None,
                "wal_bytes": figures.wal_bytes_per_job,
                "statements_per_job": figures.statements_per_job,
                "sessions": _most_frequent(sessions),
            }
        )
    return Comparison(title=f"{jobs:,} jobs, {slots} slots per daemon", rows=rows, notes=NOTES)


async def _drain_and_set(done: asyncio.Event, drain: Awaitable[Figures]) -> Figures:
    figures = await drain
    done.set()
    return figures


async def _sample_sessions(database: BenchDatabase, done: asyncio.Event) -> Counter[str]:
    """Sample on a connection of its own. The sampler's few queries are part of the server's figures."""
    sessions: Counter[str] = Counter()
    db = await open_connection(database.dsn)
    try:
        while not done.is_set():
            sessions.update(row[0] for row in await db.fetch(SAMPLE))
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), SAMPLE_SECONDS)
    finally:
        await close_connection(db)
    return sessions


def _most_frequent(sessions: Counter[str]) -> str:
    total = sessions.total()
    return ", ".join(f"{name} {count / total:.0%}" for name, count in sessions.most_common(3))
