"""Hostile database sessions, hostile HTTP clients, and a misbehaving web server. All of them use this machine only."""

from __future__ import annotations

import asyncio
import random
import zlib
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import asyncpg

from waiting import pace

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from asyncpg import Connection, Record

    from role_logins import RoleDatabase

SETTINGS = (
    *(
        "datestyle = 'German, DMY'",
        "datestyle = 'SQL, MDY'",
        "intervalstyle = 'sql_standard'",
        "intervalstyle = 'iso_8601'",
    ),
    *(
        "timezone = 'Antarctica/Troll'",
        "timezone = '-167:59:59'",
        "timezone = 'America/New_York'",
        "bytea_output = 'escape'",
    ),
    *(
        "standard_conforming_strings = off",
        "client_encoding = 'LATIN1'",
        "client_encoding = 'SQL_ASCII'",
        "array_nulls = off",
    ),
    *(
        "transform_null_equals = on",
        "extra_float_digits = -15",
        "row_security = off",
        "row_security = on",
        "jit_above_cost = 0",
    ),
    *("default_transaction_isolation = 'serializable'", "default_transaction_isolation = 'repeatable read'"),
    *(
        "quote_all_identifiers = on",
        "plpgsql.extra_errors = 'all'",
        "plpgsql.check_asserts = off",
        "xmloption = 'document'",
    ),
    *(
        "enable_indexscan = off",
        "enable_seqscan = off",
        "plan_cache_mode = 'force_generic_plan'",
        "from_collapse_limit = 1",
    ),
    *("search_path = evil, pg_catalog", "search_path = pg_temp, evil", "search_path = ''", "synchronous_commit = off"),
    *("default_text_search_config = 'simple'", "check_function_bodies = off", "lc_monetary = 'C'", "work_mem = '64kB'"),
)
"""Settings that any login may change for its own session."""

LOCK_MODES = (
    "access share",
    "row share",
    "row exclusive",
    "share",
    "share row exclusive",
    "exclusive",
    "access exclusive",
)
EXPECTED = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, TimeoutError)

CREATE_HOSTILE_FUNCTIONS = """
create schema evil;
create table evil.caught (who text, session text, what text, query text);
grant usage, create on schema evil to public;
grant all on evil.caught to public;
-- As up to PostgreSQL 14, or where an administrator has allowed it.
grant create on schema public to public;
do $do$
declare
    target text;
    each record;
begin
    foreach target in array array['evil', 'public'] loop
        for each in
            select distinct proc.proname, pg_get_function_identity_arguments(proc.oid) as arguments, proc.proretset,
                format_type(proc.prorettype, null) as result
            from pg_proc as proc
            where proc.pronamespace = 'pg_catalog'::regnamespace and proc.prokind = 'f' and proc.pronargs between 0 and 3
              and proc.provariadic = 0 and not proc.proretset and proc.prorettype <> 'trigger'::regtype
              and not exists (select from unnest(proc.proargtypes) as argument join pg_type on pg_type.oid = argument
                              where pg_type.typtype = 'p')
              and (select typtype from pg_type where oid = proc.prorettype) <> 'p'
              and proc.proargmodes is null
              and proc.proname = any ($names)
        loop
            execute format('create function %I.%I(%s) returns %s language plpgsql as $f$ begin '
                'insert into evil.caught values (current_user, session_user, %L, current_query()); return null; end $f$',
                target, each.proname, each.arguments, each.result, target || '.' || each.proname);
        end loop;
        -- Better matches than the polymorphic and variadic functions of pg_catalog.
        for each in
            select * from (values
                ('array_prepend(text, text[])', 'text[]'), ('array_append(text[], text)', 'text[]'),
                ('array_position(text[], text)', 'int4'), ('cardinality(text[])', 'int4'), ('cardinality(int8[])', 'int4'),
                ('unnest(text[])', 'setof text'), ('unnest(int8[])', 'setof int8'), ('format(text, text)', 'text'),
                ('format(text, text, text)', 'text'), ('format(text)', 'text'), ('concat_ws(text, text, text)', 'text'),
                ('greatest(int8, int8)', 'int8'), ('num_nulls(text)', 'int4'), ('to_jsonb(text)', 'jsonb'),
                ('array_length(text[], int4)', 'int4'), ('array_to_string(text[], text)', 'text'),
                ('array_agg(text)', 'text[]'), ('row_to_json(record)', 'json'), ('jsonb_build_object(text, text)', 'jsonb')
            ) as better (signature, result)
        loop
            begin
                execute format('create function %I.%s returns %s language plpgsql as $f$ begin '
                    'insert into evil.caught values (current_user, session_user, %L, current_query()); return; end $f$',
                    target, each.signature, each.result, target || '.' || each.signature);
            exception when others then
                begin
                    execute format('create function %I.%s returns %s language plpgsql as $f$ begin '
                        'insert into evil.caught values (current_user, session_user, %L, current_query()); return null; end $f$',
                        target, each.signature, each.result, target || '.' || each.signature);
                exception when others then null;
                end;
            end;
        end loop;
    end loop;
end $do$;
"""


class Sessions:
    """Hostile sessions of rota_client and of logins without rights."""

    def __init__(self, role_database: RoleDatabase, seed: int, done: Counter[str]) -> None:
        self._world = role_database
        self._dice = random.Random(seed)
        self._done = done
        self._acts: tuple[Callable[[Connection[Record]], Awaitable[None]], ...] = (
            self._advisory,
            self._advisory,
            self._lock,
            self._lock,
            self._lock,
            self._snapshot,
            self._open_inserts,
            self._listen_without_reading,
            self._notify,
            self._terminate,
            self._shadow_names,
            self._cursor,
        )

    async def run(self, over: Callable[[], bool]) -> None:
        """Open one session after another until the time is up."""
        while not over():
            login = self._dice.choice(["stranger", "app"])
            act = self._dice.choice(self._acts)
            with suppress(*EXPECTED):
                async with asyncio.timeout(30), self._world.connect(login) as conn:
                    await conn.execute("set lock_timeout = '3s'; set statement_timeout = '15s'")
                    for setting in self._dice.sample(SETTINGS, self._dice.choice([0, 0, 1, 3])):
                        with suppress(*EXPECTED):
                            await conn.execute(f"set {setting}")
                    await act(conn)
            await pace(0.05)

    async def _hold(self, conn: Connection[Record], what: str) -> None:
        self._done[what] += 1
        seconds = self._dice.uniform(0.5, 8)
        await conn.execute(f"select pg_sleep({seconds if self._dice.random() < 0.3 else 0})")
        await pace(seconds)

    async def _advisory(self, conn: Connection[Record]) -> None:
        for key in self._dice.sample(range(1, 9), 3):
            mode = self._dice.choice(["pg_advisory_lock", "pg_advisory_lock_shared", "pg_try_advisory_lock"])
            with suppress(*EXPECTED):
                await conn.execute(f"select pg_catalog.{mode}(1919906913, {key})")
        await self._hold(conn, "advisory locks held")

    async def _lock(self, conn: Connection[Record]) -> None:
        names = await conn.fetch(
            "select oid::pg_catalog.regclass::text from pg_catalog.pg_class"
            " where relnamespace = (select oid from pg_catalog.pg_namespace where nspname = 'rota') and relkind in ('r', 'p', 'v')"
        )
        name, mode = self._dice.choice(names)[0], self._dice.choice(LOCK_MODES)
        await conn.execute("begin")
        await conn.execute(f"lock table {name if '.' in name else 'rota.' + name} in {mode} mode")
        await self._hold(conn, f"locked {name} in {mode} mode")

    async def _snapshot(self, conn: Connection[Record]) -> None:
        await conn.execute("begin isolation level repeatable read")
        await conn.execute("select pg_catalog.pg_current_xact_id()")
        await self._hold(conn, "snapshots held")

    async def _open_inserts(self, conn: Connection[Record]) -> None:
        await conn.execute("begin")
        await conn.execute(
            "insert into rota.jobs (handler, unique_key) select 'ok', 'key ' || n from pg_catalog.generate_series(1, 10) as n"
            " on conflict do nothing"
        )
        await conn.execute("insert into rota.schedules (name, handler, every) values ('fuzz open', 'ok', '1 second')")
        await self._hold(conn, "transactions left open")

    async def _listen_without_reading(self, conn: Connection[Record]) -> None:
        await conn.execute("listen rota_wake; listen rota_cancel; listen rota_dead; listen rota_ended")
        transport: Any = getattr(conn, "_transport")  # noqa: B009  private in asyncpg
        transport.pause_reading()
        self._done["listeners that do not read"] += 1
        await pace(self._dice.uniform(1, 8))

    async def _notify(self, conn: Connection[Record]) -> None:
        for channel in ("rota_wake", "rota_cancel", "rota_dead", "rota_ended"):
            for text in ("", "x", "-1", "9" * 40, "schedules", "\u202e", "1," * 3000, "{}", "1 2", "1e5", "\u0661"):
                await conn.execute("select pg_catalog.pg_notify($1, $2)", channel, text)
        self._done["forged notifications"] += 44

    async def _terminate(self, conn: Connection[Record]) -> None:
        with suppress(asyncpg.InsufficientPrivilegeError):
            await conn.execute(
                "select pg_catalog.pg_cancel_backend(pid), pg_catalog.pg_terminate_backend(pid)"
                " from pg_catalog.pg_stat_activity where pid <> pg_catalog.pg_backend_pid() and datname is not null"
            )
        self._done["sessions that ended themselves"] += 1
        await conn.execute("select pg_catalog.pg_terminate_backend(pg_catalog.pg_backend_pid())")

    async def _shadow_names(self, conn: Connection[Record]) -> None:
        """Call SECURITY DEFINER functions with own tables and functions first in the search_path."""
        await conn.execute("create temp table jobs (job_id int8); create temp table schedules (name text)")
        await conn.execute(
            "create function pg_temp.caller() returns text language sql as $$select 'postgres'$$; set search_path = pg_temp, evil"
        )
        for call in (
            "rota.enqueue('ok')",
            "rota.enqueue('ok', unique_key => 'key 1', on_conflict => 'replace')",
            "rota.cancel(1)",
            "rota.put_schedule('fuzz shadow', 'ok', every => '1 hour')",
            "rota.ran('canary', pg_catalog.now())",
        ):
            with suppress(asyncpg.PostgresError):
                await conn.execute(f"select {call}")
        self._done["calls behind shadows"] += 5

    async def _cursor(self, conn: Connection[Record]) -> None:
        await conn.execute("begin; declare c scroll cursor with hold for table rota.job_status; fetch 1 from c")
        await self._hold(conn, "cursors held")


class Clients:
    """HTTP clients that try to block others."""

    def __init__(self, ports: Callable[[], Sequence[int]], seed: int, done: Counter[str]) -> None:
        self._ports = ports
        self._dice = random.Random(seed)
        self._done = done
        self._acts: tuple[Callable[[int], Awaitable[None]], ...] = (
            self._crowd,
            self._drip,
            self._huge_header,
            self._huge_body,
            self._garbage,
            self._half_closed,
            self._pipelined,
        )

    async def run(self, over: Callable[[], bool]) -> None:
        """Run one action after another until the time is up."""
        while not over():
            if ports := self._ports():
                act = self._dice.choice(self._acts)
                with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
                    async with asyncio.timeout(12):
                        await act(self._dice.choice(ports))
                self._done[f"http {act.__name__.strip('_')}"] += 1
            await pace(0.1)

    async def _crowd(self, port: int) -> None:
        async with open_connections(port, 250) as connections:
            for _, writer in connections[::2]:
                writer.write(b"GET /metrics HTTP/1.1\r\n")
            await pace(self._dice.uniform(1, 6))

    async def _drip(self, port: int) -> None:
        async with open_connections(port, 40) as connections:
            for _ in range(8):
                for _, writer in connections:
                    writer.write(b"G")
                await pace(0.5)

    async def _huge_header(self, port: int) -> None:
        async with open_connections(port, 3) as connections:
            for _, writer in connections:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
                for number in range(20):
                    writer.write(b"X-%d: " % number + b"x" * 100_000 + b"\r\n")
                    await writer.drain()

    async def _huge_body(self, port: int) -> None:
        async with open_connections(port, 2) as connections:
            for _, writer in connections:
                writer.write(b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
                for _ in range(100):
                    writer.write(b"x" * 100_000)
                    await writer.drain()

    async def _garbage(self, port: int) -> None:
        for request in (
            b"\x00\xff\x00\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"BREW /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /%2e%2e/%00/metrics?\xff HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET http://[::1/metrics HTTP/1.1\r\nHost: [\r\n\r\n",
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip, \xff\r\nAccept: \xff;q=x\r\n\r\n",
            b"GET /metrics?name[]=" + b"rota_jobs&name[]=" * 400 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /metrics HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\nExpect: 100-continue\r\n\r\n",
        ):
            with suppress(OSError):
                async with open_connections(port, 1) as ((reader, writer),):
                    writer.write(request)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(0.3):
                            await reader.read(1000)

    async def _half_closed(self, port: int) -> None:
        async with open_connections(port, 30) as connections:
            for _, writer in connections:
                writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                writer.write_eof()
            await pace(3)

    async def _pipelined(self, port: int) -> None:
        """Send thousands of requests and read no answer."""
        async with open_connections(port, 2) as connections:
            for _, writer in connections:
                with suppress(TimeoutError):
                    async with asyncio.timeout(4):
                        for _ in range(200):
                            writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50)
                            await writer.drain()


@asynccontextmanager
async def open_connections(
    port: int, count: int
) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """Open up to `count` connections within a moment, and close them at the end."""
    opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(3):
                for _ in range(count):
                    opened.append(await asyncio.open_connection("127.0.0.1", port, limit=2**16))  # noqa: PERF401  suspends
        yield opened
    finally:
        for _, writer in opened:
            writer.transport.abort()


ANSWERS = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n\x00\xff\xfe\x80",
    b"HTTP/1.1 500 \xff\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 429 Slow down\r\nRetry-After: 99999999999999999999\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 x\r\nRetry-After: -1\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 x\r\nRetry-After: nan\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 x\r\nRetry-After: Wed, 99 Foo 0000 99:99:99 GMT\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 x\r\nRetry-After: Fri, 31 Dec 9999 23:59:59 GMT\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
    b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=nonsense\r\nContent-Length: 2\r\n\r\n\xff\xff",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"",
    b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 5000000\r\n\r\n" + b"x" * 5_000_000,
)


@asynccontextmanager
async def bad_web_server(seed: int) -> AsyncIterator[str]:
    """Answer requests as a broken or hostile receiver may; yield the URL."""
    dice = random.Random(seed)
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = bomb.compress(bytes(20_000_000)) + bomb.flush()
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
    answers = (*ANSWERS, head + packed)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError
        ):
            async with asyncio.timeout(5):
                await reader.readuntil(b"\r\n\r\n")
                if dice.random() < 0.1:
                    await pace(4)  # longer than the endpoint's timeout
                writer.write(dice.choice(answers))
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
