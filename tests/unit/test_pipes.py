"""Writing to a child process that has exited is not an error."""

from __future__ import annotations

import asyncio
import sys

import pytest
import uvloop

from rota.handlers.pipes import send
from waiting import eventually


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_sending_to_a_process_that_has_exited_is_not_an_error(run: object) -> None:
    """The exit code of the process decides the outcome of the job."""
    assert callable(run)

    async def send_after_exit() -> None:
        ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "", stdin=asyncio.subprocess.PIPE)
        assert await ended.wait() == 0
        assert ended.stdin is not None
        await eventually(ended.stdin.is_closing, what="the end of the pipe")
        await send(ended.stdin, b"payload")

    run(send_after_exit())
