"""A limit for the bytes of large payloads that a daemon holds at a time, and a thread for work that grows with them."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

T = TypeVar("T")

OFF_LOOP_BYTES = 1 << 16
"""From this size of a payload on, work on it leaves the main loop."""


class ByteBudget:
    """Hands out bytes in the order of asking. A request larger than the limit waits until nothing else is held."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Hold `size` bytes within the block. Yields a function that gives back all but as many as it is called with."""
        size = min(size, self._limit)
        if self._waiting or self._held + size > self._limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._held -= size
                self._wake()
                raise
        else:
            self._held += size

        def keep(needed: int) -> None:
            nonlocal size
            spared = max(0, size - needed)
            size -= spared
            self._held -= spared
            self._wake()

        try:
            yield keep
        finally:
            keep(0)

    def _wake(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if self._held + size > self._limit:
                    return
                self._held += size
                turn.set_result(None)
            self._waiting.popleft()


@cache
def _thread() -> ThreadPoolExecutor:
    # One: each such thread holds the interpreter for up to tens of milliseconds at a time, and the main loop waits meanwhile.
    return ThreadPoolExecutor(1, thread_name_prefix="rota large payloads")


async def off_the_loop(work: Callable[[], T]) -> T:
    """Run `work` in the thread for large payloads, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_thread(), work)
