"""When the dispatcher looks for due jobs, and the scheduler for due schedules."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Wake:
    """A flag that ends a wait: set by a notification, a freed slot, or the order to stop. Clear it *before* a look, never after."""

    def __init__(self) -> None:
        self._flag = asyncio.Event()

    def set(self) -> None:
        """End the wait. A notification's payload is not trusted: it only means that there may be work."""
        self._flag.set()

    def clear(self) -> None:
        """Clear the flag. Call this just before a look."""
        self._flag.clear()

    async def wait(self, seconds: float) -> None:
        """Return when the flag is set, or after `seconds`: polling finds jobs whose notification was missed."""
        if self._flag.is_set() or seconds <= 0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._flag.wait()
