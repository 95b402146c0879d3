"""Run daemons in this process with short settings, and collect their log events so that tests can wait for them."""

from __future__ import annotations

import asyncio
import os
import traceback
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

import rota
from rota.config import load
from rota.daemon.daemon import Daemon
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from asyncpg import Connection, Record

    from rota.app import App

SHORT_SETTINGS: dict[str, Any] = {
    "lease.duration": "3s",
    "lease.reap_interval": "300ms",
    "poll_interval": "200ms",
    "drain.timeout": "10s",
    "drain.grace": "1s",
    "queues": "default:10",
    "http.port": 0,
    "log.level": "error",
    "log.format": "json",
}
"""Settings that shorten minutes in production to seconds."""


@dataclass(slots=True)
class Node:
    """One daemon, its log events so far, and the exception that ended it."""

    daemon: Daemon
    events: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    crash: BaseException | None = None
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def events_named(self, name: str, **fields: Any) -> list[Mapping[str, Any]]:
        """Return the events with that name and those fields, oldest first."""
        return [
            event_fields
            for event, event_fields in list(self.events)
            if event == name and all(event_fields.get(key) == value for key, value in fields.items())
        ]

    async def wait_for_event(
        self, name: str, *, times: int = 1, within: float = 10.0, **fields: Any
    ) -> Mapping[str, Any]:
        """Wait until the event was logged `times` times, and return the last one."""
        await eventually(
            lambda: len(self.events_named(name, **fields)) >= times or self.stopped.is_set(),
            within=within,
            what=f"the event {name} {fields}",
        )
        found = self.events_named(name, **fields)
        assert len(found) >= times, f"the daemon ended ({self.crash!r}) before it logged {name} {fields}"
        return found[-1]

    async def wait_for_turns(self, service: str, times: int = 2) -> None:
        """Wait until the service has ended that many more turns. The first of them may already be running."""
        await self.wait_for_event(
            "service.ran", service=service, times=len(self.events_named("service.ran", service=service)) + times
        )

    def metric(self, name: str, **labels: str) -> float:
        """Return the metric's current value; 0 if it was never counted."""
        return self.daemon.telemetry.registry.get_sample_value(name, labels) or 0.0

    def stop(self) -> None:
        """Request a stop: the first request drains, the second one interrupts jobs."""
        self.daemon.shutdown.request_next()

    async def wait_until_stopped(self, within: float = 10.0) -> None:
        """Wait until run() has returned or raised."""
        await eventually(self.stopped.is_set, within=within, what="the end of the daemon")


@asynccontextmanager
async def run_node(
    dsn: str,
    app: App,
    *,
    may_crash: bool = False,
    until_idle: bool = False,
    reference: str | None = None,
    **settings: Any,
) -> AsyncIterator[Node]:
    """Run a daemon until the block is left, and stop it then. With `may_crash`, an exception of run() does not fail the test.

    Settings are written with underscores for dots: `lease_duration="3s"`.
    """
    overrides = (
        SHORT_SETTINGS | {key.replace("__", "."): value for key, value in settings.items()} | {"database.url": dsn}
    )
    nodes: list[Node] = []
    daemon = Daemon(
        load(overrides=overrides, environ={}),
        app,
        app_reference=reference,
        until_idle=until_idle,
        watch=lambda event, fields: nodes[0].events.append((event, fields)),
    )
    node = Node(daemon)
    nodes.append(node)

    async def live() -> None:
        try:
            await daemon.run()
        except BaseException as error:  # noqa: BLE001 - whatever felled it is what the test wants to know
            node.crash = error
        finally:
            node.stopped.set()

    def no_exit(code: int) -> None:
        raise AssertionError(f"the daemon left by os._exit({code}) because a handler would not stop")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", no_exit)
        async with asyncio.TaskGroup() as group:
            group.create_task(live(), name="daemon under test")
            try:
                await node.wait_for_event("node.started")
                yield node
            except BaseException as error:
                if node.crash is not None:
                    error.add_note("".join(["the daemon had fallen:\n", *traceback.format_exception(node.crash)]))
                raise
            finally:
                node.stop()
                node.stop()
                await node.wait_until_stopped(within=20)
    if node.crash is not None and not may_crash:
        raise node.crash


def gated_app(go: asyncio.Event, calls: list[int]) -> rota.App:
    """Return an app with one handler, `wait`, which returns once `go` is set."""
    app = rota.App("gated")

    @app.handler("wait")
    async def wait(job: rota.Job[Any]) -> None:
        calls.append(job.job_id)
        await go.wait()

    return app


async def insert_job(conn: Connection[Record], handler: str, payload: str = "{}", /, **columns: Any) -> int:
    """Insert a job as a client does; a str value is SQL. Return its job_id."""
    names = ["handler", "payload", *columns]
    values = [
        "$1",
        "$2::text::jsonb",
        *(value if isinstance(value, str) else repr(value) for value in columns.values()),
    ]
    return int(
        await conn.fetchval(
            f"insert into rota.jobs ({', '.join(names)}) values ({', '.join(values)}) returning job_id",
            handler,
            payload,
        )
    )


async def job_row(conn: Connection[Record], job_id: int) -> Record | None:
    """Return the live row of a job and the database's time as `now`; None if the job is not live."""
    return await conn.fetchrow("select *, clock_timestamp() as now from rota.jobs where job_id = $1", job_id)


async def live_row(conn: Connection[Record], job_id: int) -> Record:
    """Return the live row of a job; fail if there is none."""
    found = await job_row(conn, job_id)
    assert found is not None, f"job {job_id} is not live"
    return found


async def ledger_rows(conn: Connection[Record], job_id: int) -> list[Record]:
    """Return the job's rows in the ledger; more than one is a bug."""
    return await conn.fetch("select * from rota.job_runs where job_id = $1", job_id)


async def final_outcome(conn: Connection[Record], job_id: int, *, within: float = 10.0) -> str:
    """Wait until the job is in the ledger or among the dead letters; return its outcome, or 'dead: <reason>'."""

    async def end() -> str | None:
        ends: list[Record] = await conn.fetch(
            """
            select outcome as how from rota.job_runs where job_id = $1
            union all select 'dead: ' || reason from rota.dead_letters where job_id = $1
            """,
            job_id,
        )
        assert len(ends) <= 1, f"job {job_id} has ended {len(ends)} times"
        return str(ends[0]["how"]) if ends else None

    return await eventually(end, within=within, what=f"the end of job {job_id}")


async def failed_attempts(conn: Connection[Record], job_id: int) -> list[Record]:
    """Return the failed attempts of a job, oldest first."""
    return await conn.fetch("select * from rota.attempts where job_id = $1 order by fence_token", job_id)


async def dead_letter(conn: Connection[Record], job_id: int) -> Record:
    """Return the dead letter of a job; fail if there is none."""
    found = await conn.fetchrow("select * from rota.dead_letters where job_id = $1", job_id)
    assert found is not None, f"job {job_id} is no dead letter"
    return found


async def wait_for_claim(conn: Connection[Record], job_id: int) -> Record:
    """Wait until the job runs; return its row."""

    async def claimed() -> Record | None:
        found = await job_row(conn, job_id)
        return found if found is not None and found["state"] == "running" else None

    return await eventually(claimed, what=f"the claim of job {job_id}")


async def wait_for_attempt_age(conn: Connection[Record], seconds: float, *, job_id: int) -> None:
    """Wait until the job's attempt is that old on the database's clock."""

    async def old() -> bool:
        return bool(
            await conn.fetchval(
                "select clock_timestamp() > started_at + make_interval(secs => $2) from rota.jobs where job_id = $1",
                job_id,
                seconds,
            )
        )

    await eventually(old, within=seconds + 10, what=f"an age of {seconds} s of job {job_id}")


STEAL_JOB = """
update rota.jobs
set fence_token = nextval('rota.fence_tokens'), leased_by = gen_random_uuid(), attempt = attempt + 1,
    lease_expires_at = clock_timestamp() + interval '1 hour'
where job_id = $1
returning fence_token
"""
"""Reap the job and claim it for another node, in one statement."""
