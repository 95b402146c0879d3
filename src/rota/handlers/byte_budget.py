"""Limit the memory that a daemon uses for large payloads, and move work on them to a thread."""

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
"""Payloads of at least this size are processed in a thread instead of on the main loop."""


class ByteBudget:
    """Grants bytes in the order of the requests. A request above the limit is granted once all other bytes are returned."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._reserved = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Reserve `size` bytes within the block. Yields a function `keep(needed)` that returns all but `needed` of them."""
        size = min(size, self._limit)
        if self._waiting or self._reserved + size > self._limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._reserved -= size
                self._wake()
                raise
        else:
            self._reserved += size

        def keep(needed: int) -> None:
            nonlocal size
            unneeded = max(0, size - needed)
            size -= unneeded
            self._reserved -= unneeded
            self._wake()

        try:
            yield keep
        finally:
            keep(0)

    def _wake(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if self._reserved + size > self._limit:
                    return
                self._reserved += size
                turn.set_result(None)
            self._waiting.popleft()


@cache
def _thread() -> ThreadPoolExecutor:
    # One thread: each holds the interpreter lock for up to tens of milliseconds, during which the main loop waits.
    return ThreadPoolExecutor(1, thread_name_prefix="rota large payloads")


async def off_the_loop(work: Callable[[], T]) -> T:
    """Run `work` in the thread for large payloads, and return its result."""
    return await asyncio.get_running_loop().run_in_executor(_thread(), work)
