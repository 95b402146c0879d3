"""The listening connection: a link that carries nothing any more is found out, whatever the dispatcher does meanwhile."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest

from links import Link
from rota.db import listen as module
from rota.db.listen import Listener
from rota.db.pool import ConnectionLost
from rota.telemetry import Telemetry, make_logger
from waiting import eventually

if TYPE_CHECKING:
    from servers import Database


async def test_a_dispatcher_that_changes_its_mind_puts_off_no_round_trip(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change ends the listener's wait; a turn without a round trip must not count as one."""
    monkeypatch.setattr(module, "PING", 1.0)
    monkeypatch.setattr(module, "PONG", 0.5)
    with Link(database.dsn) as link:

        async def connect() -> asyncpg.Connection:
            return await asyncpg.connect(link.dsn, server_settings={"application_name": "listener"})

        woken = asyncio.Event()
        listener = Listener(
            connect,
            Telemetry(make_logger(level="error", format="json")),
            on_wake=woken.set,
            on_cancel=woken.set,
            on_schedules=woken.set,
            on_nodes=woken.set,
        )

        async def listen() -> None:
            while True:
                await listener.run_once()

        turns = asyncio.create_task(listen())
        listener.want(True)
        await eventually(lambda: listener.armed)
        link.freeze(lambda _: True)

        def found_out() -> bool:
            listener.want(False)
            listener.want(True)  # before anybody could act upon the first
            return turns.done()

        await eventually(found_out)
        with pytest.raises((ConnectionLost, TimeoutError)):
            await turns
    assert not listener.armed
