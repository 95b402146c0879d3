"""Observe the demo's daemons and jobs: through the database, the files that handlers write, the logs and the metrics."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from rota.demo.fleet import POLL_INTERVAL, DemoFailed
from rota.demo.json_lines import read_json_lines
from rota.demo.records import Execution, HeldClaim, executions_from

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from uuid import UUID

    from rota.db.pool import Connection
    from rota.demo.fleet import Daemon, Fleet

T = TypeVar("T")


class Observer:
    """Reads the state of daemons and jobs. Its methods query the connection `db`, unless another one is given."""

    def __init__(self, *, folder: Path, fleet: Fleet, db: Connection) -> None:
        self._folder = folder
        self._fleet = fleet
        self._db = db
        self._nodes: dict[UUID, str] = {}

    def process_name(self, node: UUID | None) -> str:
        """Return the name of the daemon's process that registered as this node, or `?`."""
        return "?" if node is None else self._nodes.get(node, "?")

    async def read_nodes(self, db: Connection | None = None) -> None:
        """Learn which process is which node. A daemon that has registered is set to running."""
        names = {life.pid: life.name for daemon in self._fleet.daemons for life in daemon.lives}
        for row in await (db or self._db).fetch("select node_id, pid from rota.nodes"):
            if row["pid"] in names:
                self._nodes.setdefault(row["node_id"], names[row["pid"]])
        registered = set(self._nodes.values())
        for daemon in self._fleet.daemons:
            if daemon.lives and daemon.state == "starting" and daemon.name in registered:
                daemon.state = "running"

    async def read_claims(self) -> dict[str, list[HeldClaim]]:
        """Return the current claims by process."""
        await self.read_nodes()
        claims: dict[str, list[HeldClaim]] = {}
        for row in await self._db.fetch(
            "select job_id, handler, fence_token, leased_by from rota.jobs where state = 'running' order by job_id"
        ):
            claim = HeldClaim(row["job_id"], row["handler"], row["fence_token"])
            claims.setdefault(self.process_name(row["leased_by"]), []).append(claim)
        return claims

    async def read_death(self, job_id: int) -> float | None:
        """Return when a job became a dead letter, in seconds since the epoch. None if it is not one."""
        at: float | None = await self._db.fetchval(
            "select extract(epoch from finished_at)::float8 from rota.dead_letters where job_id = $1", job_id
        )
        return at

    def executions(self) -> list[Execution]:
        """Return all executions in the journal."""
        return executions_from(read_json_lines(self._folder / "journal"), self._fleet.daemons)

    def journalled_tokens(self, what: str) -> set[int]:
        """Return the fence tokens of the executions that have `began` or `ended`."""
        return {line["fence_token"] for line in read_json_lines(self._folder / "journal") if line["what"] == what}

    def letters(self) -> list[dict[str, Any]]:
        """Return all letters in the mailbox."""
        return read_json_lines(self._folder / "mailbox")

    async def read_metric(self, daemon: Daemon, name: str) -> float:
        """Return the value of a metric without labels. -1 if the daemon doesn't answer."""
        addresses = [event["http"] for event in daemon.events() if event.get("event") == "node.started"]
        with suppress(aiohttp.ClientError, OSError, ValueError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session,
                session.get(f"{addresses[-1]}/metrics") as response,
            ):
                for line in (await response.text()).splitlines():
                    if line.startswith(f"{name} "):
                        return float(line.split()[1])
        return -1.0

    async def wait_until_all_run(self) -> None:
        """Wait until every daemon has registered. Raises DemoFailed after 20 s."""

        async def all_run() -> bool:
            await self.read_nodes()
            return all(daemon.state == "running" and daemon.is_alive for daemon in self._fleet.daemons)

        await wait_for(all_run, within=20, failure="not all daemons have started")

    async def wait_until_no_jobs(self, failure: str) -> None:
        """Wait until no job is live. Raises DemoFailed with the text `failure` after 20 s."""

        async def no_jobs() -> bool:
            return not await self._db.fetchval("select exists (select from rota.jobs)")

        await wait_for(no_jobs, within=20, failure=failure)


async def wait_for(condition: Callable[[], Awaitable[T | None]], *, within: float, failure: str) -> T:
    """Return the first truthy result of `condition`. Raises DemoFailed with the text `failure` after `within` seconds."""
    deadline = time.monotonic() + within
    while not (result := await condition()):
        if time.monotonic() > deadline:
            raise DemoFailed(f"{failure} (waited {within:g} s)")
        await asyncio.sleep(POLL_INTERVAL / 4)
    return result
