"""The dedicated LISTEN connection: hints about when to look. What a notification says is never trusted, only that it came."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rota.db.pool import ConnectionLost
from rota.db.salvage import LOST, TRANSIENT
from rota.db.sql import SQL
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    import asyncpg

    from rota.observability.telemetry import Telemetry

PING = 10.0
"""Seconds between round trips on the listening connection: a cut link is noticed by nobody else."""

PONG = 2.0
"""Seconds after which a round trip without an answer is taken for a cut link."""

LOCK_RETRY_SECONDS = 1.0
"""Pause between two tries at the shared lock while another session holds it exclusively."""


class Listener:
    """Service: keeps one connection listening, and holds the advisory lock that makes inserts notify while we wait.

    Waiting dispatchers share the lock, and it ends with the session; see the trigger function rota.wake_dispatchers(). Every
    login may hold this lock, so nothing ever waits for it: a stranger can only cause notifications that nobody needs, or have
    us poll.
    """

    name = "listener"
    interval: timedelta | None = None

    def __init__(
        self,
        connect: Callable[[], Awaitable[asyncpg.Connection]],
        telemetry: Telemetry,
        *,
        on_wake: Callable[[], None],
        on_cancel: Callable[[], None],
        on_schedules: Callable[[], None],
        on_nodes: Callable[[], None],
    ) -> None:
        self._connect = connect
        self._telemetry = telemetry
        self._on_wake = on_wake
        self._on_cancel = on_cancel
        self._on_schedules = on_schedules
        self._on_nodes = on_nodes
        self._conn: asyncpg.Connection | None = None
        self._wanted = False
        self._held = False
        self._try_lock_at = 0.0
        self._carried = 0.0
        """When the link last brought an answer, on this node's clock."""
        self._changed = asyncio.Event()

    @property
    def armed(self) -> bool:
        """True while every insert that commits from now on wakes us."""
        return self._held and self._wanted and self._conn is not None

    def want(self, armed: bool, /) -> None:
        """Have inserts notify, or spare them that while the dispatcher looks again anyway."""
        if armed != self._wanted:
            self._wanted = armed
            self._changed.set()

    async def run_once(self) -> None:
        """Be connected, hold or leave the lock as wanted, and see that the link still carries."""
        try:
            conn = self._conn or await self._open()
            if self._has_to_change():
                if self._wanted:
                    self._held = await conn.fetchval(SQL["await_inserts"], timeout=PONG)
                    self._try_lock_at = 0.0 if self._held else boottime() + LOCK_RETRY_SECONDS
                    if self._held:
                        # Inserts that committed before the lock was held sent no notification.
                        self._on_wake()
                        self._on_schedules()
                else:
                    await conn.execute(SQL["ignore_inserts"], timeout=PONG)
                    self._held = False
                self._carried = boottime()
            elif self._ping_in() <= 0:
                await conn.execute("select 1", timeout=PONG)
                self._carried = boottime()
        except LOST as error:
            self.close(type(error).__name__)
            if isinstance(error, TRANSIENT):
                raise
            raise ConnectionLost(str(error)) from error
        if not self._has_to_change():
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._changed.wait()
            self._changed.clear()

    def _has_to_change(self) -> bool:
        return self._wanted != self._held and (not self._wanted or boottime() >= self._try_lock_at)

    def _pause(self) -> float:
        if self._wanted and not self._held:
            return min(self._ping_in(), self._try_lock_at - boottime())
        return self._ping_in()

    def _ping_in(self) -> float:
        # Counted from the last answer, not from the last turn: a dispatcher that changes its mind in between is no answer.
        return self._carried + PING - boottime()

    def close(self, why: str | None = None) -> None:
        """Let the connection go at once; is_closed() would stay False over a cut link."""
        if self._conn is not None:
            self._conn.remove_termination_listener(self._gone)
            self._conn.terminate()
            self._conn, self._held = None, False
            self._telemetry.listener_changed(up=False, why=why)

    async def _open(self) -> asyncpg.Connection:
        conn = await self._connect()
        try:
            conn.add_termination_listener(self._gone)
            await conn.add_listener("rota_wake", self._woken)
            await conn.add_listener("rota_cancel", self._told_to_cancel)
        except BaseException:
            conn.terminate()  # a stop in this moment would leave it open, and uvloop waits for it without end
            raise
        self._conn, self._held, self._carried = conn, False, boottime()
        self._telemetry.listener_changed(up=True)
        self._on_wake()
        return conn

    def _woken(self, _conn: Any, _pid: int, _channel: str, about: object) -> None:
        # Which of us is to look. Whatever else stands there, it came: somebody looks.
        match about:
            case "schedules":
                self._on_schedules()
            case "nodes":
                self._on_nodes()
            case _:
                self._on_wake()

    def _told_to_cancel(self, *_: Any) -> None:
        self._on_cancel()

    def _gone(self, conn: Any) -> None:
        if conn is self._conn:
            self._conn, self._held = None, False
            self._telemetry.listener_changed(up=False, why="connection terminated")
            self._changed.set()


class NoListener:
    """Stands in where notifications can't arrive, behind a pooler: polling alone finds the jobs."""

    armed = False

    def want(self, armed: bool, /) -> None:
        """Nobody could be told."""
