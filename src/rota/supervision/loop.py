"""Run a service again and again. Transient errors lead to a retry after a backoff; other errors propagate to the supervisor."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar

from rota.db.salvage import TRANSIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rota.observability.telemetry import Telemetry
    from rota.supervision.service_monitor import ServiceMonitor

A = TypeVar("A")
B = TypeVar("B")

MAX_BACKOFF_SECONDS = 15.0
"""Longest pause between two attempts while the database is unreachable."""

THROTTLE_FACTOR = 10
"""Throttled work pauses for this many times its own duration, so it uses at most 10 % of the time.

Only statistics and housekeeping are throttled. A throttled heartbeat would come ten seconds late after one slow answer.
"""

MAX_THROTTLE_SECONDS = 300.0
"""Longest such pause. Without it, a suspension of the machine during the work would count as its duration."""


class Service(Protocol):
    """Background work that is repeated after `interval`, or at once if it is None (the service then waits by itself)."""

    name: str
    interval: timedelta | None

    async def run_once(self) -> None:
        """Do the work once."""
        ...


def backoff_pause(failures: int) -> float:
    """Return the seconds to wait after this many failures in a row. Random jitter keeps daemons from retrying together."""
    without_jitter: float = min(MAX_BACKOFF_SECONDS, 0.1 * 2.0 ** min(failures, 10))
    return without_jitter * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def throttled_interval(usual: timedelta, *, took: float) -> timedelta:
    """Return the interval until the next turn of a throttled service. `took`: seconds that its last turn took."""
    return max(usual, timedelta(seconds=min(took * THROTTLE_FACTOR, MAX_THROTTLE_SECONDS)))


async def run_both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Run both concurrently and return their results. If one raises, cancel the other and raise that error, not in a group."""
    try:
        async with asyncio.TaskGroup() as group:
            first_task, second_task = group.create_task(first), group.create_task(second)
            # Wait inside the block: before Python 3.13, an error that comes while the block ends marks this task as cancelled.
            return await first_task, await second_task
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        raise error from error.__cause__  # with its own cause, and without the group as its context


def is_cancel_pending() -> bool:
    """Return whether the current task has been cancelled, even if no CancelledError has reached it.

    If the first statement on a new connection fails, asyncpg's pool closes the connection and raises that error in place of a
    CancelledError that arrives meanwhile. A loop that retries after that error would never end.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def uncancel() -> int:
    """Take back all cancellations of the current task; return how many there were."""
    task, count = asyncio.current_task(), 0
    while task is not None and task.cancelling():
        task.uncancel()
        count += 1
    return count


async def run_forever(service: Service, telemetry: Telemetry, monitor: ServiceMonitor) -> NoReturn:
    """Run the service until cancelled. Retries after TRANSIENT errors; any other exception propagates."""
    monitor.record_start(service.name)
    while True:
        try:
            await service.run_once()
        except TRANSIENT as error:
            failures = monitor.record_failure(service.name, error)
            pause = min(backoff_pause(failures), getattr(service, "max_backoff_seconds", MAX_BACKOFF_SECONDS))
            telemetry.service_failed(service.name, error, failures=failures, again_in=pause)
        else:
            monitor.record_success(service.name)
            telemetry.service_ran(service.name)
            pause = 0.0
            if service.interval is not None:
                pause = service.interval.total_seconds() * random.uniform(0.9, 1.0)  # noqa: S311  no secret
        if is_cancel_pending():
            raise asyncio.CancelledError
        if pause:
            await asyncio.sleep(pause)


class LoopThread:
    """A thread with its own event loop. Leaving the block stops the loop and joins the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Run a coroutine on the thread. Awaiting the future raises its exception; cancelling the future cancels it."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
        self._loop.close()


async def run_on_own_thread(
    service: Service, telemetry: Telemetry, monitor: ServiceMonitor, *, close: Callable[[], Coroutine[Any, Any, None]]
) -> NoReturn:
    """Run the service on a new thread until cancelled. Then call `close` on that thread: connections belong to its loop."""
    with LoopThread(service.name) as thread:
        try:
            await thread.run(run_forever(service, telemetry, monitor))
        finally:
            await thread.run(close())
    raise AssertionError("run_forever returned")
