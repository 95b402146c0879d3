"""A daemon that vanishes without saying goodbye stays listed until it is back, replaced or forgotten, or a day has passed."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import asyncpg
import pytest

import rota
from rota.db import node_reports, queries
from rota.domain.job import NodeId
from rota.errors import ConfigError
from rota.inline import Lent
from rota.services.presence import Node, Presence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection, Record


def presence(
    conn: Connection[Record], *, host: str = "here", app: str = "shop", handlers: Sequence[str] = ()
) -> Presence:
    """A daemon's presence on the test's connection."""
    code = rota.App(app)
    for name in handlers:
        code.handler(name)(_do_nothing)
    node = Node(
        node_id=NodeId(uuid.uuid4()),
        host=host,
        pid=7,
        rota_version="0",
        release=None,
        app=app,
        handlers=code.handlers,
        queues={"default": 1},
        tzdata=None,
    )
    return Presence(Lent(conn), node)  # type: ignore[arg-type]


async def _do_nothing(job: rota.Job[object]) -> None: ...


async def silence(conn: Connection[Record], seconds: int) -> None:
    """Back-date the start and the last sign of life of every daemon."""
    await conn.execute(
        "update rota.nodes set seen_at = seen_at - make_interval(secs => $1), started_at = started_at - make_interval(secs => $1)",
        seconds,
    )
    await conn.execute("update rota.lost_nodes set seen_at = seen_at - make_interval(secs => $1)", seconds)


async def lost(conn: Connection[Record]) -> list[str]:
    """Return the hosts of the lost daemons."""
    return sorted(each.host for each in await node_reports.list_lost_nodes(conn))


async def test_a_daemon_is_lost_for_a_day_unless_it_says_goodbye(conn: Connection[Record]) -> None:
    """Fifteen seconds after a kill -9 a fleet of two must not look like a fleet that was always of two."""
    gone, polite = presence(conn, host="a"), presence(conn, host="b")
    await gone.run_once()
    await polite.run_once()
    await polite.leave()
    assert await lost(conn) == []
    await silence(conn, 16)
    assert await lost(conn) == ["a"]
    await silence(conn, 60)
    await queries.prune_nodes(conn)
    assert await lost(conn) == ["a"]
    assert not await conn.fetchval("select count(*) from rota.nodes")
    await silence(conn, 86400)
    assert await lost(conn) == []
    await queries.prune_nodes(conn)
    assert not await conn.fetchval("select count(*) from rota.lost_nodes")


@pytest.mark.parametrize("pruned", [False, True])
async def test_a_restart_on_the_same_host_and_of_the_same_app_takes_the_place_of_one(
    conn: Connection[Record], pruned: bool
) -> None:
    """A supervisor brings back what was killed. Two that were lost need two, and no other app or host counts."""
    for _ in range(2):
        await presence(conn, host="a").run_once()
    await silence(conn, 120)
    if pruned:
        await queries.prune_nodes(conn)
    await presence(conn, host="b").run_once()
    await presence(conn, host="a", app="mail").run_once()
    assert await lost(conn) == ["a", "a"]
    one = presence(conn, host="a")
    await one.run_once()
    await one.run_once()
    assert await lost(conn) == ["a"]
    await presence(conn, host="a").run_once()
    assert await lost(conn) == []


async def test_a_daemon_replaces_none_that_died_after_it_had_started(conn: Connection[Record]) -> None:
    """Two daemons of one app run on one host, and one is killed in the other's first minute: nothing has come back."""
    survivor, killed = presence(conn, host="a"), presence(conn, host="a")
    await survivor.run_once()
    await killed.run_once()
    await silence(conn, 16)

    await survivor.run_once()

    assert await lost(conn) == ["a"]


async def test_a_frozen_daemon_that_wakes_up_is_no_longer_lost(conn: Connection[Record]) -> None:
    """It takes only itself from the list, not another one that is still missing."""
    frozen = presence(conn, host="a")
    await frozen.run_once()
    frozen.reached -= 100
    frozen._takes_a_place_until = 0
    await presence(conn, host="a").run_once()
    await silence(conn, 120)
    await queries.prune_nodes(conn)
    assert await lost(conn) == ["a", "a"]
    await frozen.run_once()
    assert await lost(conn) == ["a"]


async def test_a_lost_daemon_is_forgotten_by_name_and_a_living_one_is_not(conn: Connection[Record]) -> None:
    """A machine that was taken away does not come back; who said so stands in the audit."""
    gone = presence(conn, host="a")
    await gone.run_once()
    node = gone._node.node_id
    with pytest.raises(asyncpg.PostgresError, match="is alive"):
        await conn.fetchval("select rota.forget_node($1)", node)
    await silence(conn, 120)
    await queries.prune_nodes(conn)
    assert await conn.fetchval("select rota.forget_node($1, 'scaled down')", node)
    assert not await conn.fetchval("select rota.forget_node($1)", node)
    assert await lost(conn) == []
    row = await conn.fetchrow("select action, target, reason from rota.audit")
    assert row is not None
    assert tuple(row) == ("forget", f"node {node} (a:7)", "scaled down")


NOBODY = frozenset[str]()


async def enter(one: Presence, shared: frozenset[str] = NOBODY) -> None:
    """Start as a daemon does."""
    await one.refuse_foreign_handlers(shared)
    await one.run_once()


async def test_a_handler_of_another_app_is_refused(conn: Connection[Record]) -> None:
    """Two programs that both call a handler `send` would silently take each other's jobs."""
    await enter(presence(conn, host="a", app="shop", handlers=["send", "rota.echo", "http.hook"]))
    await enter(presence(conn, host="b", app="shop", handlers=["send"]))
    other = presence(conn, host="c", app="mail", handlers=["send"])
    with pytest.raises(ConfigError, match=r"'send' belongs to the app 'shop' on [ab]:7 .*shared = ..send"):
        await enter(other)
    assert await conn.fetchval("select app from rota.handlers where handler = 'send'") == "shop"
    await other.leave()
    await enter(other, shared=frozenset({"send"}))
    await enter(presence(conn, host="d", app="third", handlers=["rota.echo", "http.hook"]))


async def test_a_renamed_app_starts_once_the_old_daemons_are_gone(conn: Connection[Record]) -> None:
    """A goodbye is enough; one that vanished may come back for a day, unless an operator forgets it."""
    old, lost_one = (presence(conn, host=host, app="shop", handlers=["send"]) for host in "ab")
    new = presence(conn, host="c", app="store", handlers=["send"])
    await enter(old)
    await enter(lost_one)
    await old.leave()
    await silence(conn, 120)
    await queries.prune_nodes(conn)
    with pytest.raises(ConfigError, match="on b:7"):
        await enter(new)
    await new.leave()
    await conn.fetchval("select rota.forget_node($1)", lost_one._node.node_id)
    await enter(new)


async def test_of_two_that_start_at_once_the_later_one_is_refused(conn: Connection[Record]) -> None:
    """Both enter themselves before they look, and not both may give way."""
    first, second = (presence(conn, host=app, app=app, handlers=["send"]) for app in ("one", "two"))
    async with conn.transaction():
        await first._register_node(conn)
    await second._register_node(conn)
    await enter(first)
    with pytest.raises(ConfigError, match="belongs to the app 'one'"):
        await enter(second)
