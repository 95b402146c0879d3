"""Daemons of two schema versions in one database, as in the first and last minutes of a rolling upgrade.

The newer version is this code plus one migration that exists only in this test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from processes import SOURCE, TESTS, frozen
from rota.db.migrate import VERSION
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fleets import Fleet

ADDITIVE = """-- Add what an additive migration may add: columns to all tables that daemons write, a table and an index.

do $$
declare
    extended text;
begin
    foreach extended in array '{jobs,job_runs,attempts,dead_letters,cancel_requests,handlers,queues,nodes,housekeeping,'
        'schedule_definitions,schedule_clocks,fires,meta}'::text[] loop
        execute format('alter table rota.%I add column added_later text default %L', extended, 'later');
    end loop;
end $$;
create table rota.later (job_id bigint primary key);
create index later_idx on rota.jobs (added_later);
"""


@pytest.fixture(scope="module")
def newer_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The import path of a copy of this code with the additive migration."""
    folder = tmp_path_factory.mktemp("newer")
    shutil.copytree(SOURCE, folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SOURCE.parent / "sql", folder / "sql")
    (folder / "sql" / "migrations" / "9999_later.sql").write_text(ADDITIVE)
    return folder / "src"


async def test_an_older_and_a_newer_daemon_work_together_and_take_over_from_each_other(
    fleet: Fleet, newer_code: Path
) -> None:
    """Both claim, fire, heartbeat, settle and reap."""
    code = os.pathsep.join([str(TESTS), str(newer_code)])
    migrate = [sys.executable, "-m", "rota", "migrate", "--dsn", fleet.dsn]
    subprocess.run(migrate, check=True, capture_output=True, env={**os.environ, "PYTHONPATH": code})  # noqa: ASYNC221
    assert await fleet.value("select schema_version from rota.meta") == VERSION + 1

    old, new = fleet.daemons.start(), fleet.daemons.start(PYTHONPATH=code)
    await fleet.execute("insert into rota.schedules (name, handler, every) values ('each second', 'noop', '1 second')")
    jobs = [await fleet.enqueue("transactional", {"seconds": 0.3}) for _ in range(60)]
    flaky = [await fleet.enqueue("flaky", {"fails": 0.5}, backoff_base="100ms") for _ in range(10)]

    async def has_ended(job_ids: Sequence[int]) -> bool:
        return not await fleet.value("select exists (select from rota.jobs where job_id = any ($1))", job_ids)

    await eventually(lambda: has_ended([*jobs, *flaky]), within=60, what="the end of all jobs")
    executions = await fleet.fetch("select pid, count(*) from executions group by pid")
    assert {row["pid"] for row in executions} == {old.pid, new.pid}
    assert await fleet.value("select count(*) from effects") == len(jobs)

    # The older daemon dies first, then the newer one. An older daemon takes over its job, as in a rollback.
    for victim, survivor in ((old, new), (new, None)):
        with frozen(survivor) if survivor else nullcontext():
            job = await fleet.enqueue("work", {"seconds": 600})
            (execution,) = await fleet.wait_for_execution(job)
        assert execution["pid"] == victim.pid
        victim.kill()
        other = survivor or fleet.daemons.start()
        *_, last = await fleet.wait_for_execution(job, 2)
        assert last["pid"] == other.pid
        assert await fleet.value("select rota.cancel($1)", job) == "requested"
        await fleet.wait_for_state(job, "cancelled")

    gaps = await fleet.value(
        "select count(*) from (select scheduled_for - lag(scheduled_for) over (order by scheduled_for) as gap,"
        " missed_from from rota.fires) as fire where gap <> interval '1 second' and missed_from is null"
    )
    assert gaps == 0
    assert await fleet.value("select count(*) from rota.fires where disposition = 'enqueued'") > 0
