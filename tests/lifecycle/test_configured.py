"""The built-in handlers http, command and sql, which exist only if they are configured."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

import rota
from in_process_daemons import dead_letter, failed_attempts, final_outcome, insert_job, run_node, wait_for_claim
from rota.builtin.http import is_public
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

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


def _python(code: str, **others: Any) -> dict[str, Any]:
    return {"x": {"argv": [sys.executable, "-c", code], **others}}


async def test_a_command_reads_the_payload_from_stdin_and_its_output_is_the_result(
    database: Database, conn: Connection[Record]
) -> None:
    """It runs without a shell, and only the configured variables of the environment reach it."""
    code = (
        "import sys, os, json; print(json.dumps([json.load(sys.stdin), os.environ['OWN'], os.environ['ROTA_ATTEMPT'], "
        "'DATABASE_URL' in os.environ]))"
    )
    os.environ["DATABASE_URL"] = "postgresql://secret"
    try:
        async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code, env={"OWN": "1"})):
            job_id = await insert_job(conn, "command.x", '{"a": "$(id); `id`"}')
            assert await final_outcome(conn, job_id) == "succeeded"
    finally:
        del os.environ["DATABASE_URL"]
    result = await _result(conn, job_id)
    assert result["exit_code"] == 0
    assert json.loads(result["output"]) == [{"a": "$(id); `id`"}, "1", "1", False]


@pytest.mark.parametrize(
    ("code", "how", "text"),
    [
        ("import sys; sys.stderr.write('because'); sys.exit(3)", "dead: permanent", "exit code 3: because"),
        ("import sys; sys.exit(75)", "dead: exhausted", "exit code 75"),
        ("import os; os.kill(os.getpid(), 9)", "dead: exhausted", "ended with signal SIGKILL"),
        ("import os; os.kill(os.getpid(), 35)", "dead: exhausted", "ended with signal 35"),
        ("import sys; sys.stdout.buffer.write(bytes(range(256)) * 100)", "succeeded", ""),
    ],
)
async def test_the_exit_code_or_signal_of_a_command_decides_the_outcome_of_its_job(
    code: str, how: str, text: str, database: Database, conn: Connection[Record]
) -> None:
    """B91: output of any bytes does not prevent the settlement."""
    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code, permanent=[3])):
        job_id = await insert_job(conn, "command.x", max_attempts=1)
        assert await final_outcome(conn, job_id) == how
    if text:
        assert text in (await dead_letter(conn, job_id))["error"]


@pytest.mark.parametrize("byte", ["\\xff", "\\x00", "\\x01", "\\x1b", "\\n", '"', "\\\\"])
async def test_b91_the_end_of_a_commands_output_is_stored_whatever_its_bytes(
    byte: str, database: Database, conn: Connection[Record]
) -> None:
    """The output is stored escaped and shortened, because escaping could make it longer than a result may be."""
    code = f"import sys; sys.stdout.buffer.write(b'{byte}' * 9000)"
    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code)):
        job_id = await insert_job(conn, "command.x")
        assert await final_outcome(conn, job_id) == "succeeded"
    result = await _result(conn, job_id)
    assert result["exit_code"] == 0
    assert len(result["output"]) >= 1000


async def test_a_missing_program_fails_the_attempt_and_is_named_in_the_error(
    database: Database, conn: Connection[Record]
) -> None:
    async with run_node(database.dsn, rota.App("a"), handlers__command={"x": {"argv": ["/no/such/thing"]}}):
        job_id = await insert_job(conn, "command.x", max_attempts=1)
        assert await final_outcome(conn, job_id) == "dead: exhausted"
    assert "/no/such/thing" in (await dead_letter(conn, job_id))["error"]


async def test_a_cancelled_command_is_ended_with_all_its_children(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """The process group gets SIGTERM, then SIGKILL after the grace, so that nothing runs beside the next attempt."""
    pids = tmp_path / "pids"
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen(['sleep', '600'])\n"
        f"open({str(pids)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(pids)!r} + '.new', {str(pids)!r})\n"
        "time.sleep(600)\n"
    )

    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code, grace="200ms")) as node:
        job_id = await insert_job(conn, "command.x")
        await eventually(pids.exists, what="the command's children")
        await conn.execute("select rota.cancel($1)", job_id)
        assert await final_outcome(conn, job_id) == "cancelled"
        for pid in map(int, pids.read_text(encoding="ascii").split()):
            await _wait_for_end_of(pid)
        assert not node.events_named("handler.stuck")


async def _wait_for_end_of(pid: int) -> None:
    await eventually(lambda: not _is_alive(pid), what="the end of the command")


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _create_restricted_role(conn: Connection[Record], database: Database) -> str:
    await conn.execute(
        f"""
        drop role if exists low_{database.name};
        create role low_{database.name} login;
        create table effects (n int);
        grant insert on effects to low_{database.name};
        grant usage on schema rota to low_{database.name};
        grant execute on function rota.complete to low_{database.name};
        """
    )
    return database.dsn.replace("//postgres@", f"//low_{database.name}@")


async def test_a_statement_commits_together_with_its_job_and_with_the_rights_of_its_own_login(
    database: Database, conn: Connection[Record]
) -> None:
    """It cannot use the rights of the daemon's login."""
    url = await _create_restricted_role(conn, database)
    statements = {
        "add": {"statement": "insert into effects select ($1::jsonb ->> 'n')::int", "url": url},
        "peek": {"statement": "select count(*) from rota.jobs", "url": url},
        "analyze": {"statement": "analyze", "url": url, "transaction": False},
    }
    try:
        async with run_node(database.dsn, rota.App("a"), handlers__sql=statements):
            good = await insert_job(conn, "sql.add", '{"n": 7}')
            bad = await insert_job(conn, "sql.add", '{"n": "S3CRET"}')
            peek = await insert_job(conn, "sql.peek", max_attempts=1)
            analyze = await insert_job(conn, "sql.analyze")
            assert await final_outcome(conn, good) == "succeeded"
            assert await final_outcome(conn, bad) == "dead: permanent"
            assert await final_outcome(conn, peek) == "dead: exhausted"
            assert await final_outcome(conn, analyze) == "succeeded"
        assert await conn.fetchval("select n from effects") == 7
        assert await _result(conn, good) == {"status": "INSERT 0 1"}
        assert "S3CRET" not in (await dead_letter(conn, bad))["error"]
        assert "permission denied" in (await dead_letter(conn, peek))["error"]
        assert not await failed_attempts(conn, good)
    finally:
        await conn.execute(f"drop owned by low_{database.name}; drop role low_{database.name}")


async def test_a_cancelled_statement_is_cancelled_on_the_server_too(
    database: Database, conn: Connection[Record]
) -> None:
    """Otherwise it would keep its locks after the job has ended."""
    url = await _create_restricted_role(conn, database)
    try:
        async with run_node(
            database.dsn, rota.App("a"), handlers__sql={"x": {"statement": "select pg_sleep(600)", "url": url}}
        ):
            job_id = await insert_job(conn, "sql.x")
            await wait_for_claim(conn, job_id)
            sleeping = (
                "select count(*) = $1 from pg_stat_activity where query like 'select pg_sleep%' and state = 'active'"
            )

            async def sleeps(count: int) -> bool:
                return bool(await conn.fetchval(sleeping, count))

            await eventually(lambda: sleeps(1), what="the statement")
            await conn.execute("select rota.cancel($1)", job_id)
            assert await final_outcome(conn, job_id) == "cancelled"
            await eventually(lambda: sleeps(0), what="the statement's end")
    finally:
        await conn.execute(f"drop owned by low_{database.name}; drop role low_{database.name}")


async def test_a_command_ends_with_its_daemon_when_that_is_killed() -> None:
    """Otherwise the command would run beside the next attempt. The kernel ends it with its parent."""
    if sys.platform != "linux":
        pytest.skip("only Linux can")
    import asyncio

    from rota.builtin.command import _argv

    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import os, sys, subprocess\n"
        "argv = [str(os.getpid()) if part == '@' else part for part in sys.argv[1:]]\n"
        "child = subprocess.Popen(argv)\nprint(child.pid, flush=True)\nchild.wait()",
        *[part if part != str(os.getpid()) else "@" for part in _argv(["sleep", "600"])],
        stdout=asyncio.subprocess.PIPE,
    )
    assert parent.stdout is not None

    pid = int(await parent.stdout.readline())

    def sleeps() -> bool:
        with open(f"/proc/{pid}/comm", encoding="ascii") as comm:  # noqa: PTH123
            return comm.read().strip() == "sleep"

    await eventually(sleeps, what="the command")
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await _wait_for_end_of(pid)
