"""Measure how fast daemons run many schedules that are due at one instant."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg

from rota.bench.daemons import daemons
from rota.bench.drain import until_ended
from rota.bench.figures import Figures
from rota.bench.jobs import NOOP
from rota.bench.schedules import plant
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from datetime import datetime

    from rota.bench.figures import Show
    from rota.bench.ground import Ground

A_DAY = timedelta(days=1)

MIN_LEAD = timedelta(seconds=2)
"""The shortest time from the end of the preparation to the instant."""

# Spread the due schedules over the whole table, as in practice: between two of them lie others that aren't due.
SET_CLOCKS = """
update rota.schedule_clocks set next_fire_at = now() + $2::interval where schedule_id % $1 = 0
returning next_fire_at
"""
FIRED = "select count(*) from rota.fires where disposition = 'enqueued'"
LAST = """
select max(finished_at) as finished, (select max(decided_at) from rota.fires) as fired from rota.job_runs
"""
LATENESS = """
select percentile_disc(array[0.5, 0.99]) within group (order by decided_at - scheduled_for) from rota.fires
"""
START = """
select percentile_disc(array[0.5, 0.99, 1.0]) within group (order by started_at - scheduled_for) from rota.job_runs
"""


async def spike(ground: Ground, show: Show, *, schedules: int, due: int, count: int, slots: int) -> Figures:
    """Have `due` of `schedules` stored schedules fall due at one instant, and measure until all their jobs are done."""
    with show.step("schedules stored", schedules) as tell:
        await plant(ground, tell, first=1, last=schedules, handler=NOOP)
    async with daemons(ground, count=count, slots=slots) as running:
        instant, due = await _set_clocks(ground, schedules // due)
        before = await ground.counters(settled=False)
        used = running.cpu_seconds()
        with show.step(f"{due:,} fires, {count} daemon{'s' if count > 1 else ''}", due) as tell:
            await until_ended(ground, running, 0, due, tell)
        used = running.cpu_seconds() - used
        rss = running.rss_mb()
        ours = ground.asked
        after = await ground.counters(settled=False)
        flushed = await ground.counters(settled=True)
        last: Any = await ground.db.fetchrow(LAST)
        fired = int(await ground.db.fetchval(FIRED))
        lateness: Any = await ground.db.fetchval(LATENESS)
        start: Any = await ground.db.fetchval(START)
        dead = await ground.dead_tuples()
    assert fired == due, f"{due} were due, {fired} fired"  # noqa: S101  otherwise the figures are worthless
    seconds = (last["finished"] - instant).total_seconds()
    commits = (flushed.commits - before.commits - ours) / due
    statements = commits if after.statements is None else (after.sent_since(before) - ours) / due
    return Figures(
        schedules=schedules,
        jobs=due,
        seconds=seconds,
        jobs_per_second=due / seconds,
        fires_per_second=due / (last["fired"] - instant).total_seconds(),
        lateness_p50_ms=_ms(lateness[0]),
        lateness_p99_ms=_ms(lateness[1]),
        start_p50_ms=_ms(start[0]),
        start_p99_ms=_ms(start[1]),
        start_max_ms=_ms(start[2]),
        cpu_us_per_job=used / due * 1e6 or None,
        statements_per_job=statements,
        commits_per_job=commits,
        wal_bytes_per_job=(after.wal_bytes - before.wal_bytes) / due,
        dead_tuples=dead,
        rss_mb=rss,
        daemons=count,
        slots=slots,
    )


async def _set_clocks(ground: Ground, nth: int) -> tuple[datetime, int]:
    """Make every nth schedule due soon, then write a checkpoint. Return the instant and the number of due schedules."""
    began = time.monotonic()
    await _prepare(ground, nth, A_DAY)  # a rehearsal, to see how long it takes: the instant must not pass meanwhile
    took = timedelta(seconds=time.monotonic() - began)
    instant, due = await _prepare(ground, nth, took * 2 + MIN_LEAD)
    now: datetime = await ground.db.fetchval("select clock_timestamp()")
    if now >= instant:
        raise DatabaseUnusable("preparing the spike took longer than planned, so its instant has passed: try again")
    return instant, due


async def _prepare(ground: Ground, nth: int, lead: timedelta) -> tuple[datetime, int]:
    rows = await ground.db.fetch(SET_CLOCKS, nth, lead)
    await ground.db.execute("vacuum (analyze) rota.schedule_clocks")
    # Without the right to a checkpoint, less write-ahead log is written, and wal_bytes_per_job is smaller.
    with suppress(asyncpg.InsufficientPrivilegeError):
        await ground.db.execute("checkpoint")
    return rows[0]["next_fire_at"], len(rows)


def _ms(interval: timedelta) -> float:
    return interval.total_seconds() * 1e3
