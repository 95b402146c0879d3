"""The dedicated LISTEN connection. A notification is only a hint to poll now: its payload is never trusted."""

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

PING_SECONDS = 10.0
"""Time between round trips on the listening connection, the only way to detect a dead network link."""

PONG_SECONDS = 2.0
"""A round trip without an answer after this time means that the link is dead."""

LOCK_RETRY_SECONDS = 1.0
"""Pause between two tries at the shared lock while another session holds it exclusively."""

MAX_NOTIFICATIONS = 5000
"""After more notifications within a second, the daemon polls instead. Any login may notify, and each one takes some 20 µs."""

FLOOD_PAUSE_SECONDS = 10.0
"""How long it then does not listen."""


class Listener:
    """Service: keeps one connection listening, and while the dispatcher waits holds the advisory lock that makes inserts notify.

    Waiting dispatchers share the lock, and it ends with the session; see the trigger function rota.wake_dispatchers(). Any login
    can take this lock, so rota never waits for it. Another login can only cause superfluous notifications, or make this daemon
    poll.
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
        self._wants_lock = False
        self._is_locked = False
        self._try_lock_at = 0.0
        self._answered_at = 0.0
        """Time of the last answer over this connection, by this node's monotonic clock."""
        self._changed = asyncio.Event()
        self._received = 0
        self._counting_since = 0.0
        self._open_at = 0.0

    @property
    def armed(self) -> bool:
        """Whether inserts wake this daemon: every insert that commits from now on sends a notification."""
        return self._is_locked and self._wants_lock and self._conn is not None

    def want(self, armed: bool, /) -> None:
        """Request notifications of inserts, or stop them. They are not needed while the dispatcher polls anyway."""
        if armed != self._wants_lock:
            self._wants_lock = armed
            self._changed.set()

    async def run_once(self) -> None:
        """Connect if needed, take or release the lock as wanted, and check that the connection still answers."""
        if self._conn is None and boottime() < self._open_at:
            await self._wait_for_change(self._open_at - boottime())
            return
        try:
            conn = self._conn or await self._open()
            if self._must_change_lock():
                if self._wants_lock:
                    self._is_locked = await conn.fetchval(SQL["await_inserts"], timeout=PONG_SECONDS)
                    self._try_lock_at = 0.0 if self._is_locked else boottime() + LOCK_RETRY_SECONDS
                    if self._is_locked:
                        # Inserts that committed before the lock was held sent no notification.
                        self._on_wake()
                        self._on_schedules()
                else:
                    await conn.execute(SQL["ignore_inserts"], timeout=PONG_SECONDS)
                    self._is_locked = False
                self._answered_at = boottime()
            elif self._seconds_until_ping() <= 0:
                await conn.execute("select 1", timeout=PONG_SECONDS)
                self._answered_at = boottime()
        except LOST as error:
            self.close(type(error).__name__)
            if isinstance(error, TRANSIENT):
                raise
            raise ConnectionLost(str(error)) from error
        if not self._must_change_lock():
            await self._wait_for_change(self._seconds_to_wait())

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def _must_change_lock(self) -> bool:
        return self._wants_lock != self._is_locked and (not self._wants_lock or boottime() >= self._try_lock_at)

    def _seconds_to_wait(self) -> float:
        if self._wants_lock and not self._is_locked:
            return min(self._seconds_until_ping(), self._try_lock_at - boottime())
        return self._seconds_until_ping()

    def _seconds_until_ping(self) -> float:
        # Counted from the last answer, not from the last call: a call that sends nothing does not test the link.
        return self._answered_at + PING_SECONDS - boottime()

    def close(self, why: str | None = None) -> None:
        """Drop the connection at once. Over a dead link, is_closed() would stay False."""
        if self._conn is not None:
            self._conn.remove_termination_listener(self._on_terminated)
            self._conn.terminate()
            self._conn, self._is_locked = None, False
            self._telemetry.listener_changed(up=False, why=why)

    async def _open(self) -> asyncpg.Connection:
        conn = await self._connect()
        try:
            conn.add_termination_listener(self._on_terminated)
            await conn.add_listener("rota_wake", self._on_wake_notification)
            await conn.add_listener("rota_cancel", self._on_cancel_notification)
        except BaseException:
            conn.terminate()  # otherwise a cancellation here would leave it open, and uvloop would wait for it for ever
            raise
        self._conn, self._is_locked, self._answered_at = conn, False, boottime()
        self._telemetry.listener_changed(up=True)
        self._on_wake()
        return conn

    def _on_wake_notification(self, _conn: Any, pid: int, _channel: str, payload: object) -> None:
        self._count_notification(pid)
        match payload:
            case "schedules":
                self._on_schedules()
            case "nodes":
                self._on_nodes()
            case _:  # an unknown payload wakes the dispatcher, too
                self._on_wake()

    def _on_cancel_notification(self, _conn: Any, pid: int, *_: Any) -> None:
        self._count_notification(pid)
        self._on_cancel()

    def _count_notification(self, pid: int) -> None:
        now = boottime()
        if now - self._counting_since >= 1:
            self._counting_since, self._received = now, 0
        self._received += 1
        if self._received > MAX_NOTIFICATIONS and self._conn is not None:
            self._open_at = now + FLOOD_PAUSE_SECONDS
            self.close(
                f"more than {MAX_NOTIFICATIONS} notifications a second, the last of server process {pid}: polling instead"
            )
            self._changed.set()

    def _on_terminated(self, conn: Any) -> None:
        if conn is self._conn:
            self._conn, self._is_locked = None, False
            self._telemetry.listener_changed(up=False, why="connection terminated")
            self._changed.set()


class NoListener:
    """Used behind a pooler, where notifications do not arrive. Polling alone finds the jobs."""

    armed = False

    def want(self, armed: bool, /) -> None:
        """Do nothing."""
