"""The daemon: build the parts, supervise them, drain. The only file that knows everything.

Nesting is the order of the shutdown, read backwards: pools, the app's lifespan, the node's row, the endpoints, the services and the
heartbeat, the executions. The heartbeat ends last, so that leases are extended while anything runs.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, suppress
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

import asyncpg

from rota import health, logs, systemd
from rota.builtin.configured import configured
from rota.clock import boottime
from rota.config import mask_dsn
from rota.cron import tzdata_version
from rota.db import queries
from rota.db.blocking import BlockingPool, Login
from rota.db.listen import Listener, NoListener
from rota.db.migrate import Installation, installation
from rota.db.pool import (
    LOST,
    TRANSIENT,
    Pool,
    Route,
    closing,
    connect,
    connection,
    handler_session_settings,
    no_answer,
    open_handler_pool,
    open_pool,
    probe,
)
from rota.domain.job import NodeId
from rota.errors import SchemaMismatch
from rota.job import Environment
from rota.lifecycle.dispatcher import Dispatcher
from rota.lifecycle.drain import Drain
from rota.lifecycle.executor import Executor
from rota.lifecycle.heartbeat import Heartbeat, Trust
from rota.lifecycle.running import Running
from rota.lifecycle.scheduler import Scheduler
from rota.lifecycle.settle import Settler
from rota.lifecycle.wake import Wake
from rota.loop import Pulse, Service, on_own_thread, run_forever
from rota.services import declarations
from rota.services.gauges import Gauges, LocalGauges
from rota.services.presence import Node, Presence
from rota.services.pruner import Pruner
from rota.services.reaper import Reaper
from rota.services.track_record import TrackRecord
from rota.stops import Stops
from rota.telemetry import Telemetry, make_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rota.app import App
    from rota.config import Config

STALLED = timedelta(seconds=60)
"""A service that has done nothing for so long, while the database answers, is broken."""

WAITING = frozenset(kind.name for kind in (Settler, Listener, TrackRecord))
"""Services that wait for something to do, so that their age says nothing."""

ONLOOKERS = frozenset(kind.name for kind in (Gauges, LocalGauges, Pruner, TrackRecord))
"""Services without which the jobs run as well: a fault of theirs is told, seen in their age, and no reason to stop or restart."""

LAST_WORDS = 2.0
"""Most seconds that a daemon whose jobs have ended takes to note on their schedules how."""


class Daemon:
    """One node: everything that runs the jobs of one app from one database."""

    def __init__(
        self,
        config: Config,
        app: App,
        *,
        app_reference: str | None = None,
        until_idle: bool = False,
        watch: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.node = NodeId(uuid.uuid4())
        self.stops = Stops()
        self.address: tuple[str, int] | None = None
        self._config = config
        self._app = app = app.joined_by(configured(config.handlers))
        self._declared = app.schedules
        self._app_reference = app_reference
        self._until_idle = until_idle
        self._slots = _slots(config, app)
        log = make_logger(level=config.log.level, format=config.log.format, node=str(self.node)[:8])
        self.telemetry = Telemetry(log, handlers=app.handlers, queues=self._slots, watch=watch)
        self._pulse = Pulse()
        self._route: Route | None = None
        self._installation: str | None = None
        self._dispatcher: Dispatcher | None = None
        self._presence: Presence | None = None
        self._threads: dict[str, ThreadPoolExecutor] = {}

    async def run(self) -> None:
        """Run until told to stop, and drain. Where a handler will not stop, the process ends here, with exit code 0.

        Raises DatabaseUnusable when the database can't be used as it is.
        """
        config = self._config
        dsn = config.require_database()
        name = f"rota {str(self.node)[:8]}"
        async with AsyncExitStack() as stack:
            # Outermost: a signal while we start or take our leave must not cut off the app's lifespan or leave our row behind.
            stack.enter_context(
                self.stops.on_signals(
                    drain=config.drain.timeout.total_seconds(),
                    grace=config.drain.grace.total_seconds(),
                    hung=self._hung,
                )
            )
            async with self.stops.cutting():
                route = self._route = await _first_look(dsn)
                found = await _identity(dsn, route, name)
                self._installation = found.installation_id
            if self.stops.claiming.is_set():
                return  # nothing was started
            # The loop's own handler would log the error's text, and an error's text likes to be a payload.
            asyncio.get_running_loop().set_exception_handler(lambda _, context: self.telemetry.stray_error(context))
            pool = await stack.enter_async_context(
                closing(
                    await open_pool(
                        dsn, route=route, name=name, size=config.database.pool_size, on_connect=self._on_connect
                    )
                )
            )
            handler_pool = await stack.enter_async_context(
                closing(
                    await open_handler_pool(
                        dsn,
                        route=route,
                        name=f"{name} handlers",
                        size=config.database.handler_pool_size,
                        lease=config.lease.duration,
                    )
                )
            )
            stack.callback(self._end_threads)
            environment = self._environment(found, pool, handler_pool)
            settings = handler_session_settings(route, f"{name} handlers", config.lease.duration)
            login = Login(dsn, settings, pooled=route.pooled)
            environment.login = login
            environment.blocking = BlockingPool(login, config.database.handler_pool_size)
            stack.callback(environment.blocking.close)
            if self._app.lifespan is not None:
                environment.state = await stack.enter_async_context(self._app.lifespan())
            # After the lifespan, which is where an app may set up its logging.
            stack.enter_context(logs.installed(**environment.log))
            presence = self._presence = Presence(pool, self._node_row())
            await presence.run_once()
            stack.push_async_callback(self._leave, presence)
            async with connection(pool) as db:
                declared = await declarations.apply(
                    db, app=self._app.name, release=self._app.release, declarations=self._declared
                )
            self.telemetry.schedules_declared(declared)
            self.address = await stack.enter_async_context(
                health.serve(host=config.http.host, port=config.http.port, registry=self.telemetry.registry, probe=self)
            )
            self._introduce(route)
            await self._supervise(pool, environment, presence)
        self.telemetry.node_stopped()

    async def _supervise(self, pool: Pool, environment: Environment, presence: Presence) -> None:
        config, telemetry, route = self._config, self.telemetry, self._route
        assert route is not None  # noqa: S101  set by run()
        wake = Wake()
        grace = config.drain.grace.total_seconds()
        running = Running(self._slots, wake, grace=grace)
        track_record = TrackRecord(pool)
        scheduler = Scheduler(
            pool,
            Wake(),
            telemetry,
            node=self.node,
            shards=lambda: presence.shards if presence.state == "running" else None,
            poll_interval=config.poll_interval,
        )

        def on_end(schedule_id: int, succeeded: bool | None) -> None:
            if succeeded is not None:
                track_record.add(schedule_id, succeeded=succeeded)
            scheduler.job_ended()

        settler = Settler(
            pool,
            running,
            telemetry,
            node=self.node,
            random=random.random,
            alert=config.dead_letters.handler,
            on_end=on_end,
        )
        heartbeat = Heartbeat(
            running,
            telemetry,
            node=self.node,
            connect=lambda: connect(
                config.require_database(), route=route, name=f"rota {str(self.node)[:8]} heartbeat"
            ),
            main=asyncio.get_running_loop(),
            beat=None if config.lease.heartbeat is None else config.lease.heartbeat.total_seconds(),
            grace=grace,
            wedged_after=config.lease.wedged_after.total_seconds(),
        )
        listener = self._listener(wake, heartbeat, scheduler)
        executor = Executor(self._app.handlers, environment, settle=settler.add, abandon=settler.abandon, grace=grace)
        dispatcher = self._dispatcher = Dispatcher(
            pool,
            running,
            wake,
            listener,
            telemetry,
            pulse=self._pulse,
            node=self.node,
            handlers=self._app.handlers,
            queues=self._slots,
            lease=config.lease.duration,
            poll_interval=config.poll_interval,
            start=executor.start,
            on_idle=self.stops.claiming.set if self._until_idle else None,
        )
        drain = Drain(
            pool,
            running,
            telemetry,
            node=self.node,
            timeout=config.drain.timeout,
            grace=config.drain.grace,
            random=random.random,
            alert=config.dead_letters.handler,
        )
        gauges = Gauges(pool, telemetry)
        services: list[Service] = [
            settler,
            scheduler,
            track_record,
            Trust(running, telemetry, heartbeat, grace=grace),
            Reaper(
                pool,
                telemetry,
                interval=config.lease.reap_interval,
                lease=config.lease.duration,
                random=random.random,
                alert=config.dead_letters.handler,
                on_end=on_end,
            ),
            presence,
            Pruner(pool, telemetry, config.retention),
            gauges,
            LocalGauges(telemetry, running, self._pulse, gauges),
        ]
        if isinstance(listener, Listener):
            services.append(listener)
        if (interval := systemd.watchdog_interval()) is not None:
            services.append(systemd.Watchdog(interval))
        try:
            async with asyncio.TaskGroup() as group:
                background: list[asyncio.Task[Any]] = [
                    group.create_task(
                        run_forever(service, telemetry, self._pulse, expendable=service.name in ONLOOKERS),
                        name=service.name,
                    )
                    for service in services
                ]
                beating = on_own_thread(heartbeat, telemetry, self._pulse, close=heartbeat.close)
                background.append(group.create_task(beating, name=heartbeat.name))
                with ExitStack() as fallen:
                    async with asyncio.TaskGroup() as executions:
                        try:
                            background += [group.create_task(self._stop_claiming(wake, presence), name="stop")]
                            await dispatcher.run(executions, self.stops.claiming)
                            if not await drain.run(self.stops.running):
                                self._end_at_once()
                        except BaseException:
                            # Without it, a handler that won't be cut keeps alive a daemon whose services are gone.
                            loop = asyncio.get_running_loop()
                            fallen.callback(loop.call_later(grace, self._end_fallen, running).cancel)
                            raise
                # Every execution has ended, and is settled where the database could be reached. Services go last, so that leases
                # were extended while anything ran.
                await _note_the_last(track_record)
                for task in background:
                    task.cancel()
        finally:
            # Without it, a falling daemon leaves an open connection behind, with which uvloop doesn't come to its end.
            if isinstance(listener, Listener):
                listener.close()

    async def _stop_claiming(self, wake: Wake, presence: Presence) -> None:
        """At the first order to stop: have the dispatcher see it, and tell the others."""
        await self.stops.claiming.wait()
        wake.set()
        presence.state = "draining"
        systemd.notify("STOPPING=1\nSTATUS=draining")
        with suppress(*TRANSIENT):
            await presence.run_once()

    def _end_at_once(self) -> NoReturn:
        """End the process, because handlers are left that will not stop: nobody could wait for them."""
        self.telemetry.node_stopped()
        os._exit(0)

    def _end_fallen(self, running: Running) -> None:
        """End the process, because handlers won't be cut that fall with it."""
        for attempt in running.snapshot():
            self.telemetry.handler_stuck(job_id=attempt.claim.job_id, handler=attempt.claim.handler, why="fall")
        os._exit(1)

    def _hung(self) -> None:
        """End the process, because a handler blocks the main loop, which has an order to stop. Not on the main thread."""
        self.telemetry.node_hung()
        os._exit(1)

    def _listener(self, wake: Wake, heartbeat: Heartbeat, scheduler: Scheduler) -> Listener | NoListener:
        route = self._route
        assert route is not None  # noqa: S101  set by run()
        if route.pooled and self._config.database.direct_url is None:
            return NoListener()
        direct = Route(pooled=False, version=route.version, synchronous_commit=route.synchronous_commit)

        async def connect_directly() -> asyncpg.Connection:
            return await connect(
                self._config.require_direct_database(),
                route=direct,
                name=f"rota {str(self.node)[:8]} listener",
                patience=5.0,
            )

        def on_wake() -> None:
            # Many daemons, one notification: without the jitter all of them claim at the same moment.
            others = (self._presence.alive if self._presence else 1) - 1
            if others > 0:
                asyncio.get_running_loop().call_later(random.uniform(0, min(others, 10) * 0.0005), wake.set)  # noqa: S311
            else:
                wake.set()

        return Listener(
            connect_directly,
            self.telemetry,
            on_wake=on_wake,
            on_cancel=heartbeat.look_now,
            on_schedules=scheduler.look,
            on_nodes=scheduler.nodes_changed,
        )

    async def _on_connect(self, conn: asyncpg.Connection) -> None:
        if await queries.read_installation(conn) != self._installation:
            # Under the same URL another database: its keys begin otherwise, and it lacks the schedules that our code declares.
            raise SchemaMismatch("the database was replaced by another installation of rota: start this daemon anew")
        # A fail-over or a restore can set the sequence back, and a token must never be issued twice.
        if await queries.raise_fence_tokens(conn):
            self.telemetry.fence_tokens_raised()

    async def _leave(self, presence: Presence) -> None:
        with suppress(*TRANSIENT):
            await presence.leave()

    def _environment(self, found: Installation, pool: Pool, handler_pool: Pool) -> Environment:
        return Environment(
            node=self.node,
            installation_id=found.installation_id,
            pool=pool,
            handler_pool=handler_pool,
            app_reference=self._app_reference,
            threads=self._threads_of,
            log={"level": self._config.log.level, "format": self._config.log.format},
            stale_write=lambda attempt, what: self.telemetry.write_refused(
                job_id=attempt.claim.job_id, handler=attempt.claim.handler, what=what
            ),
        )

    def _threads_of(self, queue: str) -> ThreadPoolExecutor:
        room = queue if queue in self._slots else "*"  # as in Running.room()
        if room not in self._threads:
            self._threads[room] = ThreadPoolExecutor(max(1, self._slots[room]), thread_name_prefix=f"rota {room}")
        return self._threads[room]

    def _end_threads(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _node_row(self) -> Node:
        return Node(
            node_id=self.node,
            host=socket.gethostname(),
            pid=os.getpid(),
            rota_version=version("rota"),
            release=self._app.release,
            app=self._app.name,
            handlers=self._app.handlers,
            queues=self._slots,
            tzdata=tzdata_version(),
        )

    def _introduce(self, route: Route) -> None:
        for advice in self._config.warnings:
            self.telemetry.node_advised(str(advice))
        if route.pooled:
            self.telemetry.node_advised(
                "the database URL leads through a connection pooler: notifications can't pass it, so jobs are found by "
                f"polling every {self._config.poll_interval.total_seconds():g} s. Set ROTA_DIRECT_URL to a URL straight to the "
                "server"
                if self._config.database.direct_url is None
                else "the database URL leads through a connection pooler: statements are not kept prepared, "
                "and LISTEN uses ROTA_DIRECT_URL"
            )
            if route.synchronous_commit == "off":
                self.telemetry.node_advised(
                    "synchronous_commit is off and can't be turned on through a pooler: a crash of the server may take back "
                    "settlements, and jobs then run again. alter role … set synchronous_commit = on"
                )
        assert self.address is not None  # noqa: S101  served since a moment
        self.telemetry.node_started(
            version=version("rota"),
            release=self._app.release,
            tzdata=tzdata_version(),
            app=self._app.name,
            handlers=sorted(self._app.handlers),
            slots=dict(self._slots),
            http=f"http://{self.address[0]}:{self.address[1]}",
        )
        systemd.notify(f"READY=1\nSTATUS=up: {sum(self._slots.values())} slots for {len(self._app.handlers)} handlers")

    def services(self) -> list[health.ServiceHealth]:
        """Return the state of every service, for /healthz."""
        now = boottime()
        return [
            health.ServiceHealth(
                name=name,
                age=timedelta(seconds=now - succeeded),
                allowed=timedelta.max if name in WAITING | ONLOOKERS else STALLED + self._config.poll_interval,
                failures=self._pulse.failures[name],
                database_away=name in self._pulse.away,
            )
            for name, succeeded in list(self._pulse.succeeded.items())
        ]

    def readiness(self) -> health.Readiness:
        """Return whether this node takes jobs, for /readyz."""
        reached = max(
            self._presence.reached if self._presence else 0.0, self._dispatcher.reached if self._dispatcher else 0.0
        )
        return health.Readiness(
            database_age=timedelta(seconds=boottime() - reached) if reached else None,
            draining=self.stops.claiming.is_set(),
        )


def _slots(config: Config, app: App) -> dict[str, int]:
    """Return queue -> slots: those configured, and for each further queue of a handler as many as `*` says."""
    slots = dict(config.queues)
    if (share := slots.get("*")) is not None:
        for handler in app.handlers.values():
            slots.setdefault(handler.queue or "default", share)
    return slots


async def _first_look(dsn: str) -> Route:
    try:
        return await probe(dsn)
    except TRANSIENT as error:
        raise no_answer(mask_dsn(dsn), str(error) or type(error).__name__) from error


async def _identity(dsn: str, route: Route, name: str) -> Installation:
    # Before there is a pool: its connections begin with a statement that needs the schema.
    conn = await connect(dsn, route=route, name=name)
    try:
        return await installation(conn)
    finally:
        await conn.close()


async def _note_the_last(record: TrackRecord) -> None:
    """Have schedules know of jobs that ended a moment ago: nobody else would tell them."""
    with suppress(*LOST, asyncpg.PostgresError):
        async with asyncio.timeout(LAST_WORDS):
            await record.finish()
