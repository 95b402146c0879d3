"""Tasks that the code of a job can't cancel, and the set that owns them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rota.observability.logs import job_of_context

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from contextvars import Context


class ProtectedTask(asyncio.Task[Any]):
    """A task that code running in the context of a job can't cancel, unless the task runs that very job.

    A handler's tasks, its callbacks, and threads that copy its context inherit that context. So a handler that cancels all tasks
    of the loop cancels only its own.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        loop: asyncio.AbstractEventLoop,
        on_cancel_refused: Callable[[int], None],
        job_id: int | None = None,
        name: str | None = None,
        context: Context | None = None,
    ) -> None:
        self.job_id = job_id
        self._on_cancel_refused = on_cancel_refused
        super().__init__(coroutine, loop=loop, name=name, context=context)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task; return False if the caller is the code of another job."""
        caller = job_of_context()
        if caller is not None and caller != self.job_id:
            self._on_cancel_refused(caller)
            return False
        return super().cancel(msg)

    def end(self) -> None:
        """Cancel the task from any context."""
        super().cancel()


class TaskSet:
    """The tasks of one owner. An exception in one of them does not affect the others."""

    def __init__(self, on_cancel_refused: Callable[[int], None]) -> None:
        self._on_cancel_refused = on_cancel_refused
        self._tasks: set[ProtectedTask] = set()
        self.ending = False
        """Whether the owner has cancelled the tasks."""

    def start(
        self,
        coroutine: Coroutine[Any, Any, Any],
        *,
        job_id: int | None = None,
        name: str | None = None,
        context: Context | None = None,
    ) -> None:
        """Run the coroutine in a task that only the owner and the code of job `job_id` can cancel."""
        loop = asyncio.get_running_loop()
        task = ProtectedTask(
            coroutine, loop=loop, on_cancel_refused=self._on_cancel_refused, job_id=job_id, name=name, context=context
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Cancel all tasks; return once they have ended."""
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
