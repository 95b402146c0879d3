"""Blocking connections for the transactions of plain `def` handlers. They need psycopg, which is optional."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from rota.db.pool import FORGET, KEEPALIVES, PATIENCE
from rota.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import psycopg


@dataclass(frozen=True, slots=True)
class Login:
    """Where handlers connect to, and the settings of their sessions."""

    dsn: str = field(repr=False)
    settings: Mapping[str, str]
    pooled: bool = False
    """Through a pooler: what a session prepares under a name, the next one finds there, or misses."""


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
    conn = psycopg.connect(
        login.dsn,
        autocommit=True,
        application_name=name,
        options=options or None,
        connect_timeout=int(PATIENCE),
        tcp_user_timeout=int(PATIENCE * 1000),
        **alive,
    )
    conn.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    if login.pooled:
        conn.prepare_threshold = None
    return conn


class BlockingPool:
    """Up to `size` connections, opened when wanted and kept when whole. Threads wait for a free one."""

    def __init__(self, login: Login, size: int) -> None:
        self._login = login
        self._free = BoundedSemaphore(size)
        self._idle: deque[psycopg.Connection[Any]] = deque()
        self._closed = False

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Lend a connection. One that is not fit for the next is closed."""
        with self._free:
            conn = self._whole() or connect(self._login)
            try:
                yield conn
            finally:
                if self._closed or conn.closed or conn.info.transaction_status or not _forgets(conn):  # 0 is idle
                    conn.close()
                else:
                    self._idle.append(conn)

    def close(self) -> None:
        """Close what is idle now, and the rest when it comes back."""
        self._closed = True
        while self._idle:
            self._idle.popleft().close()

    def _whole(self) -> psycopg.Connection[Any] | None:
        """Return an idle connection that answers: the server may have been restarted since it last did."""
        while self._idle:
            with suppress(IndexError):  # another thread took the last one
                conn = self._idle.pop()
                with suppress(Exception):
                    conn.execute("")
                    return conn
                conn.close()
        return None


def _forgets(conn: psycopg.Connection[Any]) -> bool:
    """Make the connection like new; False where that can't be done."""
    from psycopg import Cursor, rows  # noqa: PLC0415  optional, and here we have it

    conn.row_factory, conn.cursor_factory = rows.tuple_row, Cursor
    with suppress(Exception):
        conn.execute(FORGET)
        return True
    return False
