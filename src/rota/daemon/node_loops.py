"""The loops of one daemon, and the objects that they share.

After a crash, a loop is run again. Some loops are then rebuilt with new state; the settler, the schedule statistics, presence,
the heartbeat and the listener keep theirs, because it holds outcomes and requests of others.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import TYPE_CHECKING

import asyncpg

from rota.db.listen import Listener, NoListener
from rota.db.pool import connect
from rota.db.salvage import LOST
from rota.db.sessions import Route
from rota.lifecycle.dispatcher import Dispatcher
from rota.lifecycle.drain import Drain
from rota.lifecycle.executor import Executor
from rota.lifecycle.heartbeat import Heartbeat, LeaseWatch
from rota.lifecycle.running import Running
from rota.lifecycle.scheduler import Scheduler
from rota.lifecycle.settle import Settler
from rota.lifecycle.wake import Wake
from rota.runtime import systemd
from rota.services.gauges import Gauges, LocalGauges
from rota.services.lock_watch import LockWatch
from rota.services.pruner import Pruner
from rota.services.reaper import Reaper
from rota.services.schedule_stats import ScheduleStats
from rota.supervision.loop import run_forever, run_on_own_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta

    from rota.config import Config
    from rota.db.pool import Accept
    from rota.domain.job import NodeId
    from rota.handlers import Handler
    from rota.handlers.local_port import Environment
    from rota.observability.telemetry import Telemetry
    from rota.services.presence import Presence
    from rota.supervision.loop import Service
    from rota.supervision.service_monitor import ServiceMonitor

FINAL_STATS_TIMEOUT = 2.0
"""Seconds that a stopping daemon spends at most on writing the last statistics of schedules."""


class Loops:
    """Each coroutine method runs one loop until cancelled. It may be called again after a crash."""

    def __init__(
        self,
        config: Config,
        node: NodeId,
        environment: Environment,
        presence: Presence,
        *,
        telemetry: Telemetry,
        monitor: ServiceMonitor,
        handlers: Mapping[str, Handler],
        slots: Mapping[str, int],
        route: Route,
        accept: Accept,
        stopping: asyncio.Event,
        until_idle: bool,
        on_cancel_refused: Callable[[int], None],
    ) -> None:
        self._config = config
        self._node = node
        pool = self._pool = environment.pool
        self._presence = presence
        self._telemetry = telemetry
        self._monitor = monitor
        self._handlers = handlers
        self._slots = slots
        self._route = route
        self._accept = accept
        self._stopping = stopping
        self._until_idle = until_idle
        self._grace = config.drain.grace.total_seconds()
        self.wake = Wake()
        self.running = Running(slots, self.wake, grace=self._grace)
        self.dispatched = asyncio.Event()
        """Set once the dispatcher has ended, after the order to stop."""
        self._dispatcher: Dispatcher | None = None
        self._schedule_stats = ScheduleStats(pool, telemetry)
        self._scheduler = self._make_scheduler()
        self._gauges = Gauges(pool, telemetry)
        self._settler = Settler(
            pool,
            self.running,
            telemetry,
            monitor=monitor,
            node=node,
            random=random.random,
            alert=config.dead_letters.handler,
            on_end=self._job_ended,
            on_permits_free=self._permits_free,
        )
        self.lock_watch = LockWatch(
            lambda: self._connect("lock watch"), telemetry, monitor, poll_interval=config.poll_interval
        )
        self._heartbeat = self._make_heartbeat()
        self._listener = self._make_listener()
        self.executor = Executor(
            handlers,
            environment,
            settle=self._settler.add,
            abandon=self._settler.abandon,
            on_cancel_refused=on_cancel_refused,
            grace=self._grace,
            max_bytes_in_flight=config.payload.max_bytes_in_flight,
        )
        self.drain = Drain(
            pool,
            self.running,
            telemetry,
            node=node,
            timeout=config.drain.timeout,
            grace=config.drain.grace,
            random=random.random,
            alert=config.dead_letters.handler,
        )

    @property
    def has_listener(self) -> bool:
        """Whether this node receives notifications. A pooler does not pass them."""
        return isinstance(self._listener, Listener)

    @property
    def database_reached(self) -> float:
        """When the database last answered the dispatcher, on this node's clock; 0 if never."""
        return self._dispatcher.reached if self._dispatcher is not None else 0.0

    def reconnect(self) -> None:
        """Replace the heartbeat's and the listener's connections: the database has moved."""
        self._heartbeat.reconnect()
        if isinstance(self._listener, Listener):
            self._listener.close("the database has moved")

    async def settle(self) -> None:
        """Write outcomes."""
        await self._run(self._settler)

    async def extend_leases(self) -> None:
        """Extend leases, on a separate thread."""
        await run_on_own_thread(self._heartbeat, self._telemetry, self._monitor, close=self._heartbeat.close)

    async def watch_leases(self) -> None:
        """Interrupt attempts whose lease may have ended."""
        await self._run(
            LeaseWatch(
                self.running,
                self._telemetry,
                self._heartbeat,
                settle_abandoned=self.executor.settle_abandoned,
                grace=self._grace,
            )
        )

    async def schedule(self) -> None:
        """Decide about due instants."""
        self._scheduler = self._make_scheduler()
        await self._run(self._scheduler)

    async def update_schedule_stats(self) -> None:
        """Write the statistics of schedules."""
        await self._run(self._schedule_stats)

    async def finish_schedule_stats(self) -> None:
        """Write the last statistics of schedules. Gives up on an error, or after FINAL_STATS_TIMEOUT."""
        with suppress(*LOST, asyncpg.PostgresError):
            async with asyncio.timeout(FINAL_STATS_TIMEOUT):
                await self._schedule_stats.finish()

    async def reap(self) -> None:
        """Settle jobs whose lease has expired."""
        await self._run(
            Reaper(
                self._pool,
                self._telemetry,
                interval=self._config.lease.reap_interval,
                lease=self._config.lease.duration,
                random=random.random,
                alert=self._config.dead_letters.handler,
                on_end=self._job_ended,
            )
        )

    async def update_node(self) -> None:
        """Update this node's row."""
        await self._run(self._presence)

    async def prune(self) -> None:
        """Delete expired history."""
        await self._run(Pruner(self._pool, self._telemetry, self._config.retention))

    async def sample(self) -> None:
        """Sample the gauges that come from the database."""
        self._gauges = Gauges(self._pool, self._telemetry)
        await self._run(self._gauges)

    async def sample_locally(self) -> None:
        """Sample the gauges that come from this node."""
        await self._run(LocalGauges(self._telemetry, self.running, self._monitor, lambda: self._gauges))

    async def listen(self) -> None:
        """Wait for notifications."""
        assert isinstance(self._listener, Listener)  # noqa: S101  see `has_listener`
        try:
            await self._run(self._listener)
        finally:
            self._listener.close()  # an open connection would keep uvloop's loop from closing

    async def watch_locks(self) -> None:
        """Find the sessions that hold locks which this node's sessions wait for."""
        try:
            await self._run(self.lock_watch)
        finally:
            self.lock_watch.close()

    async def feed_watchdog(self, interval: timedelta) -> None:
        """Tell systemd that the main loop is not blocked."""
        await self._run(systemd.Watchdog(interval))

    async def dispatch(self) -> None:
        """Claim and start jobs until the order to stop."""
        self._dispatcher = Dispatcher(
            self._pool,
            self.running,
            self.wake,
            self._listener,
            self._telemetry,
            monitor=self._monitor,
            node=self._node,
            handlers=self._handlers,
            queues=self._slots,
            lease=self._config.lease.duration,
            poll_interval=self._config.poll_interval,
            start=self.executor.start,
            on_idle=self._stopping.set if self._until_idle else None,
            alert=self._config.dead_letters.handler,
            restarted=self._dispatcher is not None,
            job_ended=self._job_ended,
        )
        await self._dispatcher.run(self._stopping)
        self.dispatched.set()

    async def _run(self, service: Service) -> None:
        await run_forever(service, self._telemetry, self._monitor)

    def _job_ended(self, schedule_id: int, succeeded: bool | None) -> None:
        if succeeded is not None:
            self._schedule_stats.add(schedule_id, succeeded=succeeded)
        self._scheduler.job_ended()

    def _permits_free(self) -> bool:
        """Look for the next job of a limit here, or return True: another node has to."""
        self._look_at_limits()
        return not self.running.has_free_slots_everywhere() and self._presence.alive > 1

    def _look_at_limits(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.look_at_limits()
        self.wake.set()

    # Not the scheduler's own methods: a restart of its loop replaces the scheduler, and the listener stays.
    def _schedules_changed(self) -> None:
        self._scheduler.wake()

    def _nodes_changed(self) -> None:
        self._scheduler.nodes_changed()

    def _make_scheduler(self) -> Scheduler:
        return Scheduler(
            self._pool,
            Wake(),
            self._telemetry,
            node=self._node,
            shards=lambda: self._presence.shards if self._presence.state == "running" else None,
            poll_interval=self._config.poll_interval,
        )

    async def _connect(self, name: str) -> asyncpg.Connection:
        return await connect(
            self._config.database_url(),
            route=self._route,
            name=f"rota {str(self._node)[:8]} {name}",
            accept=self._accept,
        )

    def _make_heartbeat(self) -> Heartbeat:
        return Heartbeat(
            self.running,
            self._telemetry,
            node=self._node,
            connect=lambda: self._connect("heartbeat"),
            main_loop=asyncio.get_running_loop(),
            interval_seconds=None
            if self._config.lease.heartbeat is None
            else self._config.lease.heartbeat.total_seconds(),
            grace=self._grace,
            wedged_after=self._config.lease.wedged_after.total_seconds(),
        )

    def _make_listener(self) -> Listener | NoListener:
        if self._route.pooled and self._config.database.direct_url is None:
            return NoListener()
        direct = Route(pooled=False, version=self._route.version, synchronous_commit=self._route.synchronous_commit)

        async def connect_directly() -> asyncpg.Connection:
            return await connect(
                self._config.direct_database_url(),
                route=direct,
                name=f"rota {str(self._node)[:8]} listener",
                patience=5.0,
                accept=self._accept,
            )

        def on_wake() -> None:
            # Every daemon gets the notification. Without the jitter, all of them would claim at the same moment.
            others = self._presence.alive - 1
            if others > 0:
                pause = random.uniform(0, min(others, 10) * 0.0005)  # noqa: S311  no secret
                asyncio.get_running_loop().call_later(pause, self._look_at_limits)
            else:
                self._look_at_limits()

        return Listener(
            connect_directly,
            self._telemetry,
            on_wake=on_wake,
            on_cancel=self._heartbeat.check_cancel_requests,
            on_schedules=self._schedules_changed,
            on_nodes=self._nodes_changed,
        )
