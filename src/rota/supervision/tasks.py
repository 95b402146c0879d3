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

    # Set after the construction: an __init__ in Python would cost every job a third more than its task costs.
    __slots__ = ("job_id", "on_cancel_refused")
    job_id: int | None
    on_cancel_refused: Callable[[int], None]

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task; return False if the caller is the code of another job."""
        caller = job_of_context()
        if caller is not None and caller != self.job_id:
            self.on_cancel_refused(caller)
            return False
        return super().cancel(msg)

    def end(self) -> None:
        """Cancel the task from any context."""
        super().cancel()


def protected_task(
    coroutine: Coroutine[Any, Any, Any],
    *,
    loop: asyncio.AbstractEventLoop,
    on_cancel_refused: Callable[[int], None],
    job_id: int | None = None,
    name: str | None = None,
    context: Context | None = None,
) -> ProtectedTask:
    """Start a task that only its owner and the code of job `job_id` can cancel."""
    task = ProtectedTask(coroutine, loop=loop, name=name, context=context)
    task.job_id, task.on_cancel_refused = job_id, on_cancel_refused
    return task


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
        task = protected_task(
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
