"""The HTTP pages for machines, over real loopback sockets."""

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
class FakeProbe:
    """A probe with fixed values that records which methods were called."""

    reaper: ServiceHealth = REAPER
    ready: Readiness = READY
    calls: list[str] = field(default_factory=list)

    def services(self) -> list[ServiceHealth]:
        self.calls.append("services")
        return [self.reaper]

    def readiness(self) -> Readiness:
        self.calls.append("readiness")
        return self.ready

    def socket_lost(self) -> None:
        self.calls.append("socket_lost")


@asynccontextmanager
async def serve_pages(probe: FakeProbe, registry: CollectorRegistry | None = None) -> AsyncIterator[ClientSession]:
    async with (
        serve(host="127.0.0.1", port=0, registry=registry or CollectorRegistry(), probe=probe) as (host, port),
        ClientSession(f"http://{host}:{port}") as client,
    ):
        yield client


async def get_page(client: ClientSession, path: str) -> tuple[int, str]:
    async with client.get(path) as answer:
        return answer.status, await answer.text()


async def test_metrics_show_the_given_registry_in_prometheus_text_format() -> None:
    """Prometheus refuses a wrong content type. Daemons in one process have separate registries."""
    registry = CollectorRegistry()
    Counter("rota_reaped", "Attempts taken back", registry=registry).inc(3)
    async with serve_pages(FakeProbe(), registry) as client, client.get("/metrics") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        assert "rota_reaped_total 3.0" in await answer.text()


async def test_a_scrape_of_metrics_calls_no_probe() -> None:
    """Frequent scrapes must cost the database nothing. Gauges are sampled elsewhere."""
    probe = FakeProbe()
    async with serve_pages(probe) as client:
        assert (await get_page(client, "/metrics"))[0] == 200
    assert probe.calls == []


async def test_liveness_shows_the_age_and_failures_of_each_service() -> None:
    async with serve_pages(FakeProbe(reaper=replace(REAPER, failures=2))) as client:
        status, body = await get_page(client, "/healthz")
    assert status == 200
    assert json.loads(body) == {
        "services": {"reaper": {"well": True, "age_s": 4.0, "failures": 2, "database_away": False}}
    }


async def test_a_service_that_stopped_succeeding_fails_liveness() -> None:
    """The supervisor then restarts the daemon."""
    async with serve_pages(FakeProbe(reaper=replace(REAPER, age=timedelta(seconds=31), failures=6))) as client:
        assert (await get_page(client, "/healthz"))[0] == 503


async def test_an_unreachable_database_fails_readiness_but_not_liveness() -> None:
    """Restarting all daemons would make the outage longer."""
    unreachable = FakeProbe(
        reaper=replace(REAPER, age=timedelta(minutes=5), failures=40, database_away=True),
        ready=replace(READY, database_age=timedelta(minutes=5)),
    )
    async with serve_pages(unreachable) as client:
        assert (await get_page(client, "/healthz"))[0] == 200
        status, body = await get_page(client, "/readyz")
    assert status == 503
    assert json.loads(body) == {"ready": False, "reasons": ["the database was last reached 300 s ago"]}


async def test_a_node_is_ready_up_to_the_maximum_database_age() -> None:
    async with serve_pages(FakeProbe(ready=replace(READY, database_age=MAX_DATABASE_AGE))) as client:
        assert await get_page(client, "/readyz") == (200, '{"ready": true, "reasons": []}')


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        (replace(READY, database_age=None), "the database has not been reached yet"),
        (replace(READY, draining=True), "this node is draining"),
    ],
)
async def test_a_failed_readiness_check_names_the_reason(ready: Readiness, reason: str) -> None:
    async with serve_pages(FakeProbe(ready=ready)) as client:
        status, body = await get_page(client, "/readyz")
    assert status == 503
    assert json.loads(body)["reasons"] == [reason]


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/readyz", "/jobs"])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_http_accepts_only_get_and_head(method: str, path: str) -> None:
    """The pages have no authentication, so they must be read-only."""
    probe = FakeProbe()
    async with serve_pages(probe) as client, client.request(method, path) as answer:
        assert answer.status == 405
        assert set(answer.headers["Allow"].split(",")) == {"GET", "HEAD"}
    assert probe.calls == []


async def test_head_is_answered_like_get_without_a_body() -> None:
    """Load balancers probe with HEAD."""
    async with serve_pages(FakeProbe()) as client:
        for path in ("/metrics", "/healthz", "/readyz"):
            async with client.head(path) as answer:
                assert (answer.status, await answer.text()) == (200, "")


async def test_unknown_paths_return_404() -> None:
    """There is no dashboard."""
    async with serve_pages(FakeProbe()) as client:
        assert (await get_page(client, "/"))[0] == 404


async def test_the_error_for_a_taken_port_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon first waits, because the previous owner may release the port within seconds."""
    monkeypatch.setattr(health, "ADDRESS_SECONDS", 0.3)
    registry, probe = CollectorRegistry(), FakeProbe()
    async with serve(host="127.0.0.1", port=0, registry=registry, probe=probe) as (host, port):
        with pytest.raises(AddressInUse, match=rf"{host}:{port} .*http\.port \(ROTA_HTTP_PORT\) to a free port, 0"):
            async with serve(host=host, port=port, registry=registry, probe=probe):
                pass


async def test_the_port_is_free_as_soon_as_the_server_stops() -> None:
    """Holds even if a scraper keeps its connection open."""
    registry, probe = CollectorRegistry(), FakeProbe()
    async with ClientSession() as client:
        async with serve(host="127.0.0.1", port=0, registry=registry, probe=probe) as (host, port):
            await get_page(client, f"http://{host}:{port}/healthz")
        async with serve(host=host, port=port, registry=registry, probe=probe) as again:
            assert again == (host, port)


async def test_slow_and_idle_clients_do_not_block_a_scrape() -> None:
    """Any local user can open connections."""
    async with serve_pages(FakeProbe()) as client:
        assert client._base_url is not None
        address = ("127.0.0.1", client._base_url.port)
        with ExitStack() as stack:
            opened = [
                stack.enter_context(await asyncio.to_thread(socket.create_connection, address))
                for _ in range(MAX_CONNECTIONS * 5)
            ]
            for number, connection in enumerate(opened):
                with suppress(ConnectionError):
                    connection.sendall(
                        [b"", b"GET /metrics HTTP/1.1\r\nX: ", b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"][number % 3]
                    )
            assert (await get_page(client, "/metrics"))[0] == 200
            opened[0].settimeout(5)
            with suppress(ConnectionResetError):
                assert await asyncio.to_thread(opened[0].recv, 1) == b"", "the oldest connection is closed"


async def test_malformed_requests_are_refused_without_a_log_record(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise any client could fill the log."""
    async with serve_pages(FakeProbe()) as client:
        assert client._base_url is not None
        for request in (b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client._base_url.port)
            writer.write(request)
            assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
            writer.transport.abort()
    assert not caplog.records
