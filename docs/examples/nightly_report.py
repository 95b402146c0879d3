"""A nightly report that resumes where it stopped.

Try it: rota dev --app docs.examples.nightly_report:app, then: rota schedule run-now "nightly report" --embedded
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import rota

app = rota.App("reports", release="1.0")

REGIONS = ("north", "south", "west")


@app.schedule("30 2 * * *", timezone="Europe/Berlin", name="nightly report", expect_success_within=timedelta(hours=26))
@app.handler("nightly_report", timeout=timedelta(minutes=10), max_attempts=5)
async def nightly_report(job: rota.Job[Any]) -> dict[str, int]:
    """Build one section per region. A retry skips the sections that an earlier attempt has finished."""
    done: list[str] = job.checkpoint or []
    for region in REGIONS:
        if region in done:
            continue
        await build_section(region, day=job.scheduled_for.date().isoformat())
        done.append(region)
        await job.save_checkpoint(done)
        await job.report_progress(len(done) / len(REGIONS), region)
    return {"sections": len(done)}


async def build_section(region: str, *, day: str) -> None:
    """Stand-in for the work: writing it twice must be harmless, because a job may run again."""
    print("section", region, "of", day)
