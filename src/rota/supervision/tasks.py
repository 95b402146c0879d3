"""Tasks of the daemon that code of a job can't cancel, and the set that owns them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rota.observability.logs import job_of_context

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextvars import Context


class OwnedTask(asyncio.Task[Any]):
    """A task that refuses to be cancelled from the context of a job, unless it runs that very job.

    The context of a handler is inherited by its tasks, its callbacks and by threads that copy it, so a handler that cancels all
    tasks of the loop reaches only its own.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        loop: asyncio.AbstractEventLoop,
        refused: Callable[[int], None],
        job_id: int | None = None,
        name: str | None = None,
        context: Context | None = None,
    ) -> None:
        self.job_id = job_id
        self._refused = refused
        super().__init__(work, loop=loop, name=name, context=context)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task; return False when the caller is the code of another job."""
        caller = job_of_context()
        if caller is not None and caller != self.job_id:
            self._refused(caller)
            return False
        return super().cancel(msg)

    def end(self) -> None:
        """Cancel the task, whatever the caller's context is."""
        super().cancel()


class Tasks:
    """The tasks of one owner. An exception in one of them leaves the others alone."""

    def __init__(self, refused: Callable[[int], None]) -> None:
        self._refused = refused
        self._tasks: set[OwnedTask] = set()
        self.ending = False
        """Whether the owner has cancelled them."""

    def start(
        self,
        work: Coroutine[Any, Any, Any],
        *,
        job_id: int | None = None,
        name: str | None = None,
        context: Context | None = None,
    ) -> None:
        """Run `work` in a task. Only the owner, and code of job `job_id`, can cancel it."""
        loop = asyncio.get_running_loop()
        task = OwnedTask(work, loop=loop, refused=self._refused, job_id=job_id, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Cancel all tasks, and return once they have ended."""
        self.ending = True
        for task in self._tasks.copy():
            task.end()
        await self.wait()

    async def wait(self) -> None:
        """Return once all tasks have ended."""
        while self._tasks:
            ended = asyncio.Event()
            for task in self._tasks:
                task.add_done_callback(lambda _, ended=ended: ended.set())  # type: ignore[misc]
            await ended.wait()
