"""The built-in http handler, and that no built-in handler exists unless it is configured."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

import rota
from in_process_daemons import dead_letter, failed_attempts, final_outcome, insert_job, run_node
from rota.builtin.http import is_public

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection, Record

    from servers import Database

SECRET = "whsec_" + base64.b64encode(b"0123456789abcdef").decode()


class Receiver:
    """An HTTP server that records its requests and sends the responses in `responses`, then 200."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.responses: list[web.Response] = []
        self.header_names: list[list[str]] = []
        """Header names of each request, in their original case."""

    async def record_request(self, request: web.Request) -> web.Response:
        """Record the request and return the next response."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.header_names.append([name.decode() for name, _ in request.raw_headers])
        self.requests.append((request.method, request.path_qs, headers, await request.read()))
        return self.responses.pop(0) if self.responses else web.Response(text="thanks")


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Run a Receiver on the loopback address."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.record_request)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


async def _result(conn: Connection[Record], job_id: int) -> Any:
    return json.loads(await conn.fetchval("select result from rota.job_runs where job_id = $1", job_id))


async def test_without_configuration_no_built_in_handler_is_registered(
    database: Database, conn: Connection[Record]
) -> None:
    """Otherwise every client that may insert jobs could send requests and run commands from our machines."""
    async with run_node(database.dsn, rota.App("a")):
        assert not await conn.fetchval("select count(*) from rota.handlers where handler ~ '^(http|command|sql)'")


async def test_a_request_identifies_its_job_and_is_signed(database: Database, conn: Connection[Record]) -> None:
    """The receiver can detect a repeated request, an outdated attempt and a forgery."""
    async with receiving() as receiver:
        endpoint = {
            "url": f"{receiver.url}/hook",
            "private": True,
            "secret": SECRET,
            "headers": {"Authorization": "Bearer ours"},
        }
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": {"shop": endpoint}}):
            payload = {
                "path": "orders?x=1",
                "json": {"order": 7, "text": "\u00e9"},
                "headers": {"authorization": "theirs", "webhook-id": "theirs", "X-Own": "1"},
            }
            job_id = await insert_job(conn, "http.shop", json.dumps(payload))
            assert await final_outcome(conn, job_id) == "succeeded"
    ((method, path, headers, body),) = receiver.requests
    assert (method, path) == ("POST", "/hook/orders?x=1")
    assert json.loads(body) == payload["json"]
    assert (headers["authorization"], headers["x-own"]) == ("Bearer ours", "1")

    ledger = await conn.fetchrow("select * from rota.job_runs where job_id = $1", job_id)
    assert ledger is not None
    assert headers["rota-fence-token"] == str(ledger["fence_token"])
    assert headers["rota-attempt"] == "1"
    assert headers["rota-scheduled-for"] == ledger["scheduled_for"].strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    assert f":job:{job_id}:{headers['rota-scheduled-for']}:" in headers["idempotency-key"]

    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.new(b"0123456789abcdef", signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    assert await _result(conn, job_id) == {"status": 200, "body": "thanks"}


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (410, {}, "dead: permanent"),
        (422, {}, "dead: permanent"),
        (302, {"Location": "/elsewhere"}, "Unsuccessful"),
        (500, {}, "Unsuccessful"),
        (429, {"Retry-After": "3600"}, "Retry"),
        (503, {"Retry-After": "Wed, 21 Oct 2026 08:00:00 GMT", "Date": "Wed, 21 Oct 2026 07:00:00 GMT"}, "Retry"),
    ],
)
async def test_the_response_status_decides_between_dead_letter_and_retry(
    status: int, headers: dict[str, str], kind: str, database: Database, conn: Connection[Record]
) -> None:
    """Retry-After sets the delay, and redirects are not followed."""
    async with receiving() as receiver:
        receiver.responses = [web.Response(status=status, headers=headers)]
        endpoints = {"shop": {"url": receiver.url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}) as node:
            job_id = await insert_job(conn, "http.shop", "{}")
            if kind.startswith("dead"):
                assert await final_outcome(conn, job_id) == kind
            else:
                event = await node.wait_for_event("job.settled", job_id=job_id, settlement="retried", kind=kind)
                if kind == "Retry":
                    assert event["due_in_s"] == 3600
                assert f"answered with status {status}" in (await failed_attempts(conn, job_id))[0]["error"]

    assert len(receiver.requests) == 1


@pytest.mark.parametrize(
    "body", [b"\xff" * 3000, b"\x00" * 3000, b"\x01\x1b" * 1500, b'"\\' * 1500, "\u00e9".encode() * 1500]
)
async def test_b91_a_response_body_of_any_bytes_is_stored_in_the_result(
    body: bytes, database: Database, conn: Connection[Record]
) -> None:
    """The body is stored escaped and shortened, because escaping could make it longer than a result may be."""
    async with receiving() as receiver:
        receiver.responses = [web.Response(body=body)]
        endpoints = {"shop": {"url": receiver.url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", "{}")
            assert await final_outcome(conn, job_id) == "succeeded"
    result = await _result(conn, job_id)

    assert result["status"] == 200
    assert len(result["body"]) >= 500


async def _raw_response(*pieces: bytes, stays_open: bool = False) -> tuple[asyncio.Server, str]:
    """Serve one response on the loopback address, piece by piece; with `stays_open` the body never ends."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            for _ in range(20):  # let the client read this piece: it runs on the same loop
                await asyncio.sleep(0)
        if stays_open:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("head", "pieces", "stays_open", "expected"),
    [
        (b"Content-Length: 9\r\n", [b"one", b"two", b"six"], False, "onetwosix"),
        (b"Transfer-Encoding: chunked\r\n", [b"3\r\none\r\n", b"3\r\ntwo\r\n", b"0\r\n\r\n"], False, "onetwo"),
        (b"Content-Length: 5000\r\n", [b"x" * 1500] * 2, True, "x" * 2000),
        (b"Content-Length: 9\r\n", [b"one", b"two"], False, "onetwo"),  # the server closes the connection too early
        (b"Content-Length: 9\r\n", [b"one"], True, "one"),  # the remaining bytes never arrive
    ],
    ids=["pieces", "chunked", "bounded", "broken-off", "slow"],
)
async def test_f19_the_stored_excerpt_contains_all_pieces_of_the_response(
    head: bytes,
    pieces: list[bytes],
    stays_open: bool,
    expected: str,
    database: Database,
    conn: Connection[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A slow or incomplete body does not cause a second request."""
    if expected == "one":
        monkeypatch.setattr("rota.builtin.http.EXCERPT_SECONDS", 0.2)
    server, url = await _raw_response(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n", *pieces, stays_open=stays_open)

    async with server:
        endpoints = {"shop": {"url": url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", "{}")
            assert await final_outcome(conn, job_id) == "succeeded"

    assert await _result(conn, job_id) == {"status": 200, "body": expected}


async def test_b103_a_payload_cannot_repeat_the_headers_that_rota_sets(
    database: Database, conn: Connection[Record]
) -> None:
    """A receiver that reads the first of two fence tokens would trust the one of the client."""
    async with receiving() as receiver:
        endpoint = {"url": receiver.url, "private": True, "headers": {"X-Key": "ours"}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": {"shop": endpoint}}):
            client_headers = {
                "rota-FENCE-token": "1",
                "IDEMPOTENCY-KEY": "theirs",
                "rota-attempt": "9",
                "rota-scheduled-for": "theirs",
                "x-key": "theirs",
                "content-type": "text/plain",
                "Content-TYPE": "text/html",
            }
            job_id = await insert_job(conn, "http.shop", json.dumps({"headers": client_headers, "json": 1}))
            assert await final_outcome(conn, job_id) == "succeeded"
    names = [name.lower() for name in receiver.header_names[0]]
    assert len(names) == len(set(names))

    ((_, _, headers, _),) = receiver.requests
    assert headers["x-key"] == "ours"
    assert headers["rota-attempt"] == "1"
    assert headers["rota-fence-token"] not in {"1", ""}
    assert headers["idempotency-key"].startswith("rota:")


@pytest.mark.parametrize(
    ("payload", "columns"),
    [
        ({"headers": {"X-Own": "a\r\nX-Admin: 1"}}, {}),
        ({"headers": {"X\nOwn": "1"}}, {}),
        ({"headers": {"": "1"}}, {}),
        ({}, {"idempotency_key": "E'a\\nX-Admin: 1'"}),
    ],
)
async def test_b91_an_invalid_header_makes_a_dead_letter_at_once_and_sends_nothing(
    payload: dict[str, Any], columns: dict[str, Any], database: Database, conn: Connection[Record]
) -> None:
    """No retry could ever send it."""
    async with receiving() as receiver:
        endpoints = {"shop": {"url": receiver.url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", json.dumps(payload), **columns)
            assert await final_outcome(conn, job_id) == "dead: permanent"
    assert receiver.requests == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433"])
async def test_a_request_to_a_private_address_is_rejected_in_every_notation(
    host: str, database: Database, conn: Connection[Record]
) -> None:
    """The daemon can reach cloud metadata, the database and its own metrics; clients must not."""
    async with receiving() as receiver:
        port = receiver.url.rpartition(":")[2]
        async with run_node(database.dsn, rota.App("a"), handlers__http={"any_url": True}):
            job_id = await insert_job(
                conn, "http", json.dumps({"url": f"http://{host}:{port}/", "method": "GET"}), max_attempts=1
            )
            assert await final_outcome(conn, job_id) == "dead: permanent"
            error = (await dead_letter(conn, job_id))["error"]
            assert "not public" in error or "can't be used" in error

    assert not receiver.requests


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("10.0.0.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:10.0.0.1", False),
        ("2002:a00:1::", False),
        ("64:ff9b::a00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("224.0.0.1", False),
        ("0.0.0.0", False),
        ("::", False),
        ("fec0::1", False),
        ("192.0.0.192", False),
        ("168.63.129.16", False),
        ("::ffff:168.63.129.16", False),
        ("64:ff9b::a83f:8110", False),
        ("168.63.129.17", True),
        ("161.26.0.10", False),
        ("166.9.14.1", False),
        ("199.36.153.8", False),
        ("100.100.100.200", False),
        ("198.19.255.255", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("239.255.255.255", False),
        ("0.255.0.1", False),
        ("127.0.0.1", False),
        ("172.31.0.1", False),
        ("192.88.99.1", False),
        ("203.0.113.1", False),
        ("fd00:ec2::254", False),
        ("::1", False),
        ("::a00:1", False),
        ("::ffff:0:a00:1", False),
        ("64:ff9b:1::a00:1", False),
        ("100::1", False),
        ("2001:0:5db8:d822::1", False),
        ("2001:2::1", False),
        ("2001:db8::1", False),
        ("2002:5db8:d822::1", False),
        ("3fff::1", False),
        ("5f00::1", False),
        ("ff02::1", False),
        ("2001:4860:4860::8888", True),
    ],
)
def test_only_public_addresses_count_as_public(address: str, public: bool) -> None:
    """This includes IPv6 addresses that embed an IPv4 address."""
    assert is_public(address) is public


@pytest.mark.parametrize(
    "path",
    [
        *("/x", "//evil.example/", "http://evil.example/", "../x", "a/../../x", "\\x"),
        *("%2e%2e/x", ".%2E/x", "a/%2e%2e/%2e%2e/x", "..%2fx", "%2e%2e%2Fx", "..%5cx"),
    ],
)
async def test_a_path_cannot_leave_the_endpoint(path: str, database: Database, conn: Connection[Record]) -> None:
    """The endpoint's credentials must not be sent elsewhere."""
    async with receiving() as receiver:
        endpoints = {"shop": {"url": f"{receiver.url}/hook", "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", json.dumps({"path": path}), max_attempts=1)
            assert (await final_outcome(conn, job_id)).startswith("dead: ")
    assert not receiver.requests


@pytest.mark.parametrize("path", ["a%2Fb", "http%3A%2F%2Fx", "%2Fx", "a/../b", "é ü", "?up=../../x", "%252e%252e/x"])
async def test_escaped_characters_in_a_path_stay_escaped(
    path: str, database: Database, conn: Connection[Record]
) -> None:
    """An escaped slash or URL is part of a single path segment."""
    async with receiving() as receiver:
        endpoints = {"shop": {"url": f"{receiver.url}/hook", "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", json.dumps({"path": path}), max_attempts=1)
            assert await final_outcome(conn, job_id) == "succeeded"
