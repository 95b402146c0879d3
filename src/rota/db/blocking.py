"""Blocking connections for the transactions of plain `def` handlers. They need psycopg, which is optional."""

from __future__ import annotations

import os
import socket
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Lock, Timer
from typing import TYPE_CHECKING, Any

from rota.config.database_url import DatabaseUrl
from rota.db import pool
from rota.db.connecting import NoServerFits, host_addresses
from rota.db.pool import FORGET, KEEPALIVES, PATIENCE, READ_ONLY
from rota.db.server_history import Server, ServerHistory
from rota.db.sql import SQL
from rota.errors import ConfigError
from rota.runtime.clock import boottime
from rota.runtime.forks import close_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psycopg


ANSWER_SECONDS = 5.0
"""Limit for the short statements between two handlers. Keepalives do not notice a proxy that has stopped forwarding."""


@dataclass(frozen=True, slots=True)
class Login:
    """Where handlers connect to, and the settings of their sessions."""

    url: DatabaseUrl = field(repr=False)
    settings: Mapping[str, str]
    pooled: bool = False
    """Through a pooler: what a session prepares under a name, the next one finds there, or misses."""

    history: ServerHistory = field(default_factory=ServerHistory)

    def facts(self) -> dict[str, Any]:
        """Return what a handler's own process needs to log in, fit for JSON, with the URL as it is in its file now."""
        self.url.reload()
        newest = self.history.newest
        return {"url": self.url.url, "settings": dict(self.settings), "pooled": self.pooled, "newest": newest}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Login:
        """Return the login that `facts` describes."""
        newest = None if facts["newest"] is None else Server(*facts["newest"])
        return cls(DatabaseUrl(facts["url"]), facts["settings"], pooled=facts["pooled"], history=ServerHistory(newest))


def connect(login: Login) -> psycopg.Connection[Any]:
    """Open a connection in autocommit mode, its transactions at READ COMMITTED. Raises ConfigError where psycopg is missing.

    A thread that waits for an answer over a cut link, which nothing else could interrupt, hears of it within some fifteen seconds.
    """
    try:
        import psycopg  # noqa: PLC0415  optional
    except ImportError as error:
        raise ConfigError(
            "job.transaction() in a plain def handler needs a blocking driver: pip install 'rota[psycopg]'. "
            "Or make the handler an async def, or use job.complete() on a connection of your own"
        ) from error
    settings = dict(login.settings)
    name = settings.pop("application_name", "rota")
    options = " ".join(f"-c {key}={value}" for key, value in settings.items())
    # libpq has the server's settings for its own end, too, under shorter names.
    alive: dict[str, Any] = {setting.removeprefix("tcp_"): value for setting, value in KEEPALIVES.items()}

    def attempt() -> psycopg.Connection[Any]:
        return psycopg.connect(
            login.url.dsn,
            autocommit=True,
            application_name=name,
            options=options or None,
            connect_timeout=_connect_seconds(login.url),
            tcp_user_timeout=int(PATIENCE * 1000),
            **alive,
        )

    try:
        conn = attempt()
    except psycopg.OperationalError:
        if not login.url.reload():
            raise
        conn = attempt()
    close_in_child(conn, conn)
    try:
        with _cut_after(conn, ANSWER_SECONDS):
            _check_server(conn, login.history)
    except BaseException:
        conn.close()
        raise
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    if login.pooled:
        conn.prepare_threshold = None
    return conn


def _check_server(conn: psycopg.Connection[Any], history: ServerHistory) -> None:
    row = conn.execute(SQL["identify_server"].encode()).fetchone()
    if row is None or row[1]:
        raise NoServerFits(READ_ONLY)
    history.check(Server(*row[2:5]))


def _connect_seconds(url: DatabaseUrl) -> int:
    """Return the share of each host; less than 2 s, libpq's least, is not enough for any."""
    share = PATIENCE / len(host_addresses(url))
    return max(2, int(min(share, url.connect_timeout or share)))


class BlockingPool:
    """Up to `size` connections, opened when wanted and kept when whole. Threads wait for a free one."""

    def __init__(self, login: Login, size: int) -> None:
        self._login = login
        self._free = BoundedSemaphore(size)
        self._idle: deque[psycopg.Connection[Any]] = deque()
        self._closed = False
        self._generation = 0
        self._used_at = 0.0
        self._shrinking = Lock()
        """Held while a timer is set that closes idle connections."""

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection. One that is not fit for the next is closed."""
        with self._free:
            generation = self._generation
            conn = self._whole() or connect(self._login)
            try:
                yield conn
            finally:
                is_expired = self._closed or generation != self._generation
                if is_expired or conn.closed or conn.info.transaction_status or not _forgets(conn):  # 0 is idle
                    conn.close()
                else:
                    self._idle.append(conn)
                    self._used_at = boottime()
                    self._shrink_later()

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back."""
        self._closed = True
        self.expire()

    def expire(self) -> None:
        """Close the idle connections now, and those in use when they come back: the database has moved."""
        self._generation += 1
        self._close_idle()

    def _shrink_later(self) -> None:
        if self._shrinking.acquire(blocking=False):
            timer = Timer(pool.IDLE_SECONDS, self._shrink)
            timer.daemon = True
            timer.start()

    def _shrink(self) -> None:
        """Close the idle connections unless one has been used meanwhile."""
        self._shrinking.release()
        if boottime() >= self._used_at + pool.IDLE_SECONDS:
            self._close_idle()
        elif self._idle:
            self._shrink_later()

    def _close_idle(self) -> None:
        with suppress(IndexError):  # another thread took the last one
            while self._idle:
                self._idle.popleft().close()

    def _whole(self) -> psycopg.Connection[Any] | None:
        """Return an idle connection that answers: the server may have been restarted since it last did."""
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                conn = self._idle.pop()
                with suppress(Exception), _cut_after(conn, ANSWER_SECONDS):
                    conn.execute("")
                    return conn
                conn.close()
        return None


@contextmanager
def _cut_after(conn: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Cut the connection when the block takes longer: psycopg itself would wait for an answer without a limit."""

    def cut() -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(conn.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _forgets(conn: psycopg.Connection[Any]) -> bool:
    """Make the connection like new; False where that can't be done."""
    from psycopg import Cursor, rows  # noqa: PLC0415  optional, and here we have it

    conn.row_factory, conn.cursor_factory = rows.tuple_row, Cursor
    with suppress(Exception), _cut_after(conn, ANSWER_SECONDS):
        conn.execute(FORGET)
        return True
    return False
