"""The handlers that need no code: http, command and sql, each off until the configuration turns it on."""

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
    """A server that keeps what it is sent, and answers what it is told to."""

    def __init__(self) -> None:
        self.url = ""
        self.events_named: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answers: list[web.Response] = []
        self.raw: list[list[str]] = []
        """The names of the headers as they were sent, of each request."""

    async def take(self, request: web.Request) -> web.Response:
        """Keep it."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.raw.append([name.decode() for name, _ in request.raw_headers])
        self.events_named.append((request.method, request.path_qs, headers, await request.read()))
        return self.answers.pop(0) if self.answers else web.Response(text="thanks")


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    """Serve on the loopback."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", receiver.take)
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


async def test_all_are_off_until_they_are_configured(database: Database, conn: Connection[Record]) -> None:
    """Whoever may insert a job would otherwise send requests and run commands from our machines."""
    async with run_node(database.dsn, rota.App("a")):
        assert not await conn.fetchval("select count(*) from rota.handlers where handler ~ '^(http|command|sql)'")


async def test_a_request_says_which_job_it_is_and_is_signed(database: Database, conn: Connection[Record]) -> None:
    """A receiver can tell a repetition, an overtaken attempt, and a forgery."""
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
    ((method, path, headers, body),) = receiver.events_named
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
async def test_what_an_answer_means(
    status: int, headers: dict[str, str], kind: str, database: Database, conn: Connection[Record]
) -> None:
    """Some will never do; the rest is tried again, when the server says, and nobody is followed elsewhere."""
    async with receiving() as receiver:
        receiver.answers = [web.Response(status=status, headers=headers)]
        endpoints = {"shop": {"url": receiver.url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}) as node:
            job_id = await insert_job(conn, "http.shop", "{}")
            if kind.startswith("dead"):
                assert await final_outcome(conn, job_id) == kind
            else:
                told = await node.wait_for_event("job.settled", job_id=job_id, settlement="retried", kind=kind)
                if kind == "Retry":
                    assert told["due_in_s"] == 3600
                assert f"answered with status {status}" in (await failed_attempts(conn, job_id))[0]["error"]
    assert len(receiver.events_named) == 1


@pytest.mark.parametrize(
    "body", [b"\xff" * 3000, b"\x00" * 3000, b"\x01\x1b" * 1500, b'"\\' * 1500, "\u00e9".encode() * 1500]
)
async def test_b91_whatever_bytes_a_server_answers_they_are_the_result_with_its_status(
    body: bytes, database: Database, conn: Connection[Record]
) -> None:
    """B91: stored escaped. Escaping makes them longer, and a result that is too long would be none."""
    async with receiving() as receiver:
        receiver.answers = [web.Response(body=body)]
        endpoints = {"shop": {"url": receiver.url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", "{}")
            assert await final_outcome(conn, job_id) == "succeeded"
    result = await _result(conn, job_id)
    assert result["status"] == 200
    assert len(result["body"]) >= 500


async def _raw_response(*pieces: bytes, stays_open: bool = False) -> tuple[asyncio.Server, str]:
    """Serve one response in pieces, each sent alone, on the loopback; `stays_open` never ends the body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            for _ in range(20):  # the client's turn: it runs on this loop, too
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
        (b"Content-Length: 9\r\n", [b"one", b"two"], False, "onetwo"),  # the connection breaks off
        (b"Content-Length: 9\r\n", [b"one"], True, "one"),  # the rest never arrives
    ],
    ids=["pieces", "chunked", "bounded", "broken-off", "slow"],
)
async def test_f19_the_excerpt_of_a_response_spans_the_pieces_in_which_it_arrives(
    head: bytes,
    pieces: list[bytes],
    stays_open: bool,
    expected: str,
    database: Database,
    conn: Connection[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F19: not only the first piece is kept, and neither a slow nor a broken body makes a second request."""
    if expected == "one":
        monkeypatch.setattr("rota.builtin.http.EXCERPT_SECONDS", 0.2)
    server, url = await _raw_response(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n", *pieces, stays_open=stays_open)
    async with server:
        endpoints = {"shop": {"url": url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", "{}")
            assert await final_outcome(conn, job_id) == "succeeded"
    assert await _result(conn, job_id) == {"status": 200, "body": expected}


async def test_b103_a_payload_cannot_say_a_second_time_what_rota_says_of_the_job(
    database: Database, conn: Connection[Record]
) -> None:
    """The kind of B103 and B105: a receiver that takes the first of two fence tokens would take the one of whoever inserts."""
    async with receiving() as receiver:
        endpoint = {"url": receiver.url, "private": True, "headers": {"X-Key": "ours"}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": {"shop": endpoint}}):
            theirs = {
                "rota-FENCE-token": "1",
                "IDEMPOTENCY-KEY": "theirs",
                "rota-attempt": "9",
                "rota-scheduled-for": "theirs",
                "x-key": "theirs",
                "content-type": "text/plain",
                "Content-TYPE": "text/html",
            }
            job_id = await insert_job(conn, "http.shop", json.dumps({"headers": theirs, "json": 1}))
            assert await final_outcome(conn, job_id) == "succeeded"
    names = [name.lower() for name in receiver.raw[0]]
    assert len(names) == len(set(names))
    ((_, _, headers, _),) = receiver.events_named
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
async def test_b91_what_can_be_no_header_is_a_dead_letter_at_once_and_nothing_is_sent(
    payload: dict[str, Any], columns: dict[str, Any], database: Database, conn: Connection[Record]
) -> None:
    """No attempt will ever send it: twenty of them would only hide it for hours."""
    async with receiving() as receiver:
        endpoints = {"shop": {"url": receiver.url, "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", json.dumps(payload), **columns)
            assert await final_outcome(conn, job_id) == "dead: permanent"
    assert receiver.events_named == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "2130706433"])
async def test_a_private_address_gets_no_connection_whatever_it_is_called(
    host: str, database: Database, conn: Connection[Record]
) -> None:
    """Cloud metadata, the database, our own metrics: what a daemon reaches is not what a client may reach."""
    async with receiving() as receiver:
        port = receiver.url.rpartition(":")[2]
        async with run_node(database.dsn, rota.App("a"), handlers__http={"any_url": True}):
            job_id = await insert_job(
                conn, "http", json.dumps({"url": f"http://{host}:{port}/", "method": "GET"}), max_attempts=1
            )
            assert await final_outcome(conn, job_id) == "dead: permanent"
            error = (await dead_letter(conn, job_id))["error"]
            assert "not public" in error or "can't be used" in error
    assert not receiver.events_named


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
def test_which_addresses_are_public(address: str, public: bool) -> None:
    """Also where an IPv6 address carries an IPv4 one in it."""
    assert is_public(address) is public


@pytest.mark.parametrize(
    "path",
    [
        *("/x", "//evil.example/", "http://evil.example/", "../x", "a/../../x", "\\x"),
        *("%2e%2e/x", ".%2E/x", "a/%2e%2e/%2e%2e/x", "..%2fx", "%2e%2e%2Fx", "..%5cx"),
    ],
)
async def test_a_path_does_not_lead_out_of_the_endpoint(
    path: str, database: Database, conn: Connection[Record]
) -> None:
    """An endpoint's credentials go to that endpoint."""
    async with receiving() as receiver:
        endpoints = {"shop": {"url": f"{receiver.url}/hook", "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", json.dumps({"path": path}), max_attempts=1)
            assert (await final_outcome(conn, job_id)).startswith("dead: ")
    assert not receiver.events_named


@pytest.mark.parametrize("path", ["a%2Fb", "http%3A%2F%2Fx", "%2Fx", "a/../b", "é ü", "?up=../../x", "%252e%252e/x"])
async def test_what_is_escaped_in_a_path_stays_escaped(path: str, database: Database, conn: Connection[Record]) -> None:
    """A number with a slash in it, or a whole URL, is one step of a path."""
    async with receiving() as receiver:
        endpoints = {"shop": {"url": f"{receiver.url}/hook", "private": True}}
        async with run_node(database.dsn, rota.App("a"), handlers__http={"endpoints": endpoints}):
            job_id = await insert_job(conn, "http.shop", json.dumps({"path": path}), max_attempts=1)
            assert await final_outcome(conn, job_id) == "succeeded"


def _python(code: str, **others: Any) -> dict[str, Any]:
    return {"x": {"argv": [sys.executable, "-c", code], **others}}


async def test_a_command_reads_the_payload_and_its_output_is_the_result(
    database: Database, conn: Connection[Record]
) -> None:
    """Through no shell, with nothing of our environment but what it is given."""
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
async def test_how_a_command_ends_says_what_becomes_of_its_job(
    code: str, how: str, text: str, database: Database, conn: Connection[Record]
) -> None:
    """B91: and no bytes that it writes can keep the job from being settled."""
    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code, permanent=[3])):
        job_id = await insert_job(conn, "command.x", max_attempts=1)
        assert await final_outcome(conn, job_id) == how
    if text:
        assert text in (await dead_letter(conn, job_id))["error"]


@pytest.mark.parametrize("byte", ["\\xff", "\\x00", "\\x01", "\\x1b", "\\n", '"', "\\\\"])
async def test_b91_whatever_bytes_a_command_writes_the_end_of_them_is_the_result(
    byte: str, database: Database, conn: Connection[Record]
) -> None:
    """B91: stored escaped. Escaping makes them longer, and a result that is too long would be none."""
    code = f"import sys; sys.stdout.buffer.write(b'{byte}' * 9000)"
    async with run_node(database.dsn, rota.App("a"), handlers__command=_python(code)):
        job_id = await insert_job(conn, "command.x")
        assert await final_outcome(conn, job_id) == "succeeded"
    result = await _result(conn, job_id)
    assert result["exit_code"] == 0
    assert len(result["output"]) >= 1000


async def test_a_command_that_is_not_there_fails_like_any_other(database: Database, conn: Connection[Record]) -> None:
    """The name in the error is what to look for."""
    async with run_node(database.dsn, rota.App("a"), handlers__command={"x": {"argv": ["/no/such/thing"]}}):
        job_id = await insert_job(conn, "command.x", max_attempts=1)
        assert await final_outcome(conn, job_id) == "dead: exhausted"
    assert "/no/such/thing" in (await dead_letter(conn, job_id))["error"]


async def test_a_command_is_ended_with_all_its_children(
    database: Database, conn: Connection[Record], tmp_path: Path
) -> None:
    """TERM, a grace, KILL, to the whole group: a next attempt must not run beside what the last one left."""
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
            await _gone(pid)
        assert not node.events_named("handler.stuck")


async def _gone(pid: int) -> None:
    await eventually(lambda: not _alive(pid), what="the end of the command")


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:  # noqa: PTH123
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def _low(conn: Connection[Record], database: Database) -> str:
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


async def test_a_statement_commits_together_with_its_job_as_a_low_role(
    database: Database, conn: Connection[Record]
) -> None:
    """Effect and completion are one; and it can do what its login can, not what the daemon's can."""
    url = await _low(conn, database)
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


async def test_a_statement_is_cancelled_on_the_server(database: Database, conn: Connection[Record]) -> None:
    """A statement that goes on after its job has ended holds its locks."""
    url = await _low(conn, database)
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


async def test_a_killed_daemons_command_does_not_outlive_it() -> None:
    """B: an orphan would work beside the next attempt, elsewhere. The kernel ends it with its parent."""
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
    await _gone(pid)
