"""Measure whether deleting expired history makes jobs slower: drain with and without it, in turns."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from rota.bench.drain import drain_once
from rota.bench.figures import Comparison

if TYPE_CHECKING:
    from rota.bench.database import BenchDatabase
    from rota.bench.figures import Reporter

SLOTS = 100
"""The default."""

KEPT_FOREVER = {
    f"ROTA_RETENTION_{kind}": "0" for kind in ("JOB_RUNS", "ATTEMPTS", "FIRES", "DEAD_LETTERS", "GUARDS", "AUDIT")
}

# All rows are older than the default retention. Without a partition for their days, the ledger's rows are in the default one.
EXPIRED_ROWS = {
    "attempts": """
        insert into rota.attempts (job_id, fence_token, attempt, started_at, finished_at, outcome, error)
        select -n, n, 1, at, at, 'failed', repeat('e', 200)
        from generate_series(1, $1::int4) as n, lateral (select now() - interval '2 years' + n * interval '1 ms' as at) as old
    """,
    "fires": """
        insert into rota.fires (scheduled_for, decided_at, schedule_id, disposition, name)
        select at, at, n, 'enqueued', 'schedule ' || n
        from generate_series(1, $1::int4) as n, lateral (select now() - interval '2 years' + n * interval '1 ms' as at) as old
    """,
    "audit": """
        insert into rota.audit (done_at, done_by, action, target)
        select now() - interval '2 years' + n * interval '1 ms', 'bench', 'pause queue', 'queue ' || n
        from generate_series(1, $1::int4) as n
    """,
    "job_runs": """
        insert into rota.job_runs (job_id, scheduled_for, started_at, finished_at, attempts, outcome, handler, queue)
        select -n, at, at, at, 1, 'succeeded', 'bench.noop', 'default'
        from generate_series(1, $1::int4) as n, lateral (select now() - interval '2 years' + n * interval '1 ms' as at) as old
    """,
}
COUNT_EXPIRED = """
select (select count(*) from rota.attempts) + (select count(*) from rota.fires where scheduled_for < now() - interval '1 year')
    + (select count(*) from rota.audit where done_at < now() - interval '1 year')
    + (select count(*) from rota.job_runs_default)
"""


async def measure_pruning(
    database: BenchDatabase, reporter: Reporter, *, jobs: int, expired: int, rounds: int
) -> Comparison:
    """Store `expired` expired rows of each kind, then drain `jobs` jobs `rounds` times with and without deleting them."""
    with reporter.progress("expired rows stored", len(EXPIRED_ROWS)) as advance:
        for table, insert in EXPIRED_ROWS.items():
            await database.connection.execute(insert, expired)
            await database.connection.execute(f"vacuum (analyze) rota.{table}")
            advance(1)
    await drain_once(database, reporter, jobs=jobs, count=1, slots=SLOTS, settings=KEPT_FOREVER)  # warm up
    quiet: list[float] = []
    pruning: list[float] = []
    pruned = 0
    for number in range(rounds):
        # ABBA: a drift of the machine's speed affects both alike.
        for prunes in (False, True) if number % 2 == 0 else (True, False):
            before = int(await database.connection.fetchval(COUNT_EXPIRED))
            figures = await drain_once(
                database, reporter, jobs=jobs, count=1, slots=SLOTS, settings={} if prunes else KEPT_FOREVER
            )
            pruned += before - int(await database.connection.fetchval(COUNT_EXPIRED))
            (pruning if prunes else quiet).append(jobs / figures.seconds)
    ratios = [busy / idle for busy, idle in zip(pruning, quiet, strict=True)]
    row = {
        "jobs_per_second": median(quiet),
        "while_pruning": median(pruning),
        "ratio": median(pruning) / median(quiet),
        "worst_ratio": min(ratios),
        "best_ratio": max(ratios),
        "rows_pruned": pruned,
        "rows_left": int(await database.connection.fetchval(COUNT_EXPIRED)),
    }
    return Comparison(
        title=f"{rounds} drains of {jobs:,} jobs each, with and without deleting {expired:,} expired rows of each kind",
        rows=[row],
        notes=(
            "jobs_per_second, while_pruning, ratio: medians. worst_ratio, best_ratio: of two neighbouring drains",
            "If rows_left is 0, the pruner had nothing to delete in the end: raise --expired.",
        ),
    )
