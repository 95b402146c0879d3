"""Blocking connections for the transactions of plain `def` handlers. Requires psycopg, which is an optional dependency."""

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
from rota.db.server import READ_ONLY, Server, ServerHistory
from rota.db.sessions import KEEPALIVES, RESET_SESSION, STATEMENT_SECONDS, UNACKNOWLEDGED_SECONDS
from rota.db.sql import SQL
from rota.errors import ConfigError
from rota.runtime.clock import boottime
from rota.runtime.forks import close_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psycopg


ANSWER_SECONDS = 5.0
"""Limit for the short statements between two handlers. Keepalives do not detect a proxy that has stopped forwarding."""


@dataclass(frozen=True, slots=True)
class Login:
    """The URL and session settings with which handlers connect."""

    url: DatabaseUrl = field(repr=False)
    settings: Mapping[str, str]
    pooled: bool = False
    """Whether the URL leads through a pooler. Prepared statements don't work there: the next one may run in another session."""

    history: ServerHistory = field(default_factory=ServerHistory)

    def to_json(self) -> dict[str, Any]:
        """Return the login for a child process, as JSON values. Reads the URL from its file again."""
        self.url.reload()
        newest = self.history.newest
        return {"url": self.url.url, "settings": dict(self.settings), "pooled": self.pooled, "newest": newest}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Login:
        """Return the login from the values of `to_json`."""
        newest = None if values["newest"] is None else Server(*values["newest"])
        return cls(
            DatabaseUrl(values["url"]), values["settings"], pooled=values["pooled"], history=ServerHistory(newest)
        )


def connect(login: Login) -> psycopg.Connection[Any]:
    """Open a connection in autocommit mode, with READ COMMITTED transactions. Raises ConfigError if psycopg is missing.

    A thread that waits for an answer over a dead network link gets an error within about fifteen seconds.
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
    # libpq has the same settings for the client's side, without the prefix tcp_.
    keepalives: dict[str, Any] = {setting.removeprefix("tcp_"): value for setting, value in KEEPALIVES.items()}

    def open_psycopg() -> psycopg.Connection[Any]:
        return psycopg.connect(
            login.url.dsn,
            autocommit=True,
            application_name=name,
            options=options or None,
            connect_timeout=_connect_seconds(login.url),
            tcp_user_timeout=int(UNACKNOWLEDGED_SECONDS * 1000),
            **keepalives,
        )

    try:
        conn = open_psycopg()
    except psycopg.OperationalError:
        if not login.url.reload():
            raise
        conn = open_psycopg()
    close_in_child(conn, conn)
    try:
        with _shut_down_after(conn, ANSWER_SECONDS):
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
    """Return the time limit per host in seconds. libpq's minimum is 2."""
    share = STATEMENT_SECONDS / len(host_addresses(url))
    return max(2, int(min(share, url.connect_timeout or share)))


class BlockingPool:
    """Up to `size` connections, opened on demand and reused. Threads wait for a free one."""

    def __init__(self, login: Login, size: int) -> None:
        self._login = login
        self._free = BoundedSemaphore(size)
        self._idle: deque[psycopg.Connection[Any]] = deque()
        self._closed = False
        self._generation = 0
        self._used_at = 0.0
        self._timer_lock = Lock()
        """Locked while the timer that closes idle connections is running."""

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection. It is closed afterwards if it can't be reset for the next handler."""
        with self._free:
            generation = self._generation
            conn = self._take_idle() or connect(self._login)
            try:
                yield conn
            finally:
                is_expired = self._closed or generation != self._generation
                if is_expired or conn.closed or conn.info.transaction_status or not _reset(conn):  # status 0 is idle
                    conn.close()
                else:
                    self._idle.append(conn)
                    self._used_at = boottime()
                    self._start_idle_timer()

    def close(self) -> None:
        """Close idle connections now, and lent ones when they are returned."""
        self._closed = True
        self.expire()

    def expire(self) -> None:
        """Replace all connections, because the database has moved: idle ones now, lent ones when they are returned."""
        self._generation += 1
        self._close_idle()

    def _start_idle_timer(self) -> None:
        if self._timer_lock.acquire(blocking=False):
            timer = Timer(pool.IDLE_SECONDS, self._close_if_idle)
            timer.daemon = True
            timer.start()

    def _close_if_idle(self) -> None:
        """Close the idle connections unless one has been used meanwhile."""
        self._timer_lock.release()
        if boottime() >= self._used_at + pool.IDLE_SECONDS:
            self._close_idle()
        elif self._idle:
            self._start_idle_timer()

    def _close_idle(self) -> None:
        with suppress(IndexError):  # another thread took the last one
            while self._idle:
                self._idle.popleft().close()

    def _take_idle(self) -> psycopg.Connection[Any] | None:
        """Return an idle connection that still answers, or None. The server may have restarted since its last use."""
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                conn = self._idle.pop()
                with suppress(Exception), _shut_down_after(conn, ANSWER_SECONDS):
                    conn.execute("")
                    return conn
                conn.close()
        return None


@contextmanager
def _shut_down_after(conn: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
    """Shut the socket down if the block takes longer, because psycopg waits for an answer without a limit."""

    def shut_down() -> None:
        with suppress(OSError), socket.socket(fileno=os.dup(conn.fileno())) as link:
            link.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, shut_down)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reset(conn: psycopg.Connection[Any]) -> bool:
    """Reset the session; return whether that worked."""
    from psycopg import Cursor, rows  # noqa: PLC0415  optional, and installed if there is a connection

    conn.row_factory, conn.cursor_factory = rows.tuple_row, Cursor
    with suppress(Exception), _shut_down_after(conn, ANSWER_SECONDS):
        conn.execute(RESET_SESSION)
        return True
    return False
