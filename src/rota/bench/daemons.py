"""Run daemons as separate processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from rota.bench.jobs import QUEUE
from rota.bench.processor import process_cpu_seconds
from rota.errors import DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rota.bench.database import BenchDatabase

NO_SETTINGS: Mapping[str, str] = MappingProxyType({})

START_SECONDS = 60.0
STOP_SECONDS = 15.0


class Daemons:
    """The running daemons."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def rss_mb(self) -> float:
        """Return the memory of the largest daemon in MB, or 0 without /proc."""
        return max(_resident_bytes(process.pid) for process in self._processes) / 1e6

    def cpu_seconds(self) -> float:
        """Return the processor time of all daemons so far in seconds, or 0 without /proc."""
        return sum(process_cpu_seconds(process.pid) for process in self._processes)

    def check_running(self) -> None:
        """Raise DatabaseUnusable if a daemon has ended, which makes the measurement worthless."""
        for process in self._processes:
            if process.poll() is not None:
                raise DatabaseUnusable(f"a daemon ended with exit code {process.returncode} during the measurement")


@asynccontextmanager
async def daemons(
    database: BenchDatabase,
    *,
    count: int,
    slots: int,
    port: int = 0,
    app: str = "rota.bench.jobs:app",
    settings: Mapping[str, str] = NO_SETTINGS,
) -> AsyncIterator[Daemons]:
    """Start `count` daemons with `slots` slots each, wait until they have registered, and stop them at the end.

    `port` is their HTTP port. With 0, each daemon chooses a free one. `settings`: more environment variables.
    """
    with tempfile.TemporaryFile() as output:
        registered = await _count_nodes(database)
        processes = [
            _start(database.dsn, app, {**_queues_and_port(slots, port), **settings}, output) for _ in range(count)
        ]
        try:
            await _wait_until_registered(database, registered + count, processes, output)
            yield Daemons(processes)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                with suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(process.wait, STOP_SECONDS)
                process.kill()
                process.wait()


def _queues_and_port(slots: int, port: int) -> dict[str, str]:
    return {"ROTA_QUEUES": f"{QUEUE}:{slots},*:10", "ROTA_HTTP_PORT": str(port)}  # other queues get their default slots


def _start(dsn: str, app: str, settings: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    user_settings = ("ROTA_", "PG", "DATABASE_URL")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(user_settings)} | {
        "DATABASE_URL": dsn,
        "ROTA_CONFIG": os.devnull,  # read no rota.toml of the current folder
        "ROTA_LOG_LEVEL": "warning",
        **settings,
    }
    command = [sys.executable, "-m", "rota", "run", "--app", app]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603  no shell


async def _wait_until_registered(
    database: BenchDatabase, nodes: int, processes: Sequence[subprocess.Popen[bytes]], output: IO[bytes]
) -> None:
    try:
        async with asyncio.timeout(START_SECONDS):
            while await _count_nodes(database) < nodes:
                if any(process.poll() is not None for process in processes):
                    output.seek(0)
                    text = output.read()[-2000:].decode(errors="replace")
                    raise DatabaseUnusable(f"a daemon ended during its start. Its output:\n{text}")
                await asyncio.sleep(0.05)
    except TimeoutError as error:
        raise DatabaseUnusable(f"not all daemons have registered within {START_SECONDS:g} s") from error


async def _count_nodes(database: BenchDatabase) -> int:
    return int(await database.connection.fetchval("select count(*) from rota.nodes"))


def _resident_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0
