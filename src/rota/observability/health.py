"""The HTTP endpoints: `/metrics`, `/healthz` (503 if a restart would help) and `/readyz` (503 if the node takes no jobs).

All answers come from memory: a request never touches the database and never changes anything.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client.aiohttp import make_aiohttp_handler

from rota.errors import AddressInUse, ConfigError
from rota.runtime.forks import close_in_child

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from aiohttp.typedefs import Handler
    from aiohttp.web_protocol import RequestHandler
    from prometheus_client import CollectorRegistry

ADDRESS_SECONDS = 5.0
"""How long a daemon waits for the http port: its predecessor may still be shutting down."""

WATCH_SECONDS = 0.5
"""Seconds between two checks that the listening socket is open."""

MAX_DATABASE_AGE = timedelta(seconds=15)
"""A node is ready if the database answered within this time. A node without a heartbeat for this time counts as lost."""

MAX_CONNECTIONS = 64
"""With more connections, the oldest is closed: slow and idle clients must not use up the daemon's file descriptors."""

GRACE_SECONDS = 1.0
"""A younger connection is closed only above 4 * MAX_CONNECTIONS: a burst of clients must not cut off a scrape."""


def _is_worth_logging(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


# aiohttp logs malformed requests and lost connections as errors with a traceback: any client could fill the log.
_LOG = logging.getLogger("rota.health")
_LOG.addFilter(_is_worth_logging)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHealth:
    """The state of one service of this daemon."""

    name: str
    age: timedelta
    """Time since the last success, or since the start if there was none."""
    allowed: timedelta
    """From this age on, the service itself counts as broken."""
    failures: int
    """Failures in a row since the last success."""
    database_away: bool
    """The last failure was a transient database error, so the service backs off as it should."""

    @property
    def well(self) -> bool:
        """False if a restart of this process would help."""
        return self.database_away or self.age < self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether this node takes jobs, and if not, why."""

    database_age: timedelta | None
    """Time since the database last answered; None if it never has."""
    draining: bool
    stalled: Sequence[str] = ()
    """Kinds of work that make no progress, each with its cause."""
    blockers: Sequence[str] = ()
    """Sessions that hold a lock for which a session of this installation waits."""

    @property
    def reasons(self) -> list[str]:
        """The reasons why this node takes no jobs; empty if it takes jobs."""
        reasons: list[str] = []
        if self.database_age is None:
            reasons.append("the database has not been reached yet")
        elif self.database_age > MAX_DATABASE_AGE:
            reasons.append(f"the database was last reached {self.database_age.total_seconds():.0f} s ago")
        reasons += self.stalled
        reasons += self.blockers
        if self.draining:
            reasons.append("this node is draining")
        return reasons


class Probe(Protocol):
    """The daemon's answers, from memory and without waiting."""

    def services(self) -> Sequence[ServiceHealth]:
        """Return the state of every service."""

    def readiness(self) -> Readiness:
        """Return whether this node takes jobs."""

    def socket_lost(self) -> None:
        """Called when code in this process has closed the listening socket, so that no endpoint answers any more."""


@asynccontextmanager
async def serve(*, host: str, port: int, registry: CollectorRegistry, probe: Probe) -> AsyncIterator[tuple[str, int]]:
    """Serve the endpoints inside the block. Yields the bound (host, port).

    Raises ConfigError if the address can't be bound, AddressInUse if another process keeps it for ADDRESS_SECONDS.

    Call it in the daemon's main loop: any answer of `/healthz` then proves that this loop is not blocked.
    """

    async def healthz(_: web.Request) -> web.Response:
        services = probe.services()
        return web.json_response(
            {"services": {service.name: _as_json(service) for service in services}},
            status=200 if all(service.well for service in services) else 503,
        )

    async def readyz(_: web.Request) -> web.Response:
        reasons = probe.readiness().reasons
        return web.json_response({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    application = web.Application(middlewares=[_read_only])
    application.add_routes(
        [
            web.get("/metrics", make_aiohttp_handler(registry)),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
        ]
    )
    # No TCP keepalive: setting it raises in the loop if the client has already reset the connection.
    # The short timeout is for scrapers that keep their connection open: they would delay the daemon's exit by a minute.
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1, logger=_LOG, tcp_keepalive=False)
    await runner.setup()
    try:
        listening = await _listen(runner, host, port)
        close_in_child(listening, *listening.sockets)
        try:
            bound_host, bound_port = listening.sockets[0].getsockname()[:2]
            with _watching_sockets(listening, probe.socket_lost):
                yield bound_host, bound_port
        finally:
            listening.close()
    finally:
        await runner.cleanup()


@contextmanager
def _watching_sockets(listening: asyncio.Server, lost: Callable[[], None]) -> Iterator[None]:
    """Call `lost` once if a listening socket is closed inside the block."""
    loop = asyncio.get_running_loop()
    numbers = [sock.fileno() for sock in listening.sockets]
    inodes = [_inode(number) for number in numbers]

    timer: asyncio.TimerHandle

    def check() -> None:
        nonlocal timer
        if [_inode(number) for number in numbers] != inodes:
            lost()
        else:
            timer = loop.call_later(WATCH_SECONDS, check)

    timer = loop.call_later(WATCH_SECONDS, check)
    try:
        yield
    finally:
        timer.cancel()


def _inode(number: int) -> int | None:
    try:
        return os.fstat(number).st_ino
    except OSError:
        return None


async def _listen(runner: web.AppRunner, host: str, port: int) -> asyncio.Server:
    server = cast("web.Server", runner.server)  # made by setup()

    loop = asyncio.get_running_loop()
    admitted: dict[RequestHandler, float] = {}

    def admit() -> RequestHandler:
        now = loop.time()
        closed = [old for old, at in admitted.items() if old.transport is None and now > at + GRACE_SECONDS]
        for old in closed:
            del admitted[old]
        if len(admitted) >= MAX_CONNECTIONS:
            oldest, at = next(iter(admitted.items()))
            if now > at + GRACE_SECONDS or len(admitted) >= 4 * MAX_CONNECTIONS:
                del admitted[oldest]
                if oldest.transport is not None:
                    # Abort, not close: a client that reads nothing would keep it open until its answer is sent.
                    oldest.transport.abort()
        admitted[handler := server()] = now
        return handler

    give_up_at = loop.time() + ADDRESS_SECONDS
    listening = None
    while listening is None:
        try:
            listening = await loop.create_server(admit, host, port, backlog=1024)
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            if not in_use or loop.time() > give_up_at:
                kind = AddressInUse if in_use else ConfigError
                raise kind(
                    f"can't serve /metrics on {host}:{port} ({error.strerror or error}): set http.port (ROTA_HTTP_PORT) "
                    "to a free port, 0 for any, and http.host (ROTA_HTTP_HOST) to an address of this machine"
                ) from error
            await asyncio.sleep(0.2)
    return listening


@web.middleware
async def _read_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    if request.method not in {"GET", "HEAD"}:
        raise web.HTTPMethodNotAllowed(request.method, ["GET", "HEAD"])
    return await handler(request)


def _as_json(service: ServiceHealth) -> dict[str, object]:
    return {
        "well": service.well,
        "age_s": round(service.age.total_seconds(), 3),
        "failures": service.failures,
        "database_away": service.database_away,
    }
