"""A database, daemon processes that run process_app on it, and queries about their jobs."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

import asyncpg

from process_app import EFFECTS, WITNESS
from processes import Daemons
from waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record


CONNECTION_ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""Errors that a connection raises while its server is down."""


class Fleet:
    """A database and the daemon processes on it. Its own connection is reopened after the server was down."""

    def __init__(self, dsn: str, folder: Path) -> None:
        self.dsn = dsn
        self.daemons = Daemons(folder, dsn, app="process_app:app", environ={"WITNESS_DSN": dsn})
        self._stack = AsyncExitStack()
        self._conn: Connection[Record] | None = None

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self.daemons)
        await self.execute(f"{WITNESS}; {EFFECTS}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        if self._conn is not None:
            self._conn.terminate()

    async def connection(self) -> Connection[Record]:
        """Return the fleet's own direct connection to the server; reconnect if it was cut."""
        conn = self._conn
        try:
            if conn is not None:
                await conn.execute("select")
                return conn
        except CONNECTION_ERRORS:
            pass

        async def connect() -> Connection[Record] | None:
            try:
                return await asyncpg.connect(self.dsn, server_settings={"application_name": "test"})
            except CONNECTION_ERRORS:
                return None

        self._conn = conn = await eventually(connect, what="a server that accepts connections")
        return conn

    async def execute(self, sql: str, *arguments: Any) -> str:
        """Run a statement."""
        return await (await self.connection()).execute(sql, *arguments)

    async def fetch(self, sql: str, *arguments: Any) -> list[Record]:
        """Run a query, return its rows."""
        return await (await self.connection()).fetch(sql, *arguments)

    async def value(self, sql: str, *arguments: Any) -> Any:
        """Run a query, return one value."""
        return await (await self.connection()).fetchval(sql, *arguments)

    async def enqueue(self, handler: str, payload: Any = None, **columns: Any) -> int:
        """Insert a job as a client does, by plain SQL; columns of type interval are given as text."""
        values = {"handler": handler, "payload": json.dumps({} if payload is None else payload), **columns}
        casts = dict.fromkeys(("timeout", "lease", "backoff_base", "backoff_cap", "retry_for"), "::text::interval")
        places = ", ".join(f"${number}{casts.get(name, '')}" for number, name in enumerate(values, 1))
        sql = f"insert into rota.jobs ({', '.join(values)}) values ({places}) returning job_id"
        return int(await self.value(sql, *values.values()))

    async def job(self, job_id: int) -> Record | None:
        """Return the row of a live job, or None."""
        rows = await self.fetch("select * from rota.jobs where job_id = $1", job_id)
        return rows[0] if rows else None

    async def state(self, job_id: int) -> str | None:
        """Return the job's state from rota.job_status, or None if the job is unknown."""
        found = await self.value("select state from rota.job_status where job_id = $1", job_id)
        return None if found is None else str(found)

    async def executions(self, job_id: int) -> list[Record]:
        """Return the recorded handler calls of a job, oldest first."""
        return await self.fetch("select * from executions where job_id = $1 order by started_at", job_id)

    async def wait_for_execution(self, job_id: int, times: int = 1, *, within: float = 20.0) -> list[Record]:
        """Wait until the job was started that many times, and return its executions."""

        async def list_executions() -> list[Record] | None:
            found = await self.executions(job_id)
            return found if len(found) >= times else None

        return await eventually(list_executions, within=within, what=f"execution {times} of job {job_id}")

    async def wait_for_state(self, job_id: int, state: str, *, within: float = 20.0) -> None:
        """Wait until the job is in that state."""

        async def has_state() -> bool:
            return await self.state(job_id) == state

        try:
            await eventually(has_state, within=within, what=f"job {job_id} {state}")
        except AssertionError as error:
            output = "".join(daemon.output_text()[-2000:] for daemon in self.daemons.started)
            raise AssertionError(f"{error}; it is {await self.state(job_id)}\n{output}") from None

    async def wait_until_empty(self, *, within: float = 30.0) -> None:
        """Wait until there are no live jobs."""

        async def is_empty() -> bool:
            return not await self.value("select exists (select from rota.jobs)")

        await eventually(is_empty, within=within, what="the end of all jobs")
