"""One daemon: start its parts, run its loops until the order to stop, drain, and release everything in reverse order.

`Daemon.run` reads as the start-up order. The heartbeat ends last of all loops, so that leases are extended while anything runs.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from rota.builtin.configured import configured
from rota.cron import tzdata_version
from rota.daemon.database import FAILOVER_SECONDS, find_database
from rota.daemon.node_loops import Loops
from rota.daemon.service_health import NON_CRITICAL_SERVICES, node_readiness, service_states
from rota.daemon.start_report import report_start
from rota.db import queries, server
from rota.db.blocking import BlockingPool, Login
from rota.db.listen import Listener
from rota.db.pool import Pool, closing, connection, expire_connections, open_handler_pool, open_pool
from rota.db.salvage import TRANSIENT
from rota.db.server import ServerHistory
from rota.db.sessions import Route, handler_session_settings
from rota.domain.job import NodeId
from rota.errors import DaemonFailed, RotaError, SchemaMismatch
from rota.handlers.local_port import Environment
from rota.lifecycle.dispatcher import Dispatcher
from rota.lifecycle.heartbeat import Heartbeat, LeaseWatch
from rota.lifecycle.scheduler import Scheduler
from rota.lifecycle.settle import Settler
from rota.observability import health, log_writer, logs
from rota.observability.logs import handler_of_context
from rota.observability.telemetry import Telemetry, make_logger
from rota.runtime import systemd
from rota.runtime.shutdown import ShutdownRequests
from rota.services import declarations
from rota.services.gauges import Gauges, LocalGauges
from rota.services.lock_watch import LockWatch
from rota.services.presence import Node, Presence
from rota.services.pruner import Pruner
from rota.services.reaper import Reaper
from rota.services.schedule_stats import ScheduleStats
from rota.supervision import stacks
from rota.supervision.loop import MAX_BACKOFF_SECONDS, uncancel
from rota.supervision.service_monitor import ServiceMonitor
from rota.supervision.supervisor import CRASHES_IN_A_ROW, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    import asyncpg
    from structlog.typing import FilteringBoundLogger

    from rota.app import App
    from rota.config import Config
    from rota.db.migrate import Installation
    from rota.lifecycle.running import Running
    from rota.supervision.loop import Service

HANDLER_LEFT_BEHIND = 5
"""The exit code when a handler was still running at the end of the drain."""


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
        self._app_reference = app_reference
        self._until_idle = until_idle
        self._read_log_level = read_log_level
        self._slots = _slots_by_queue(config, app)
        self._connection_name = f"rota {str(self.node)[:8]}"
        log = self._make_logger(config.log.level)
        self.telemetry = Telemetry(log, handlers=app.handlers, queues=self._slots, show_errors=show_errors, watch=watch)
        self._monitor = ServiceMonitor()
        self._installation_id: str | None = None
        self._presence: Presence | None = None
        self._loops: Loops | None = None
        self._failure: RotaError | None = None
        """The error with which run() ends."""
        self._refused_cancel_by: int | None = None
        """The last job whose code tried to cancel a task of the daemon or of another job."""
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self._server_history = ServerHistory(on_move=self._on_server_moved)
        self._renew_pools: list[Callable[[], None]] = []
        """For each pool, a function that replaces its connections."""

    async def run(self) -> None:
        """Run until ordered to stop, and drain. If a handler does not stop, exit the process with HANDLER_LEFT_BEHIND.

        Raises DatabaseUnusable if the database can't be used as it is, and DaemonFailed if the daemon had to give up.
        """
        async with AsyncExitStack() as stack:
            # First: a signal during the start or the end must not cut off the app's lifespan or leave the node's row behind.
            self._handle_signals(stack)
            async with self.shutdown.cancelling_startup():
                route, installation = await find_database(
                    self._config.database_url(), connection_name=self._connection_name, on_wait=self._on_database_wait
                )
                self._installation_id = installation.installation_id
            if self.shutdown.drain_requested.is_set():
                return
            self._report_stray_errors()
            environment = await self._open_pools(stack, route, installation)
            await self._start_app(stack, environment)
            presence = await self._register_node(stack, environment.pool)
            await self._apply_declarations(environment.pool)
            self.address = await self._serve_health(stack)
            report_start(self.telemetry, self._config, self._app, slots=self._slots, route=route, address=self.address)
            await self._run_loops(route, environment, presence)
        self.telemetry.node_stopped()

    # The steps of the start.

    def _handle_signals(self, stack: AsyncExitStack) -> None:
        stack.enter_context(
            self.shutdown.on_signals(
                drain=self._config.drain.timeout.total_seconds(),
                grace=self._config.drain.grace.total_seconds(),
                hung=self._exit_hung,
                reload=self._reload,
                dump=partial(self._dump_stacks, asyncio.get_running_loop()),
                ignored=self.telemetry.signal_ignored,
            )
        )

    def _on_database_wait(self, reason: str) -> None:
        self.telemetry.database_awaited(reason, waits=FAILOVER_SECONDS)

    def _report_stray_errors(self) -> None:
        # The loop's own handler would log the error's text, which may contain a payload.
        self._main_loop = asyncio.get_running_loop()
        self._main_loop.set_exception_handler(lambda _, context: self.telemetry.stray_error(context))

    async def _open_pools(self, stack: AsyncExitStack, route: Route, installation: Installation) -> Environment:
        """Open the daemon's pool, and the handlers' pools for async and for blocking code."""
        config, url = self._config, self._config.database_url()
        handlers_name = f"{self._connection_name} handlers"
        pool = await stack.enter_async_context(
            closing(
                await open_pool(
                    url,
                    route=route,
                    name=self._connection_name,
                    size=config.database.pool_size,
                    on_connect=self._on_connect,
                )
            )
        )
        handler_pool = await stack.enter_async_context(
            closing(
                await open_handler_pool(
                    url,
                    route=route,
                    name=handlers_name,
                    size=config.database.handler_pool_size,
                    lease=config.lease.duration,
                    accept=self._check_server,
                )
            )
        )
        stack.callback(self._end_threads)
        environment = self._environment(installation, pool, handler_pool)
        settings = handler_session_settings(route, handlers_name, config.lease.duration)
        environment.login = Login(url, settings, pooled=route.pooled, history=self._server_history)
        environment.blocking = BlockingPool(environment.login, config.database.handler_pool_size)
        stack.callback(environment.blocking.close)
        self._renew_pools = [
            partial(expire_connections, pool),
            partial(expire_connections, handler_pool),
            environment.blocking.expire,
        ]
        return environment

    async def _start_app(self, stack: AsyncExitStack, environment: Environment) -> None:
        if self._app.lifespan is not None:
            environment.state = await stack.enter_async_context(self._app.lifespan())
        # After the lifespan, in which an app may set up its own logging.
        stack.enter_context(logs.installed(**environment.log))

    async def _register_node(self, stack: AsyncExitStack, pool: Pool) -> Presence:
        presence = self._presence = Presence(pool, self._node_row(), self.telemetry.refused_rows.as_json)
        stack.push_async_callback(self._remove_node, presence)
        await presence.refuse_foreign_handlers(self._config.handlers.shared)
        await presence.run_once()
        return presence

    async def _apply_declarations(self, pool: Pool) -> None:
        async with connection(pool) as db:
            schedule_steps = await declarations.apply(
                db, app=self._app.name, release=self._app.release, declarations=self._app.schedules
            )
            limit_steps = await declarations.apply(
                db,
                declarations.LIMITS,
                app=self._app.name,
                release=self._app.release,
                declarations=self._app.limits,
            )
        self.telemetry.declared("schedule", schedule_steps)
        self.telemetry.declared("limit", limit_steps)

    async def _serve_health(self, stack: AsyncExitStack) -> tuple[str, int]:
        http = self._config.http
        return await stack.enter_async_context(
            health.serve(host=http.host, port=http.port, registry=self.telemetry.registry, probe=self)
        )

    async def _run_loops(self, route: Route, environment: Environment, presence: Presence) -> None:
        """Start the loops, wait for the order to stop, drain, and end the loops."""
        loops = self._loops = Loops(
            self._config,
            self.node,
            environment,
            presence,
            telemetry=self.telemetry,
            monitor=self._monitor,
            handlers=self._app.handlers,
            slots=self._slots,
            route=route,
            accept=self._check_server,
            stopping=self.shutdown.drain_requested,
            until_idle=self._until_idle,
            on_cancel_refused=self.report_refused_cancel,
        )
        supervisor = Supervisor(
            self.telemetry, self._monitor, give_up=self._give_up, on_cancel_refused=self.report_refused_cancel
        )
        try:
            self._start_loops(supervisor, loops)
            await self._drain(loops)
            await loops.finish_schedule_stats()
        finally:
            await supervisor.end()
        if self._failure is not None:
            raise self._failure

    def _start_loops(self, supervisor: Supervisor, loops: Loops) -> None:
        services: list[tuple[type[Service], Callable[[], Coroutine[Any, Any, None]]]] = [
            (Settler, loops.settle),
            (Heartbeat, loops.extend_leases),
            (LeaseWatch, loops.watch_leases),
            (Scheduler, loops.schedule),
            (ScheduleStats, loops.update_schedule_stats),
            (Reaper, loops.reap),
            (Presence, loops.update_node),
            (Pruner, loops.prune),
            (LockWatch, loops.watch_locks),
            (Gauges, loops.sample),
            (LocalGauges, loops.sample_locally),
        ]
        if loops.has_listener:
            services.append((Listener, loops.listen))
        if (interval := systemd.watchdog_interval()) is not None:
            services.append((systemd.Watchdog, partial(loops.feed_watchdog, interval)))
        for service, run in services:
            supervisor.start(
                service.name,
                run,
                critical=service.name not in NON_CRITICAL_SERVICES,
                max_backoff_seconds=getattr(service, "max_backoff_seconds", MAX_BACKOFF_SECONDS),
            )
        supervisor.start("stop", self._stop_claiming)
        supervisor.start(Dispatcher.name, loops.dispatch)  # last: now a claimed job has all it needs

    # The end: drain, or give up.

    async def _drain(self, loops: Loops) -> None:
        """Return once all jobs have ended after an order to stop. If handlers do not stop, exit the process."""
        try:
            if not await self._drain_despite_errors(loops):
                self._exit_leaving_handlers()
        except BaseException:
            # Without the timer, a handler that ignores its cancellation would keep a daemon alive that does nothing else.
            timer = asyncio.get_running_loop().call_later(
                self._config.drain.grace.total_seconds(), self._exit_failed, loops.running
            )
            await loops.executor.end()
            timer.cancel()
            raise

    async def _drain_despite_errors(self, loops: Loops) -> bool:
        """Return True once all jobs have ended after an order to stop, False if handlers do not stop.

        An exception or a cancellation of this task counts as the next order: the first drains, the second interrupts, and the
        third propagates.
        """
        while not self.shutdown.interrupt_requested.is_set():
            try:
                await loops.dispatched.wait()
                return await loops.drain.run(self.shutdown.interrupt_requested, self.shutdown.quit_requested)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  jobs are still running
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
        """Log that the code of a job tried to cancel a task that is not its own: once for several attempts in a row."""
        if job_id != self._refused_cancel_by:
            self._refused_cancel_by = job_id
            self.telemetry.cancel_refused(job_id=job_id, handler=handler_of_context())

    def handle_broken_loop(self, error: BaseException) -> bool:
        """Start to drain after an exception that left the event loop. Return whether the loop must be entered again for that.

        Returns False before the loops have started.
        """
        if self._loops is None:
            return False
        self.telemetry.main_loop_broken(error, running=self._running_handlers())
        self._fail(DaemonFailed(f"a handler broke the main loop ({type(error).__name__}): see loop.broken in the log"))
        return True

    def socket_lost(self) -> None:
        """Drain, because code of a handler closed the listening socket and nothing can check this node's health any more."""
        self.telemetry.socket_lost(running=self._running_handlers())
        self._fail(DaemonFailed("a handler closed the daemon's http socket: see socket.lost in the log"))

    def _running_handlers(self) -> list[tuple[str, int]]:
        """Return handler and job_id of each attempt whose handler runs now."""
        running = self._loops.running.snapshot() if self._loops else []
        return [
            (attempt.claim.handler, attempt.claim.job_id)
            for attempt in running
            if attempt.handler_called and not attempt.ended_at
        ]

    async def _stop_claiming(self) -> None:
        """At the first order to stop, wake the dispatcher and write to this node's row that it is draining."""
        assert self._loops is not None  # noqa: S101  set by _run_loops()
        assert self._presence is not None  # noqa: S101  set by _register_node()
        await self.shutdown.drain_requested.wait()
        self._loops.wake.set()
        self._presence.state = "draining"
        systemd.notify("STOPPING=1\nSTATUS=draining")
        with suppress(*TRANSIENT):
            await self._presence.run_once()

    def _exit_leaving_handlers(self) -> NoReturn:
        """Exit although handlers still run: they do not stop."""
        self.telemetry.node_stopped()
        log_writer.finish()
        os._exit(HANDLER_LEFT_BEHIND)

    def _exit_failed(self, running: Running) -> None:
        """Exit after a failure of the daemon, because handlers ignore their cancellation."""
        for attempt in running.snapshot():
            self.telemetry.handler_stuck(job_id=attempt.claim.job_id, handler=attempt.claim.handler, why="fall")
        log_writer.finish()
        os._exit(1)

    def _exit_hung(self) -> None:
        """Exit, because a handler blocks the main loop after an order to stop. Runs on another thread."""
        self.telemetry.node_hung()
        log_writer.finish()
        os._exit(1)

    def _reload(self) -> None:
        """Read the log level again, and the database URL if it is in a file."""
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
        """Log the stacks of all threads and tasks. Runs on another thread, because the main thread may be blocked."""
        self.telemetry.stacks_dumped(threads=stacks.thread_stacks(), tasks=stacks.task_stacks(loop))

    async def _check_server(self, conn: asyncpg.Connection) -> None:
        """Check that a new connection leads to the same installation on a current server. Raises SchemaMismatch or NoServerFits."""
        if await server.check_server(conn, self._server_history) != self._installation_id:
            # The job ids of the other installation start over, and it lacks the schedules that this app declares.
            raise SchemaMismatch("the database was replaced by another installation of rota: restart this daemon")

    def _on_server_moved(self) -> None:
        """Replace all connections, because the old ones lead to an outdated server. Callable from any thread."""
        if self._main_loop is not None:
            self._main_loop.call_soon_threadsafe(self._renew_connections)
        if (newest := self._server_history.newest) is not None:
            self.telemetry.server_moved(timeline=newest.timeline)

    def _renew_connections(self) -> None:
        if self._loops is not None:
            self._loops.reconnect()
        for renew in self._renew_pools:
            renew()

    async def _on_connect(self, conn: asyncpg.Connection) -> None:
        await self._check_server(conn)
        # A fail-over or a restore can set sequences back. No fence token or id may be issued twice.
        if await queries.raise_fence_tokens(conn):
            self.telemetry.fence_tokens_raised()

    async def _remove_node(self, presence: Presence) -> None:
        with suppress(*TRANSIENT):
            await presence.leave()

    def _environment(self, installation: Installation, pool: Pool, handler_pool: Pool) -> Environment:
        return Environment(
            node=self.node,
            installation_id=installation.installation_id,
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
        group = queue if queue in self._slots else "*"  # as in Lanes.group()
        if group not in self._threads:
            self._threads[group] = ThreadPoolExecutor(max(1, self._slots[group]), thread_name_prefix=f"rota {group}")
        return self._threads[group]

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

    # The probe of the health endpoints.

    def services(self) -> list[health.ServiceHealth]:
        """Return the state of every service, for /healthz."""
        return service_states(self._monitor, poll_interval=self._config.poll_interval)

    def readiness(self) -> health.Readiness:
        """Return whether this node takes jobs, for /readyz."""
        return node_readiness(
            self._monitor,
            database_reached_at=max(
                self._presence.database_reached_at if self._presence else 0.0,
                self._loops.database_reached if self._loops else 0.0,
            ),
            draining=self.shutdown.drain_requested.is_set(),
            blockers=self._loops.lock_watch.blockers if self._loops else (),
        )

    def _make_logger(self, level: str) -> FilteringBoundLogger:
        return make_logger(level=level, format=self._config.log.format, node=str(self.node)[:8])


def _slots_by_queue(config: Config, app: App) -> dict[str, int]:
    """Return queue -> slots: the configured ones, and the slots of `*` for each other queue that is a handler's default."""
    slots = dict(config.queues)
    if (shared := slots.get("*")) is not None:
        for handler in app.handlers.values():
            slots.setdefault(handler.queue or "default", shared)
    return slots
