"""The daemon as a process: what handlers, signals, pipes and forks do to it, and how it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from scenes import Scene


@pytest.mark.parametrize("by", ["exit", "interrupt", "exit in a task", "stop"])
async def test_a_handler_that_breaks_the_main_loop_makes_the_daemon_drain_first(scene: Scene, by: str) -> None:
    """Jobs of others finish, or are given back with their attempt; the log names the handler, and the exit code is 1."""
    daemon = scene.daemons.start(ROTA_DRAIN_TIMEOUT="4s")
    short = await scene.enqueue("work", {"seconds": 2})
    long = await scene.enqueue("work", {"seconds": 600})
    await scene.begins(short)
    await scene.begins(long)
    guilty = await scene.enqueue("breaks_loop", {"by": by})
    broken = daemon.wait_for("loop.broken")
    assert f"breaks_loop (job {guilty})" in broken["suspects"]
    assert daemon.ends() == 1
    assert await scene.state(short) == "succeeded"
    job = await scene.job(long)
    assert job is not None
    assert (job["state"], job["attempt"], job["releases"], job["losses"]) == ("scheduled", 0, 1, 0)
    assert not await scene.value("select count(*) from rota.nodes")


async def test_a_handler_that_cancels_all_tasks_ends_neither_daemon_nor_neighbours(scene: Scene) -> None:
    """It fails, and nothing else does: the loops and the attempts of others can't be cancelled from its context."""
    daemon = scene.daemons.start()
    neighbour = await scene.enqueue("work", {"seconds": 2})
    await scene.begins(neighbour)
    guilty = await scene.enqueue("breaks_loop", {"by": "cancel"}, max_attempts=1)
    await scene.comes_to(guilty, "dead")
    assert daemon.wait_for("handler.cancelled_others", handler="breaks_loop")["job_id"] == guilty
    assert "cancelled its own task" in await scene.value(
        "select error from rota.dead_letters where job_id = $1", guilty
    )
    await scene.comes_to(neighbour, "succeeded")
    await scene.comes_to(await scene.enqueue("work"), "succeeded")
    assert daemon.stop() == 0
