"""Pipes, signals and exit codes of processes that lead a process group and may end at any moment."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from asyncio.subprocess import Process

PIPES_GRACE = 2.0
"""Seconds after the end of a process for which its output is still read."""


async def send(pipe: asyncio.StreamWriter, data: bytes) -> None:
    """Write all the data, unless the reader has closed the pipe."""
    with suppress(BrokenPipeError, ConnectionResetError):
        if not pipe.is_closing():  # uvloop raises RuntimeError for writing to a closed pipe
            pipe.write(data)
            await pipe.drain()


def signal_group(process: Process, number: signal.Signals) -> None:
    """Send a signal to the processes that are left in the group that `process` leads."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def describe_exit(code: int) -> str:
    """Return `exit code 3` or `signal SIGKILL`; a number for real-time signals without a name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
