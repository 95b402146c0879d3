"""Identify the server and timeline of a connection, so that a daemon never works on two histories of one database."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import asyncpg

from rota.db.connecting import LOGIN_REFUSED, NoServerFits, close_connection, open_connection
from rota.db.sessions import STATEMENT_SECONDS, Route, StatementwiseConnection
from rota.db.sql import SQL
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from rota.db.connecting import Target
    from rota.db.pool import Connection

WHY_READ_ONLY = "(a standby, or default_transaction_read_only is on)"
TO_THE_PRIMARY = "give the URL of the primary, or list all hosts with ?target_session_attrs=read-write"
READ_ONLY = f"this server is read-only {WHY_READ_ONLY}: {TO_THE_PRIMARY}"


class Server(NamedTuple):
    """A database on a server. A promotion of a standby starts a new timeline, which is another history."""

    system_identifier: int
    database_oid: int
    timeline: int


class ServerHistory:
    """The newest server that this daemon has connected to. Safe to use from several threads."""

    def __init__(self, newest: Server | None = None, *, on_move: Callable[[], None] | None = None) -> None:
        """`on_move` is called when a connection leads to a newer server, on the thread that opened the connection."""
        self.newest = newest
        self._on_move = on_move
        self._abandoned: set[tuple[int, int]] = set()

    def check(self, server: Server) -> None:
        """Record the server of a new connection. Raises NoServerFits for an older one, whose history was abandoned."""
        newest = self.newest
        if server == newest:
            return
        database = server[:2]
        if newest is not None:
            is_same_database = database == newest[:2]
            if database in self._abandoned or (is_same_database and server.timeline < newest.timeline):
                raise NoServerFits(
                    f"an older primary has come back: timeline {server.timeline} of system {server.system_identifier}, "
                    f"while this daemon has worked on timeline {newest.timeline} of system {newest.system_identifier}"
                )
            if not is_same_database:
                self._abandoned.add(newest[:2])
        self.newest = server
        if newest is not None and self._on_move is not None:
            self._on_move()


async def check_server(db: Connection, history: ServerHistory) -> str | None:
    """Return the installation's id. Raises NoServerFits for a read-only server and for an older primary."""
    row = await db.fetchrow(SQL["identify_server"])
    if row is None:
        return None
    if row["read_only"]:
        raise NoServerFits(READ_ONLY)
    history.check(Server(row["system_identifier"], row["database_oid"], row["timeline"]))
    installation_id: str = row["installation_id"]
    return installation_id


async def find_writable_server(db: Connection) -> tuple[Server, datetime] | None:
    """Return the server and its start time, or None if it is read-only. Two addresses may lead to the same server."""
    row = await db.fetchrow(SQL["identify_server"])
    if row is None or row["read_only"]:
        return None
    return Server(row["system_identifier"], row["database_oid"], row["timeline"]), row["started_at"]


async def probe(target: Target) -> Route:
    """Connect once, at start. Raises DatabaseUnusable if a person has to act, or one of TRANSIENT if waiting helps.

    NoServerFits, one of TRANSIENT, means that a server answered but is read-only: a fail-over may be under way.
    """
    try:
        conn = await open_connection(target, statement_cache_size=0, connection_class=StatementwiseConnection)
    except LOGIN_REFUSED as error:
        raise DatabaseUnusable(
            f"the database refuses us: {error}. Check user, password and database name in the URL"
        ) from error
    except (ValueError, asyncpg.ClientConfigurationError) as error:
        raise DatabaseUnusable(f"the database URL can't be used: {error}") from error
    try:
        row = await conn.fetchrow(SQL["describe_server"], timeout=STATEMENT_SECONDS)
        if row is None:
            raise DatabaseUnusable("the server doesn't answer a plain SELECT")
        if row["version"] < 140000:
            raise DatabaseUnusable(f"PostgreSQL {row['version'] // 10000} is too old: rota needs 14 or later")
        require_utf8(row["encoding"])
        if row["read_only"]:
            raise NoServerFits(READ_ONLY)
        return Route(
            pooled=is_pooled(conn, pid=row["pid"]), version=row["version"], synchronous_commit=row["synchronous_commit"]
        )
    finally:
        await close_connection(conn)


def is_pooled(conn: Connection, *, pid: int) -> bool:
    """Return whether the connection goes through a pooler; `pid` is the process id that the server itself returned."""
    # PgBouncer gives its clients an invented process id.
    return pid != conn.get_server_pid()


def require_utf8(encoding: str) -> None:
    """Raise DatabaseUnusable for any other encoding of the database: one row that can't be decoded would fail a claim."""
    if encoding != "UTF8":
        raise DatabaseUnusable(
            f"the database's encoding is {encoding}, and rota needs UTF8: create database … encoding 'UTF8' template template0"
        )


def unreachable_error(where: str, reason: str) -> DatabaseUnusable:
    """Return the error for an unreachable server. `where` is its URL with a masked password."""
    return DatabaseUnusable(
        f"no database answers at {where} ({reason}): is the server running, and is the URL right? "
        "For a first look without a server of your own: rota dev"
    )
