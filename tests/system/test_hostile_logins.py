"""Logins without rights, beside real daemons: what they hold, define or lock stops no other login's jobs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from rota.db.migrate import migrate
from waiting import eventually

if TYPE_CHECKING:
    from scenes import Scene

ADVISORY_KEYS = range(1, 5)
"""Second keys of the advisory locks that rota takes or has taken in an older release."""


@pytest.mark.parametrize("mode", ["", "_shared"])
async def test_b1_a_stranger_who_holds_every_advisory_lock_stops_nothing(scene: Scene, mode: str) -> None:
    """PostgreSQL has no rights on advisory locks: every login may take those whose keys it knows, and keep them."""
    stranger = await scene.connection()
    for key in ADVISORY_KEYS:
        await stranger.execute(f"select pg_advisory_lock{mode}(1919906913, {key})")
    before = await scene.value("select last_value from rota.fence_tokens")

    daemon = scene.daemons.start(ROTA_POLL_INTERVAL="1s")
    daemon.wait_for("listener.up")
    for _ in range(3):
        await scene.begins(await scene.enqueue("work"), within=5)
    await scene.empties()

    status, body = daemon.get("readyz")
    assert (status, json.loads(body)["reasons"]) == (200, [])
    assert daemon.events("service.failed") == []
    assert await scene.value("select last_value from rota.fence_tokens") > before
    assert list((await migrate(scene.dsn)).applied) == []
    await scene.execute(f"drop table {await _coming_partition(scene)}")
    assert await scene.value("select made from rota.rotate_ledger()") == 1
    assert daemon.stop() == 0


async def _coming_partition(scene: Scene) -> str:
    return str(
        await scene.value(
            "select inhrelid::regclass::text from pg_inherits where inhparent = 'rota.job_runs'::regclass "
            "and inhrelid <> 'rota.job_runs_default'::regclass order by 1 desc limit 1"
        )
    )


async def test_b1_a_listener_takes_the_lock_again_once_the_stranger_lets_go(scene: Scene) -> None:
    """Until then its inserts notify because of the stranger, and polling finds whatever a notification missed."""
    stranger = await scene.connection()
    await stranger.execute("select pg_advisory_lock(1919906913, 1)")
    daemon = scene.daemons.start(ROTA_POLL_INTERVAL="60s", ROTA_LEASE="30s")
    daemon.wait_for("listener.up")
    await scene.begins(await scene.enqueue("work"), within=5)

    await stranger.execute("select pg_advisory_unlock_all()")

    async def armed() -> bool:
        shared = "select exists (select from pg_locks where locktype = 'advisory' and mode = 'ShareLock' and granted)"
        return bool(await scene.value(shared))

    await eventually(armed, what="the listener's own lock")
    await scene.begins(await scene.enqueue("work"), within=5)
