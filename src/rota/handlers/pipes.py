"""Processes in groups of their own that may end at any moment: their pipes, their end, and what their exit codes tell."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from asyncio.subprocess import Process

PIPES_GRACE = 2.0
"""Seconds after a process's end in which what it wrote is still read."""


async def send(pipe: asyncio.StreamWriter, data: bytes) -> None:
    """Write all of it, unless nobody reads any more."""
    with suppress(BrokenPipeError, ConnectionResetError):
        if not pipe.is_closing():  # uvloop calls writing to a closed pipe a RuntimeError
            pipe.write(data)
            await pipe.drain()


def signal_group(process: Process, number: signal.Signals) -> None:
    """Send a signal to all that is left of the group that it leads."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def how_it_ended(code: int) -> str:
    """Write `exit code 3` or `signal SIGKILL`; most real-time signals have a number and no name."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
