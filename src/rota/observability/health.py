"""The three pages for machines: `/metrics`, `/healthz` (restart me if red), `/readyz` (count on me if green).

Everything is answered from what the daemon already knows: no request touches the database, and none changes anything.
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
"""How long a daemon waits for the http port: the one before it may be on its way out."""

WATCH_SECONDS = 0.5
"""Seconds between two checks that the listening socket is open."""

RECENT = timedelta(seconds=15)
"""How long ago the database may have been reached; as long as a node counts as alive."""

MAX_CONNECTIONS = 64
"""Beyond this the oldest connection is closed: slow and idle clients must not use up the daemon's file descriptors."""
GRACE_SECONDS = 1.0
"""A younger connection is closed only beyond four times as many: a burst must not close the scrape in its middle."""


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | ConnectionError))


# aiohttp logs malformed requests and lost connections as errors with a traceback: any client could fill the log.
_LOG = logging.getLogger("rota.health")
_LOG.addFilter(_is_ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHealth:
    """What is known of one service of this daemon."""

    name: str
    age: timedelta
    """Since its last success; since its start, if it had none yet."""
    allowed: timedelta
    """The age from which on something is wrong with the service itself."""
    failures: int
    """In a row, since that success."""
    database_away: bool
    """Its last failure was the database's, so that it rightly backs off."""

    @property
    def well(self) -> bool:
        """Nothing that a restart of this process could mend."""
        return self.database_away or self.age < self.allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """What is known of this node's ability to work."""

    database_age: timedelta | None
    """Since the database last answered; None: it never has."""
    draining: bool
    stalled: Sequence[str] = ()
    """Kinds of work that get nothing done, each with its cause."""
    blockers: Sequence[str] = ()
    """Sessions whose locks this installation's sessions wait for."""

    @property
    def reasons(self) -> list[str]:
        """Why this node doesn't take jobs; empty if it does."""
        reasons: list[str] = []
        if self.database_age is None:
            reasons.append("the database has not been reached yet")
        elif self.database_age > RECENT:
            reasons.append(f"the database was last reached {self.database_age.total_seconds():.0f} s ago")
        reasons += self.stalled
        reasons += self.blockers
        if self.draining:
            reasons.append("this node is draining")
        return reasons


class Probe(Protocol):
    """What the daemon answers at once, from memory."""

    def services(self) -> Sequence[ServiceHealth]:
        """Return the state of every service."""

    def readiness(self) -> Readiness:
        """Return what decides whether this node is counted on."""

    def socket_lost(self) -> None:
        """Take note that something else in this process has closed the listening socket, so that no page answers any more."""


@asynccontextmanager
async def serve(*, host: str, port: int, registry: CollectorRegistry, probe: Probe) -> AsyncIterator[tuple[str, int]]:
    """Serve the pages until left; yield the address in fact bound.

    Raises ConfigError if the address can't be bound, AddressInUse if another process serves there for ADDRESS_SECONDS.

    To run in the daemon's main loop: that `/healthz` answers at all says that this loop turns.
    """

    async def healthz(_: web.Request) -> web.Response:
        services = probe.services()
        return web.json_response(
            {"services": {service.name: _told(service) for service in services}},
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
    # No keepalive: setting it raises in the loop where the client has reset the connection already.
    # Without the short time-out, a scraper that keeps its connection would hold up the daemon's exit for a minute.
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=1, logger=_LOG, tcp_keepalive=False)
    await runner.setup()
    try:
        listening = await _listen(runner, host, port)
        close_in_child(listening, *listening.sockets)
        try:
            bound_host, bound_port = listening.sockets[0].getsockname()[:2]
            with _watching(listening, probe.socket_lost):
                yield bound_host, bound_port
        finally:
            listening.close()
    finally:
        await runner.cleanup()


@contextmanager
def _watching(listening: asyncio.Server, lost: Callable[[], None]) -> Iterator[None]:
    """Call `lost` once if a listening socket is closed inside the block."""
    loop = asyncio.get_running_loop()
    numbers = [each.fileno() for each in listening.sockets]
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
        for each in [each for each, at in admitted.items() if each.transport is None and now > at + GRACE_SECONDS]:
            del admitted[each]
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


def _told(service: ServiceHealth) -> dict[str, object]:
    return {
        "well": service.well,
        "age_s": round(service.age.total_seconds(), 3),
        "failures": service.failures,
        "database_away": service.database_away,
    }
