"""The pages for machines, over real sockets on loopback."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from aiohttp import ClientSession
from prometheus_client import CollectorRegistry, Counter

from rota.errors import AddressInUse
from rota.observability import health
from rota.observability.health import MAX_CONNECTIONS, MAX_DATABASE_AGE, Readiness, ServiceHealth, serve

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REAPER = ServiceHealth(
    name="reaper", age=timedelta(seconds=4), allowed=timedelta(seconds=30), failures=0, database_away=False
)
READY = Readiness(database_age=timedelta(seconds=1), draining=False)


@dataclass
class Known:
    """A probe that knows what it is told."""

    reaper: ServiceHealth = REAPER
    ready: Readiness = READY
    asked: list[str] = field(default_factory=list)

    def services(self) -> list[ServiceHealth]:
        self.asked.append("services")
        return [self.reaper]

    def readiness(self) -> Readiness:
        self.asked.append("readiness")
        return self.ready

    def socket_lost(self) -> None:
        self.asked.append("socket_lost")


@asynccontextmanager
async def pages(probe: Known, registry: CollectorRegistry | None = None) -> AsyncIterator[ClientSession]:
    async with (
        serve(host="127.0.0.1", port=0, registry=registry or CollectorRegistry(), probe=probe) as (host, port),
        ClientSession(f"http://{host}:{port}") as client,
    ):
        yield client


async def read(client: ClientSession, path: str) -> tuple[int, str]:
    async with client.get(path) as answer:
        return answer.status, await answer.text()


async def test_metrics_are_those_of_the_given_registry_in_prometheus_text() -> None:
    """Prometheus refuses a wrong content type; a registry shared between daemons of one process would mix them."""
    registry = CollectorRegistry()
    Counter("rota_reaped", "Attempts taken back", registry=registry).inc(3)
    async with pages(Known(), registry) as client, client.get("/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert "rota_reaped_total 3.0" in await answer.text()


async def test_a_scrape_asks_nobody_anything() -> None:
    """B101: ten nodes scraped every 5 s must cost the database nothing; gauges are sampled elsewhere."""
    probe = Known()
    async with pages(probe) as client:
        assert (await read(client, "/metrics"))[0] == 200
    assert probe.asked == []


async def test_liveness_tells_each_services_age_and_failures() -> None:
    """A person who looks at a red node wants to know which service, since when."""
    async with pages(Known(reaper=replace(REAPER, failures=2))) as client:
        status, body = await read(client, "/healthz")
    assert status == 200
    assert json.loads(body) == {
        "services": {"reaper": {"well": True, "age_s": 4.0, "failures": 2, "database_away": False}}
    }


async def test_a_service_that_stopped_succeeding_turns_liveness_red() -> None:
    """A service that decays in silence is mended by a restart, so somebody must be told to restart."""
    async with pages(Known(reaper=replace(REAPER, age=timedelta(seconds=31), failures=6))) as client:
        assert (await read(client, "/healthz"))[0] == 503


async def test_with_the_database_away_liveness_stays_green_and_readiness_turns_red() -> None:
    """B81: restarting a fleet because its database restarts makes one outage into two."""
    away = Known(
        reaper=replace(REAPER, age=timedelta(minutes=5), failures=40, database_away=True),
        ready=replace(READY, database_age=timedelta(minutes=5)),
    )
    async with pages(away) as client:
        assert (await read(client, "/healthz"))[0] == 200
        status, body = await read(client, "/readyz")
    assert status == 503
    assert json.loads(body) == {"ready": False, "reasons": ["the database was last reached 300 s ago"]}


async def test_a_working_node_is_ready() -> None:
    """A database reached as long ago as the bound allows is still a database reached."""
    async with pages(Known(ready=replace(READY, database_age=MAX_DATABASE_AGE))) as client:
        assert await read(client, "/readyz") == (200, '{"ready": true, "reasons": []}')


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        (replace(READY, database_age=None), "the database has not been reached yet"),
        (replace(READY, draining=True), "this node is draining"),
    ],
)
async def test_readiness_is_red_with_the_reason(ready: Readiness, reason: str) -> None:
    """A roll-out that waits for readiness must wait, and its log must say for what."""
    async with pages(Known(ready=ready)) as client:
        status, body = await read(client, "/readyz")
    assert status == 503
    assert json.loads(body)["reasons"] == [reason]


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/jobs"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_nothing_over_http_changes_anything(method: str, path: str) -> None:
    """B105: what has no authentication may only be read, on any path."""
    probe = Known()
    async with pages(probe) as client, client.request(method, path) as answer:
        assert answer.status == 405
        assert set(answer.headers["Allow"].split(",")) == {"GET", "HEAD"}
    assert probe.asked == []


async def test_head_is_answered_like_get_without_a_body() -> None:
    """Load balancers probe with HEAD."""
    async with pages(Known()) as client:
        for path in ("/metrics", "/healthz", "/readyz"):
            async with client.head(path) as answer:
                assert (answer.status, await answer.text()) == (200, "")


async def test_other_pages_do_not_exist() -> None:
    """There is no dashboard to find."""
    async with pages(Known()) as client:
        assert (await read(client, "/"))[0] == 404


async def test_a_taken_port_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two daemons on one machine are the first thing that people try; a port that is left within seconds is waited for."""
    monkeypatch.setattr(health, "ADDRESS_SECONDS", 0.3)
    registry, probe = CollectorRegistry(), Known()
    async with serve(host="127.0.0.1", port=0, registry=registry, probe=probe) as (host, port):
        with pytest.raises(AddressInUse, match=rf"{host}:{port} .*http\.port \(ROTA_HTTP_PORT\) to a free port, 0"):
            async with serve(host=host, port=port, registry=registry, probe=probe):
                pass


async def test_the_port_is_free_again_once_left() -> None:
    """A daemon restarted at once must find its port, even if a scraper still holds its connection."""
    registry, probe = CollectorRegistry(), Known()
    async with ClientSession() as client:
        async with serve(host="127.0.0.1", port=0, registry=registry, probe=probe) as (host, port):
            await read(client, f"http://{host}:{port}/healthz")
        async with serve(host=host, port=port, registry=registry, probe=probe) as again:
            assert again == (host, port)


async def test_slow_and_idle_clients_leave_room_for_a_scrape() -> None:
    """Any local user may open connections: they must use up neither the descriptors nor the scraper's turn."""
    async with pages(Known()) as client:
        assert client._base_url is not None
        address = ("127.0.0.1", client._base_url.port)
        with ExitStack() as stack:
            opened = [
                stack.enter_context(await asyncio.to_thread(socket.create_connection, address))
                for _ in range(MAX_CONNECTIONS * 5)
            ]
            for number, one in enumerate(opened):
                with suppress(ConnectionError):
                    one.sendall(
                        [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"][number % 3]
                    )
            assert (await read(client, "/metrics"))[0] == 200
            opened[0].settimeout(5)
            with suppress(ConnectionResetError):
                assert await asyncio.to_thread(opened[0].recv, 1) == b"", "the oldest connection is closed"


async def test_malformed_requests_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A traceback for each would let any client fill the log."""
    async with pages(Known()) as client:
        assert client._base_url is not None
        for request in (b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
            writer.write(request)
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
            writer.transport.abort()
    assert not caplog.records
