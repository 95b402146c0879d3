"""The daemon: build the parts, supervise them, drain. The only file that knows everything.

Nesting is the order of the shutdown, read backwards: pools, the app's lifespan, the node's row, the endpoints, the services and the
heartbeat, the executions. The heartbeat ends last, so that leases are extended while anything runs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from rota.builtin.configured import configured
from rota.config import mask_dsn
from rota.cron import tzdata_version
from rota.daemon.node_loops import Loops
from rota.db import queries
from rota.db.blocking import BlockingPool, Login
from rota.db.connecting import WORTH_WAITING, close_connection
from rota.db.listen import Listener
from rota.db.migrate import Installation, installation
from rota.db.pool import (
    Pool,
    Route,
    closing,
    connect,
    connection,
    expire,
    handler_session_settings,
    no_answer,
    open_handler_pool,
    open_pool,
    probe,
)
from rota.db.rights import examine_rights
from rota.db.salvage import TRANSIENT
from rota.db.server_history import ServerHistory
from rota.domain.job import NodeId
from rota.errors import DaemonFailed, DatabaseUnusable, RotaError, SchemaMismatch
from rota.handlers.job import Environment
from rota.lifecycle.dispatcher import Dispatcher
from rota.lifecycle.heartbeat import Heartbeat, Trust
from rota.lifecycle.scheduler import Scheduler
from rota.lifecycle.settle import Settler
from rota.observability import health, log_writer, logs
from rota.observability.logs import handler_of_context
from rota.observability.telemetry import Telemetry, make_logger
from rota.runtime import systemd
from rota.runtime.clock import boottime
from rota.runtime.shutdown import ShutdownRequests
from rota.services import declarations
from rota.services.gauges import Gauges, LocalGauges
from rota.services.lock_watch import LockWatch
from rota.services.presence import Node, Presence
from rota.services.pruner import Pruner
from rota.services.reaper import Reaper
from rota.services.schedule_stats import TrackRecord
from rota.supervision import stacks
from rota.supervision.loop import uncancel
from rota.supervision.service_monitor import ServiceMonitor
from rota.supervision.supervisor import CRASHES_IN_A_ROW, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import asyncpg
    from structlog.typing import FilteringBoundLogger

    from rota.app import App
    from rota.config import Config
    from rota.config.database_url import DatabaseUrl
    from rota.lifecycle.running import Running

STALLED = timedelta(seconds=60)
"""A service that has done nothing for so long, while the database answers, is broken."""

WAITING = frozenset(kind.name for kind in (Settler, Listener, TrackRecord))
"""Services that wait for something to do, so that their age says nothing."""

HANDLER_LEFT_BEHIND = 5
"""The exit code of a drain that ended while a handler still ran."""

NOT_READY_AFTER_SECONDS = 2.0
"""For how long one of WORK may fail, or wait for the database, before /readyz answers 503."""

WORK = {
    Dispatcher.name: "claims",
    Settler.name: "settlements",
    Heartbeat.name: "extensions of leases",
    Presence.name: "writes of this node's row",
    Scheduler.name: "decisions about due schedules",
}
"""Services without which no job runs to its end, and what /readyz calls their work."""

ONLOOKERS = frozenset(kind.name for kind in (Gauges, LocalGauges, LockWatch, Pruner, TrackRecord))
"""Services without which the jobs run as well: their crashes are logged and counted, and never end the daemon."""

FAILOVER_SECONDS = 15.0
"""How long a starting daemon waits for a server that takes writes. Then it exits with 3, and its supervisor starts it again."""


class Daemon:
    """One node: everything that runs the jobs of one app from one database."""

    def __init__(
        self,
        config: Config,
        app: App,
        *,
        app_reference: str | None = None,
        until_idle: bool = False,
        read_log_level: Callable[[], str] | None = None,
        show_errors: bool = False,
        watch: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.node = NodeId(uuid.uuid4())
        self.shutdown = ShutdownRequests()
        self.address: tuple[str, int] | None = None
        self._config = config
        self._app = app = app.joined_by(configured(config.handlers))
        self._declared = app.schedules
        self._app_reference = app_reference
        self._until_idle = until_idle
        self._read_log_level = read_log_level
        self._slots = _slots(config, app)
        log = self._make_logger(config.log.level)
        self.telemetry = Telemetry(log, handlers=app.handlers, queues=self._slots, show_errors=show_errors, watch=watch)
        self._monitor = ServiceMonitor()
        self._route: Route | None = None
        self._installation: str | None = None
        self._presence: Presence | None = None
        self._loops: Loops | None = None
        self._failure: RotaError | None = None
        """Why the daemon ends by itself, if it does."""
        self._refused: int | None = None
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._main: asyncio.AbstractEventLoop | None = None
        self._history = ServerHistory(on_move=self._server_moved)
        self._expiring: list[Callable[[], None]] = []
        """What replaces the connections of each pool."""

    def _make_logger(self, level: str) -> FilteringBoundLogger:
        return make_logger(level=level, format=self._config.log.format, node=str(self.node)[:8])

    async def run(self) -> None:
        """Run until told to stop, and drain. If a handler does not stop, the process ends here, with HANDLER_LEFT_BEHIND.

        Raises DatabaseUnusable when the database can't be used as it is, and DaemonFailed when the daemon had to give up.
        """
        config = self._config
        url = config.database_url()
        name = f"rota {str(self.node)[:8]}"
        async with AsyncExitStack() as stack:
            # Outermost: a signal while we start or take our leave must not cut off the app's lifespan or leave our row behind.
            stack.enter_context(
                self.shutdown.on_signals(
                    drain=config.drain.timeout.total_seconds(),
                    grace=config.drain.grace.total_seconds(),
                    hung=self._hung,
                    reload=self._reload,
                    dump=partial(self._dump_stacks, asyncio.get_running_loop()),
                    ignored=self.telemetry.signal_ignored,
                )
            )
            async with self.shutdown.cancelling_startup():
                route, found = await self._find_database(url, name)
                self._route = route
                self._installation = found.installation_id
            if self.shutdown.drain_requested.is_set():
                return  # nothing was started
            # The loop's own handler would log the error's text, and an error's text likes to be a payload.
            self._main = asyncio.get_running_loop()
            self._main.set_exception_handler(lambda _, context: self.telemetry.stray_error(context))
            pool = await stack.enter_async_context(
                closing(
                    await open_pool(
                        url, route=route, name=name, size=config.database.pool_size, on_connect=self._on_connect
                    )
                )
            )
            handler_pool = await stack.enter_async_context(
                closing(
                    await open_handler_pool(
                        url,
                        route=route,
                        name=f"{name} handlers",
                        size=config.database.handler_pool_size,
                        lease=config.lease.duration,
                        accept=self._accept,
                    )
                )
            )
            stack.callback(self._end_threads)
            environment = self._environment(found, pool, handler_pool)
            settings = handler_session_settings(route, f"{name} handlers", config.lease.duration)
            login = Login(url, settings, pooled=route.pooled, history=self._history)
            environment.login = login
            environment.blocking = BlockingPool(login, config.database.handler_pool_size)
            stack.callback(environment.blocking.close)
            self._expiring = [partial(expire, pool), partial(expire, handler_pool), environment.blocking.expire]
            if self._app.lifespan is not None:
                environment.state = await stack.enter_async_context(self._app.lifespan())
            # After the lifespan, which is where an app may set up its logging.
            stack.enter_context(logs.installed(**environment.log))
            presence = self._presence = Presence(pool, self._node_row(), self.telemetry.refused_rows.as_json)
            stack.push_async_callback(self._leave, presence)
            await presence.refuse_foreign_handlers(config.handlers.shared)
            await presence.run_once()
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
        """Start the loops, wait for the order to stop, drain, and end the loops."""
        loops = self._loops = Loops(
            self._config,
            self.node,
            pool,
            environment,
            presence,
            telemetry=self.telemetry,
            monitor=self._monitor,
            handlers=self._app.handlers,
            slots=self._slots,
            route=self._require_route(),
            accept=self._accept,
            stopping=self.shutdown.drain_requested,
            until_idle=self._until_idle,
            on_cancel_refused=self.report_refused_cancel,
        )
        supervisor = Supervisor(
            self.telemetry, self._monitor, give_up=self._give_up, on_cancel_refused=self.report_refused_cancel
        )
        try:
            supervisor.start(Settler.name, loops.settle, max_backoff_seconds=Settler.max_backoff_seconds)
            supervisor.start(Heartbeat.name, loops.heartbeat, max_backoff_seconds=Heartbeat.max_backoff_seconds)
            supervisor.start(Trust.name, loops.trust)
            supervisor.start(Scheduler.name, loops.schedule)
            supervisor.start(TrackRecord.name, loops.record, critical=False)
            supervisor.start(Reaper.name, loops.reap)
            supervisor.start(Presence.name, loops.presence)
            supervisor.start(Pruner.name, loops.prune, critical=False)
            supervisor.start(LockWatch.name, loops.watch_locks, critical=False)
            supervisor.start(Gauges.name, loops.sample, critical=False)
            supervisor.start(LocalGauges.name, loops.sample_locally, critical=False)
            if loops.listens:
                supervisor.start(Listener.name, loops.listen)
            if (interval := systemd.watchdog_interval()) is not None:
                supervisor.start(systemd.Watchdog.name, lambda: loops.feed_watchdog(interval))
            supervisor.start("stop", self._stop_claiming)
            supervisor.start(Dispatcher.name, loops.dispatch)
            await self._drain(loops)
            # The loops end last, so that leases were extended and outcomes written while anything ran.
            await loops.record_the_last()
        finally:
            await supervisor.end()
        if self._failure is not None:
            raise self._failure

    async def _drain(self, loops: Loops) -> None:
        """Return once all jobs have ended after an order to stop. If handlers are left that do not stop, end the process."""
        try:
            if not await self._drained(loops):
                self._end_at_once()
        except BaseException:
            # Without the timer, a handler that can't be cut would keep alive a daemon that runs nothing any more.
            timer = asyncio.get_running_loop().call_later(
                self._config.drain.grace.total_seconds(), self._end_fallen, loops.running
            )
            await loops.executor.end()
            timer.cancel()
            raise

    async def _drained(self, loops: Loops) -> bool:
        """Return once all jobs have ended after an order to stop; False if handlers are left that do not stop.

        An exception or a cancellation that comes meanwhile is taken for the next order: the first drains, the second interrupts,
        and the third propagates.
        """
        while not self.shutdown.interrupt_requested.is_set():
            try:
                await loops.dispatched.wait()
                return await loops.drain.run(self.shutdown.interrupt_requested, self.shutdown.quit_requested)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  jobs of others are under way
                uncancel()
                self.telemetry.loop_crashed("drain", error, crashes=1)
                name = type(error).__name__
                self._failure = DaemonFailed(f"{name} in the daemon's main task: see loop.crashed in the log")
                self.shutdown.request_next()
        await loops.dispatched.wait()
        return await loops.drain.run(self.shutdown.interrupt_requested, self.shutdown.quit_requested)

    def _give_up(self, loop: str, error: BaseException) -> None:
        """Drain and end, because a loop can't do its work."""
        self.telemetry.loop_given_up(loop, kind=type(error).__name__)
        self._fail(
            error
            if isinstance(error, RotaError)
            else DaemonFailed(
                f"the loop {loop!r} crashed {CRASHES_IN_A_ROW} times in a row: see loop.crashed in the log"
            )
        )

    def _fail(self, failure: RotaError) -> None:
        self._failure = self._failure or failure
        if not self.shutdown.drain_requested.is_set():
            self.shutdown.request_next()

    def report_refused_cancel(self, job_id: int) -> None:
        """Log once for each job that its code tried to cancel what isn't its own."""
        if job_id != self._refused:
            self._refused = job_id
            self.telemetry.cancel_refused(job_id=job_id, handler=handler_of_context())

    def loop_broken(self, error: BaseException) -> bool:
        """Start to drain after an exception that left the event loop; return whether the loop has to turn on for that.

        It need not before there are jobs, and must not at the third Ctrl-C.
        """
        if self._loops is None or (isinstance(error, KeyboardInterrupt) and self.shutdown.interrupt_requested.is_set()):
            return False
        self.telemetry.main_loop_broken(error, running=self._claims_running())
        self._fail(DaemonFailed(f"a handler broke the main loop ({type(error).__name__}): see loop.broken in the log"))
        return True

    def socket_lost(self) -> None:
        """Drain, because code of a handler has closed the listening socket: nobody could tell any more how this node is."""
        self.telemetry.socket_lost(running=self._claims_running())
        self._fail(DaemonFailed("a handler closed the daemon's http socket: see socket.lost in the log"))

    def _claims_running(self) -> list[tuple[str, int]]:
        """Return handler and job of each attempt whose handler runs now."""
        running = self._loops.running.snapshot() if self._loops else []
        return [(each.claim.handler, each.claim.job_id) for each in running if each.began and not each.ended_at]

    async def _stop_claiming(self) -> None:
        """At the first order to stop, wake the dispatcher and show other nodes that this one drains."""
        assert self._loops is not None  # noqa: S101  they have started this
        assert self._presence is not None  # noqa: S101  set by run()
        await self.shutdown.drain_requested.wait()
        self._loops.wake.set()
        self._presence.state = "draining"
        systemd.notify("STOPPING=1\nSTATUS=draining")
        with suppress(*TRANSIENT):
            await self._presence.run_once()

    def _end_at_once(self) -> NoReturn:
        """End the process, because handlers are left that do not stop."""
        self.telemetry.node_stopped()
        log_writer.finish()
        os._exit(HANDLER_LEFT_BEHIND)

    def _end_fallen(self, running: Running) -> None:
        """End the process, because handlers won't be cut that fall with it."""
        for attempt in running.snapshot():
            self.telemetry.handler_stuck(job_id=attempt.claim.job_id, handler=attempt.claim.handler, why="fall")
        log_writer.finish()
        os._exit(1)

    def _hung(self) -> None:
        """End the process, because a handler blocks the main loop, which has an order to stop. Not on the main thread."""
        self.telemetry.node_hung()
        log_writer.finish()
        os._exit(1)

    def _require_route(self) -> Route:
        assert self._route is not None  # noqa: S101  set by run()
        return self._route

    def _reload(self) -> None:
        """Read again what may change while the daemon runs: the log level, and the database's URL where a file holds it."""
        try:
            level = self._read_log_level() if self._read_log_level else self._config.log.level
        except RotaError as error:
            self.telemetry.reload_failed(type(error).__name__)
            return
        self.telemetry.log_to(self._make_logger(level))
        logs.set_level(level)
        if self._config.reload_database_urls():
            self._renew_connections()
        self.telemetry.reloaded(log_level=level)

    def _dump_stacks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Log where all threads and tasks are. Not on the main thread, which may be blocked."""
        self.telemetry.stacks_dumped(threads=stacks.thread_stacks(), tasks=stacks.task_stacks(loop))

    async def _find_database(self, url: DatabaseUrl, name: str) -> tuple[Route, Installation]:
        """Look at the server and the schema. Waits a while for a server that takes writes and has room for one more connection.

        Raises DatabaseUnusable for any other outage.
        """
        give_up_at = boottime() + FAILOVER_SECONDS
        reason = ""
        while boottime() < give_up_at:
            try:
                route = await _probe(url)
                return route, await _identity(url, route, name)
            except WORTH_WAITING as error:
                reason = str(error) or type(error).__name__
                self.telemetry.database_awaited(reason, waits=FAILOVER_SECONDS)
                await asyncio.sleep(1)
        raise DatabaseUnusable(f"{mask_dsn(url.dsn)} has not become usable within {FAILOVER_SECONDS:g} s: {reason}")

    async def _accept(self, conn: asyncpg.Connection) -> None:
        """Check the server of a new connection, whatever it is for."""
        if await queries.check_server(conn, self._history) != self._installation:
            # Under the same URL another database: its keys begin otherwise, and it lacks the schedules that our code declares.
            raise SchemaMismatch("the database was replaced by another installation of rota: start this daemon anew")

    def _server_moved(self) -> None:
        """Replace all connections: those to the server before lead to another history. On any thread."""
        if self._main is not None:
            self._main.call_soon_threadsafe(self._renew_connections)
        if (newest := self._history.newest) is not None:
            self.telemetry.server_moved(timeline=newest.timeline)

    def _renew_connections(self) -> None:
        if self._loops is not None:
            self._loops.reconnect()
        for renew in self._expiring:
            renew()

    async def _on_connect(self, conn: asyncpg.Connection) -> None:
        await self._accept(conn)
        # A fail-over or a restore can set sequences back, and no token or id may be issued twice.
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
                failures=self._monitor.failures[name],
                database_away=name in self._monitor.unreachable,
            )
            for name, succeeded in list(self._monitor.last_success_at.items())
        ]

    def readiness(self) -> health.Readiness:
        """Return whether this node takes jobs, for /readyz."""
        reached = max(
            self._presence.reached if self._presence else 0.0, self._loops.database_reached if self._loops else 0.0
        )
        return health.Readiness(
            database_age=timedelta(seconds=boottime() - reached) if reached else None,
            draining=self.shutdown.drain_requested.is_set(),
            stalled=[
                f"{WORK[service]} {why}"
                for service, why in self._monitor.stalled_services(for_seconds=NOT_READY_AFTER_SECONDS).items()
                if service in WORK
            ],
            blockers=[f"{blocker}. {blocker.cure}" for blocker in self._loops.lock_watch.blockers]
            if self._loops
            else [],
        )


def _slots(config: Config, app: App) -> dict[str, int]:
    """Return queue -> slots: those configured, and for each further queue of a handler as many as `*` says."""
    slots = dict(config.queues)
    if (share := slots.get("*")) is not None:
        for handler in app.handlers.values():
            slots.setdefault(handler.queue or "default", share)
    return slots


async def _probe(url: DatabaseUrl) -> Route:
    try:
        return await probe(url)
    except WORTH_WAITING:
        raise
    except TRANSIENT as error:
        raise no_answer(mask_dsn(url.dsn), str(error) or type(error).__name__) from error


async def _identity(url: DatabaseUrl, route: Route, name: str) -> Installation:
    # Before there is a pool: its connections begin with a statement that needs the schema.
    conn = await connect(url, route=route, name=name)
    try:
        found = await installation(conn)
        if fault := next((each for each in await examine_rights(conn) if each.stops_daemons), None):
            raise DatabaseUnusable(f"{fault.cause}. {fault.cure}")
        return found
    finally:
        await close_connection(conn)
