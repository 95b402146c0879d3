"""Step 1 of a job's life: when to look for due jobs. Due schedules are looked for in the same way."""

from __future__ import annotations

import asyncio
from contextlib import suppress


class Wake:
    """One flag with many reasons: a notification, a freed slot, a stop. Clear it *before* you look, never after."""

    def __init__(self) -> None:
        self._flag = asyncio.Event()

    def set(self) -> None:
        """Make whoever waits look. What a notification says is never trusted, only that it came."""
        self._flag.set()

    def clear(self) -> None:
        """Forget all reasons so far; the caller is about to look."""
        self._flag.clear()

    async def wait(self, seconds: float) -> None:
        """Return when there is a reason to look, at the latest after `seconds`: polling is the truth."""
        if self._flag.is_set() or seconds <= 0:
            await asyncio.sleep(0)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._flag.wait()
