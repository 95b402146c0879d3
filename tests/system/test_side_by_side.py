"""The release before, as real processes on this one's schema: how every rolling upgrade begins, and how a rollback ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from processes import SOURCE, TESTS, stopped
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from scenes import Scene

ROOT = SOURCE.parent


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"the code before the newest migration can't be had here: {done.stderr.strip()}")
    return done.stdout.strip()


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code as it was before the newest migration came."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    newest = max(path.name for path in (ROOT / "sql" / "migrations").glob("*.sql"))
    came_with = _git("log", "--diff-filter=A", "--format=%H", "-1", "--", f"sql/migrations/{newest}")
    if not came_with:
        pytest.skip(f"{newest} isn't committed yet")
    folder = tmp_path_factory.mktemp("former")
    _git("archive", "-o", str(folder / "code.tar"), f"{came_with}~1", "src", "sql")
    shutil.unpack_archive(folder / "code.tar", folder)
    assert not (folder / "sql" / "migrations" / newest).exists()
    return folder


async def test_the_release_before_works_beside_this_one_and_takes_over_from_it(scene: Scene, former: Path) -> None:
    """Both claim, fire, heartbeat, settle and reap in one database; what one of them leaves behind the other finishes."""
    before = os.pathsep.join([str(TESTS), str(former / "src")])
    old, new = scene.daemons.start(PYTHONPATH=before), scene.daemons.start()
    await scene.execute("insert into rota.schedules (name, handler, every) values ('each second', 'noop', '1 second')")
    jobs = [await scene.enqueue("transactional", {"seconds": 0.3}) for _ in range(60)]
    flaky = [await scene.enqueue("flaky", {"fails": 0.5}, backoff_base="100ms") for _ in range(10)]

    async def ended(which: Sequence[int]) -> bool:
        return not await scene.value("select exists (select from rota.jobs where job_id = any ($1))", which)

    await eventually(lambda: ended([*jobs, *flaky]), within=60, what="the end of all jobs")
    ran = await scene.fetch("select pid, count(*) from executions group by pid")
    assert {row["pid"] for row in ran} == {old.pid, new.pid}
    assert await scene.value("select count(*) from effects") == len(jobs)

    for dies, lives in ((old, new), (new, None)):
        with stopped(lives) if lives else nullcontext():
            job = await scene.enqueue("work", {"seconds": 600})
            (execution,) = await scene.begins(job)
        assert execution["pid"] == dies.pid
        dies.kill()
        other = lives or scene.daemons.start(PYTHONPATH=before)
        *_, last = await scene.begins(job, 2)
        assert last["pid"] == other.pid
        assert await scene.value("select rota.cancel($1)", job) == "requested"
        await scene.comes_to(job, "cancelled")

    gaps = await scene.value(
        "select count(*) from (select scheduled_for - lag(scheduled_for) over (order by scheduled_for) as gap,"
        " missed_from from rota.fires) as fire where gap <> interval '1 second' and missed_from is null"
    )
    assert gaps == 0
    assert await scene.value("select count(*) from rota.fires where disposition = 'enqueued'") > 0
