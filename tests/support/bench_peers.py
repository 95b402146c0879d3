"""`make bench-peers`: drain the same number of no-op jobs with rota and other job queues on one temporary server.

Each system is installed from its public package into .rota/peers. It is measured at its defaults and at the best
settings we know. A system that cannot be installed is listed with the reason. The systems take turns, so that changes
in the machine's speed affect all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg

from rota.bench.database import cores, with_database_name
from rota.embedded import EmbeddedPostgres

PROGRAMS = Path(__file__).parent / "peers"
MAX_SECONDS = 20
DATABASE = "bench_peer"
INTERPRETERS = ("python3.14", "python3.13", "python3.12")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another system: its packages and the program that measures it.

    `python` is the oldest Python 3 minor version it supports.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    python: int = 11


PEERS = (
    Peer(name="Graphile Worker", program="graphile.mjs", packages=("graphile-worker", "pg")),
    Peer(name="PgQueuer", program="pgqueuer_worker.py", packages=("pgqueuer", "asyncpg", "uvloop")),
    Peer(
        name="Procrastinate",
        program="procrastinate_worker.py",
        packages=("procrastinate", "psycopg[binary]", "asyncpg"),
    ),
    Peer(
        name="Oban for Python",
        program="oban_worker.py",
        packages=("oban", "psycopg[binary,pool]", "asyncpg", "uvloop"),
        python=12,
    ),
    Peer(name="pg-boss", program="pgboss.mjs", packages=("pg-boss", "pg")),
)
NOT_MEASURED = {
    "Oban for Elixir": "elixir",
    "River": "go",
}
"""Systems that no program measures yet, and the tool that each needs."""


class NotInstalledError(Exception):
    """The system cannot be installed on this machine."""


def install(peer: Peer, folder: Path) -> list[str]:
    """Install the peer's packages into the folder, once. Return the command that runs its programs."""
    folder.mkdir(parents=True, exist_ok=True)
    if peer.program.endswith(".mjs"):
        return _install_npm(peer, folder)
    python = _find_python(peer.python)
    command = folder / "bin" / "python"
    if not (folder / "installed").exists():
        _run([python, "-m", "venv", "--clear", str(folder)])
        _run([str(command), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.packages])
        (folder / "installed").touch()
    return [str(command)]


def _install_npm(peer: Peer, folder: Path) -> list[str]:
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        raise NotInstalledError("node and npm are not on the PATH")
    if not (folder / "installed").exists():
        major = int(_run([node, "--version"]).lstrip("v").split(".")[0])
        # Later versions of pg-boss need Node 22.
        packages = ["pg-boss@10" if name == "pg-boss" and major < 22 else name for name in peer.packages]
        (folder / "package.json").write_text('{"private": true}', encoding="utf-8")
        _run([npm, "install", "--silent", "--prefix", str(folder), *packages])
        (folder / "installed").touch()
    return [node]


def _find_python(minor: int) -> str:
    if sys.version_info >= (3, minor):
        return sys.executable
    for name in INTERPRETERS:
        if int(name.removeprefix("python3.")) >= minor and (found := shutil.which(name)) and _starts(found):
            return found
    raise NotInstalledError(f"needs Python 3.{minor} or later, which is not on the PATH")


def _starts(python: str) -> bool:
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _run(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise NotInstalledError(f"{Path(command[0]).name} failed: {lines[-1][:200]}")
    return str(done.stdout)


async def _fresh_database(dsn: str) -> None:
    db = await asyncpg.connect(dsn)
    try:
        await db.execute(f"drop database if exists {DATABASE} with (force)")
        await db.execute(f"create database {DATABASE}")
    finally:
        await db.close()


def measure_peer(peer: Peer, command: list[str], folder: Path, dsn: str, settings: str, jobs: int) -> dict[str, Any]:
    """Drain `jobs` jobs with the peer in a fresh database, for at most MAX_SECONDS. Return what its program prints."""
    asyncio.run(_fresh_database(dsn))
    socket, port, user = asyncio.run(_address(with_database_name(dsn, DATABASE)))
    address = {"PGHOST": socket, "PGPORT": port, "PGUSER": user, "PGDATABASE": DATABASE}
    program = [*command, str(PROGRAMS / peer.program), settings, str(jobs), str(MAX_SECONDS)]
    output = _run(program, cwd=folder, env={**os.environ, **address})
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


async def _address(dsn: str) -> tuple[str, str, str]:
    db = await asyncpg.connect(dsn)
    try:
        row = await db.fetchrow(
            "select split_part(current_setting('unix_socket_directories'), ',', 1), current_setting('port'), current_user"
        )
        assert row
        return str(row[0]), str(row[1]), str(row[2])
    finally:
        await db.close()


def measure_rota(dsn: str, settings: str, jobs: int) -> dict[str, Any]:
    """Drain `jobs` jobs with one daemon of rota."""
    slots = "500" if settings == "best" else "100"
    options = ["--no-floor", "--json", "--dsn", dsn, "--jobs", str(jobs), "--slots", slots]
    figures = json.loads(_run([sys.executable, "-m", "rota.bench", "drain", *options]))
    return {"version": "here", "settings": f"{slots} slots", "jobs_per_second": figures["jobs_per_second"]}


def main() -> None:
    """Measure, and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200_000, help="jobs of each drain, a multiple of 1,000")
    parser.add_argument(
        "--rounds", type=int, default=3, help="drains of each system and setting; the medians are printed"
    )
    parser.add_argument("--only", default="", help="part of a peer's name: measure only this one, and rota")
    arguments = parser.parse_args()
    peers = [peer for peer in PEERS if arguments.only.lower() in peer.name.lower()]
    commands: dict[str, list[str]] = {}
    missing = {
        name: "no program measures it yet" if shutil.which(tool) else f"{tool} is not on the PATH"
        for name, tool in NOT_MEASURED.items()
    }
    cache = Path.cwd() / ".rota" / "peers"
    for peer in peers:
        try:
            commands[peer.name] = install(peer, cache / peer.name.replace(" ", "-").lower())
        except NotInstalledError as error:
            missing[peer.name] = str(error)
    results: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="rota-peers-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)  # the server runs as another user if this process runs as root
        server = EmbeddedPostgres(data=Path(folder) / "data", settings={"max_wal_size": "4GB"})
        with server as postgres:
            for number in range(arguments.rounds):
                for settings in ("default", "best"):
                    sys.stderr.write(f"round {number + 1} of {arguments.rounds}, {settings} settings\n")
                    results.setdefault(("rota", settings), []).append(
                        measure_rota(postgres.dsn, settings, arguments.jobs)
                    )
                    for peer in peers:
                        if peer.name in missing:
                            continue
                        home = cache / peer.name.replace(" ", "-").lower()
                        try:
                            result = measure_peer(
                                peer, commands[peer.name], home, postgres.dsn, settings, arguments.jobs
                            )
                        except NotInstalledError as error:
                            missing[peer.name] = str(error)
                            continue
                        results.setdefault((peer.name, settings), []).append(result)
            version = asyncio.run(_server_version(postgres.dsn))
    print_table(
        results,
        missing,
        f"{arguments.jobs:,} jobs per drain, rounds: {arguments.rounds}, {cores()} cores, PostgreSQL {version}",
    )


async def _server_version(dsn: str) -> str:
    db = await asyncpg.connect(dsn)
    try:
        return str(await db.fetchval("select split_part(current_setting('server_version'), ' ', 1)"))
    finally:
        await db.close()


def write(line: str) -> None:
    """Write a line of the result."""
    sys.stdout.write(line + "\n")


def print_table(results: dict[tuple[str, str], list[dict[str, Any]]], missing: dict[str, str], setting: str) -> None:
    """Print the medians, their range, and the ratio of rota's speed at its defaults to each."""
    base = median(run["jobs_per_second"] for run in results["rota", "default"])
    write("| system | settings | jobs per second | range | rota at its defaults / this |\n|---|---|---|---|---|")
    for (name, settings), runs in results.items():
        rates = [run["jobs_per_second"] for run in runs]
        title = name if runs[0]["version"] == "here" else f"{name} {runs[0]['version']}"
        spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
        rate = median(rates)
        digits = 0 if rate >= 10 else 1
        write(f"| {title} | {settings}: {runs[0]['settings']} | {rate:,.{digits}f} | {spread} | {base / rate:,.2f} |")
    for name, reason in missing.items():
        write(f"| {name} | not measured: {reason} | | | |")
    write(f"\n{setting}, durable. A drain is stopped after {MAX_SECONDS} s; its rate is that of the jobs until then.")
    write(
        "rota's time begins when the queue of a running daemon is resumed; that of the others when their worker is started."
    )


if __name__ == "__main__":
    main()
