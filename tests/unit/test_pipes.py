"""What is said to a process that has ended is lost, and no error."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from rota.handlers.pipes import send
from waiting import eventually


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_process_that_reads_nothing_and_has_ended_is_no_error(run: object) -> None:
    """It may end before anything is sent: then its exit code says what becomes of the job, and not the pipe."""
    assert callable(run)

    async def late() -> None:
        ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "", stdin=asyncio.subprocess.PIPE)
        assert await ended.wait() == 0
        assert ended.stdin is not None
        await eventually(ended.stdin.is_closing, what="the end of the pipe")
        await send(ended.stdin, b"payload")

    run(late())
