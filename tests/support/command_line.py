"""Run commands as users do: real processes in a folder of their own, without the settings of the calling shell."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Return the output parsed as JSON."""
        return json.loads(self.out)


@dataclass(slots=True)
class Shell:
    """Runs commands in its folder, as a user at a prompt does."""

    folder: Path
    environ: dict[str, str]

    def environment(self) -> dict[str, str]:
        """Return the environment of the commands, without this shell's settings of rota and PostgreSQL."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("ROTA_", "PG", "DATABASE_"))
        }
        # No bytecode: Python would take a module rewritten within the same second for the old one.
        fixed = {"PYTHONDONTWRITEBYTECODE": "1", "ROTA_HTTP_PORT": "0", "COLUMNS": "100"}
        return {**inherited, **fixed, **self.environ}

    async def __call__(self, *arguments: object, **environ: str) -> CommandResult:
        """Run `rota` with these arguments to its end. Fail if it prints a traceback."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "rota", *map(str, arguments)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self.environment(), **environ},
            cwd=self.folder,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode is not None
        result = CommandResult(process.returncode, out.decode(), err.decode())
        assert "Traceback" not in result.err, result.err
        return result


@contextmanager
def running_command(shell: Shell, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], str]]]:
    """Run a command during the block; yield the process and a function that returns the output so far."""
    log = shell.folder / "said"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "rota", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=shell.environment(),
            cwd=shell.folder,
        )
    try:
        yield process, log.read_text
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(30)
