"""The listening connection: a dead link is detected, and idle connections are closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import rota
from in_process_daemons import final_outcome, insert_job, run_node
from network_faults import FaultyProxy
from rota.db import listen as module
from rota.db import pool
from rota.db.listen import Listener
from rota.db.pool import ConnectionLost
from rota.observability.telemetry import Telemetry, make_logger
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


async def test_a_dead_link_is_detected_while_the_dispatcher_keeps_changing_its_wish_to_listen(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change ends the listener's wait; a turn without a round trip must not count as one."""
    monkeypatch.setattr(module, "PING_SECONDS", 1.0)
    monkeypatch.setattr(module, "PONG_SECONDS", 0.5)
    with FaultyProxy(database.dsn) as proxy:

        async def connect() -> asyncpg.Connection:
            return await asyncpg.connect(proxy.dsn, server_settings={"application_name": "listener"})

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
        proxy.freeze(lambda _: True)

        def change_wish_twice() -> bool:
            listener.want(False)
            listener.want(True)  # before the listener could act on the first change
            return turns.done()

        await eventually(change_wish_twice)
        with pytest.raises((ConnectionLost, TimeoutError)):
            await turns

    assert not listener.armed


async def test_a_flood_of_notifications_makes_a_daemon_poll_for_a_while(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any login may notify. Receiving would take all time of the main loop."""
    monkeypatch.setattr(module, "MAX_NOTIFICATIONS", 500)
    monkeypatch.setattr(module, "FLOOD_PAUSE_SECONDS", 0.5)
    app = rota.App("flooded")

    @app.handler("quick")
    async def quick(_: rota.Job[Any]) -> None: ...

    async with run_node(database.dsn, app) as node:
        await node.wait_for_event("listener.up")
        await conn.execute("select count(pg_notify('rota_wake', n::text)) from generate_series(1, 2000) as n")
        down = await node.wait_for_event("listener.down")
        assert f"server process {conn.get_server_pid()}: polling instead" in down["why"]
        assert await final_outcome(conn, await insert_job(conn, "quick")) == "succeeded"
        await node.wait_for_event("listener.up", times=2)


async def test_an_idle_daemon_keeps_three_connections_at_most(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools, threads and the heartbeat give back what they do not use, and take new connections when jobs come again."""
    pytest.importorskip("psycopg")
    monkeypatch.setattr(pool, "IDLE_SECONDS", 1.0)
    app = rota.App("busy")

    @app.handler("coroutine")
    async def coroutine(job: rota.Job[Any]) -> None:
        async with job.transaction() as db:
            await db.execute("select pg_sleep(1.2)")

    @app.handler("thread")
    def thread(job: rota.SyncJob[Any]) -> None:
        with job.transaction() as db:
            db.execute("select pg_sleep(0.1)")

    opened = "select count(*) from pg_stat_activity where datname = current_database() and application_name ~ '^rota '"

    async def has_few_connections() -> bool:
        return bool(await conn.fetchval(opened) <= 3)

    async with run_node(database.dsn, app) as running:
        await running.wait_for_event("listener.up")
        for _ in range(2):
            jobs = [await insert_job(conn, name) for name in ("coroutine", "thread") * 4]
            for job in jobs:
                assert await final_outcome(conn, job) == "succeeded"
            assert await conn.fetchval(opened) > 3
            await eventually(has_few_connections, within=10, what="three connections at most")
        # Under light load no connection is opened or closed: the set of sessions stays the same.
        seen = set()
        for _ in range(8):
            rows = await conn.fetch(
                "select pid from pg_stat_activity where datname = current_database() and application_name ~ '^rota '"
            )
            seen |= {row["pid"] for row in rows}
            await running.wait_for_turns("dispatcher", 1)
        assert len(seen) <= 4
