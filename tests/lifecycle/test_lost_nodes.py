"""A daemon that vanishes without a goodbye is listed as lost for a day, or until it returns, is replaced or is forgotten."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import asyncpg
import pytest

import rota
from rota.db import node_reports, queries
from rota.domain.job import NodeId
from rota.errors import ConfigError
from rota.inline import SingleConnectionPool
from rota.services.presence import Node, Presence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection, Record


def make_presence(
    conn: Connection[Record], *, host: str = "here", app: str = "shop", handlers: Sequence[str] = ()
) -> Presence:
    """The presence service of a daemon on the test's connection."""
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
    return Presence(SingleConnectionPool(conn), node)  # type: ignore[arg-type]


async def _do_nothing(job: rota.Job[object]) -> None: ...


async def age_all_nodes(conn: Connection[Record], seconds: int) -> None:
    """Back-date the start and the last heartbeat of every daemon."""
    await conn.execute(
        "update rota.nodes set seen_at = seen_at - make_interval(secs => $1), started_at = started_at - make_interval(secs => $1)",
        seconds,
    )
    await conn.execute("update rota.lost_nodes set seen_at = seen_at - make_interval(secs => $1)", seconds)


async def lost_hosts(conn: Connection[Record]) -> list[str]:
    """Return the hosts of the lost daemons."""
    return sorted(each.host for each in await node_reports.list_lost_nodes(conn))


async def test_a_vanished_daemon_is_lost_for_a_day_and_a_stopped_one_is_not(conn: Connection[Record]) -> None:
    vanished, stopped = make_presence(conn, host="a"), make_presence(conn, host="b")
    await vanished.run_once()
    await stopped.run_once()
    await stopped.leave()
    assert await lost_hosts(conn) == []

    await age_all_nodes(conn, 16)
    assert await lost_hosts(conn) == ["a"]

    await age_all_nodes(conn, 60)
    await queries.prune_nodes(conn)
    assert await lost_hosts(conn) == ["a"]
    assert not await conn.fetchval("select count(*) from rota.nodes")

    await age_all_nodes(conn, 86400)
    assert await lost_hosts(conn) == []

    await queries.prune_nodes(conn)
    assert not await conn.fetchval("select count(*) from rota.lost_nodes")


@pytest.mark.parametrize("pruned", [False, True])
async def test_a_restart_replaces_one_lost_daemon_of_the_same_host_and_app(
    conn: Connection[Record], pruned: bool
) -> None:
    for _ in range(2):
        await make_presence(conn, host="a").run_once()
    await age_all_nodes(conn, 120)
    if pruned:
        await queries.prune_nodes(conn)
    await make_presence(conn, host="b").run_once()
    await make_presence(conn, host="a", app="mail").run_once()
    assert await lost_hosts(conn) == ["a", "a"]

    replacement = make_presence(conn, host="a")
    await replacement.run_once()
    await replacement.run_once()
    assert await lost_hosts(conn) == ["a"]

    await make_presence(conn, host="a").run_once()
    assert await lost_hosts(conn) == []


async def test_a_daemon_does_not_replace_one_that_died_after_its_own_start(conn: Connection[Record]) -> None:
    survivor, killed = make_presence(conn, host="a"), make_presence(conn, host="a")
    await survivor.run_once()
    await killed.run_once()
    await age_all_nodes(conn, 16)

    await survivor.run_once()

    assert await lost_hosts(conn) == ["a"]


async def test_a_frozen_daemon_that_wakes_up_is_no_longer_lost(conn: Connection[Record]) -> None:
    """It removes only itself from the list."""
    frozen = make_presence(conn, host="a")
    await frozen.run_once()
    frozen.database_reached_at -= 100
    frozen._may_replace_lost_until = 0
    await make_presence(conn, host="a").run_once()
    await age_all_nodes(conn, 120)
    await queries.prune_nodes(conn)
    assert await lost_hosts(conn) == ["a", "a"]

    await frozen.run_once()
    assert await lost_hosts(conn) == ["a"]


async def test_a_lost_daemon_can_be_forgotten_by_id_and_a_live_one_cannot(conn: Connection[Record]) -> None:
    """The audit records who forgot it."""
    vanished = make_presence(conn, host="a")
    await vanished.run_once()
    node = vanished._node.node_id

    with pytest.raises(asyncpg.PostgresError, match="is alive"):
        await conn.fetchval("select rota.forget_node($1)", node)
    await age_all_nodes(conn, 120)
    await queries.prune_nodes(conn)
    assert await conn.fetchval("select rota.forget_node($1, 'scaled down')", node)
    assert not await conn.fetchval("select rota.forget_node($1)", node)
    assert await lost_hosts(conn) == []

    row = await conn.fetchrow("select action, target, reason from rota.audit")
    assert row is not None
    assert tuple(row) == ("forget", f"node {node} (a:7)", "scaled down")


NO_SHARED_HANDLERS = frozenset[str]()


async def start_daemon(replacement: Presence, shared: frozenset[str] = NO_SHARED_HANDLERS) -> None:
    """Check the handlers and register the node, as a daemon does at its start."""
    await replacement.refuse_foreign_handlers(shared)
    await replacement.run_once()


async def test_a_daemon_with_a_handler_of_another_app_does_not_start(conn: Connection[Record]) -> None:
    """Two programs with a handler `send` would otherwise take each other's jobs."""
    await start_daemon(make_presence(conn, host="a", app="shop", handlers=["send", "rota.echo", "http.hook"]))
    await start_daemon(make_presence(conn, host="b", app="shop", handlers=["send"]))
    other = make_presence(conn, host="c", app="mail", handlers=["send"])

    with pytest.raises(ConfigError, match=r"'send' belongs to the app 'shop' on [ab]:7 .*shared = ..send"):
        await start_daemon(other)
    assert await conn.fetchval("select app from rota.handlers where handler = 'send'") == "shop"
    await other.leave()
    await start_daemon(other, shared=frozenset({"send"}))
    await start_daemon(make_presence(conn, host="d", app="third", handlers=["rota.echo", "http.hook"]))


async def test_a_renamed_app_starts_once_the_old_daemons_have_left_or_are_forgotten(conn: Connection[Record]) -> None:
    """A vanished daemon may return for a day, so it blocks the new name unless an operator forgets it."""
    old, lost_one = (make_presence(conn, host=host, app="shop", handlers=["send"]) for host in "ab")
    new = make_presence(conn, host="c", app="store", handlers=["send"])
    await start_daemon(old)
    await start_daemon(lost_one)
    await old.leave()
    await age_all_nodes(conn, 120)
    await queries.prune_nodes(conn)

    with pytest.raises(ConfigError, match="on b:7"):
        await start_daemon(new)
    await new.leave()
    await conn.fetchval("select rota.forget_node($1)", lost_one._node.node_id)
    await start_daemon(new)


async def test_of_two_apps_that_start_together_only_the_later_one_is_refused(conn: Connection[Record]) -> None:
    """Both register before they check, and only one may give way."""
    first, second = (make_presence(conn, host=app, app=app, handlers=["send"]) for app in ("one", "two"))
    async with conn.transaction():
        await first._register_node(conn)
    await second._register_node(conn)
    await start_daemon(first)
    with pytest.raises(ConfigError, match="belongs to the app 'one'"):
        await start_daemon(second)
