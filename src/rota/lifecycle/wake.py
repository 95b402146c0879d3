"""End the waits of the dispatcher and the scheduler when there may be work."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Wake:
    """A flag that ends a wait: set by a notification, a freed slot, or the order to stop. Clear it *before* the search for work."""

    def __init__(self) -> None:
        self._flag = asyncio.Event()

    def set(self) -> None:
        """End the wait. A notification's payload is not trusted: it only means that there may be work."""
        self._flag.set()

    def clear(self) -> None:
        """Clear the flag. Call this just before searching for work."""
        self._flag.clear()

    async def wait(self, seconds: float) -> None:
        """Return when the flag is set, or after `seconds`: polling finds jobs whose notification was missed."""
        if self._flag.is_set() or seconds <= 0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._flag.wait()
