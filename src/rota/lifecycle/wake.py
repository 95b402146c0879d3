"""Step 1 of a job's life: when the dispatcher looks for due jobs. The scheduler waits for due schedules in the same way."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Wake:
    """One flag with many reasons: a notification, a freed slot, a stop. Clear it *before* you look, never after."""

    def __init__(self) -> None:
        self._flag = asyncio.Event()

    def set(self) -> None:
        """End the wait. A notification carries no data that is trusted: it only says that there may be work."""
        self._flag.set()

    def clear(self) -> None:
        """Forget all reasons so far. Call it just before looking."""
        self._flag.clear()

    async def wait(self, seconds: float) -> None:
        """Return when there is a reason to look, and after `seconds` in any case: polling finds what notifications miss."""
        if self._flag.is_set() or seconds <= 0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._flag.wait()
