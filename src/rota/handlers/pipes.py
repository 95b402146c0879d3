"""Pipes to processes that may end at any moment, which their exit codes tell of."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


async def send(pipe: asyncio.StreamWriter, data: bytes) -> None:
    """Write all of it, unless nobody reads any more."""
    with suppress(BrokenPipeError, ConnectionResetError):
        if not pipe.is_closing():  # uvloop calls writing to a closed pipe a RuntimeError
            pipe.write(data)
            await pipe.drain()
