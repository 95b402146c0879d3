"""The only loop: run a service again and again, and wait for a database that is away. Other errors are the supervisor's."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import defaultdict
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeVar

import asyncpg

from rota.db.salvage import TRANSIENT
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from rota.observability.telemetry import Telemetry

A = TypeVar("A")
B = TypeVar("B")

LONGEST_PAUSE = 15.0
"""Most seconds between two tries while the database is away."""

DUTY = 10
"""What is done for the statistics' sake rests this many times longer than it took: it never takes more than a tenth of the time.

Nothing that others wait for does so. A heartbeat that was answered after a second would come ten seconds late.
"""

LONGEST_REST = 300.0
"""Most seconds of such a rest: on a machine that was asleep meanwhile, what was done took as long as the sleep."""


class Service(Protocol):
    """Something to do once, and again after `interval` (None: at once, it waits by itself)."""

    name: str
    interval: timedelta | None

    async def run_once(self) -> None:
        """Do it once."""
        ...


class Pulse:
    """When each service last succeeded, and how often: what /healthz tells."""

    def __init__(self) -> None:
        self.succeeded: dict[str, float] = {}
        """Service -> when it last succeeded; when it began, if it never did."""
        self.successes: defaultdict[str, int] = defaultdict(int)
        self.failures: defaultdict[str, int] = defaultdict(int)
        """Service -> failures and crashes since its last success."""
        self.away: set[str] = set()
        """Services whose last failure was the database's."""
        self.failing: dict[str, tuple[float, str]] = {}
        """Service -> when the first of its failures in a row was, and the cause of the last one."""
        self.asked: dict[str, float] = {}
        """Service -> since when it has been waiting for an answer of the database."""

    def began(self, service: str) -> None:
        """Count the age of a service from now on. A restart after a crash is no success, and changes nothing."""
        self.succeeded.setdefault(service, boottime())

    def ran(self, service: str) -> None:
        """Note a success, or that the service has nothing to do for good reasons."""
        self.failures[service] = 0
        self.successes[service] += 1
        self.away.discard(service)
        self.failing.pop(service, None)
        self.succeeded[service] = boottime()

    def failed(self, service: str, error: BaseException) -> int:
        """Note a failure; return how many that makes in a row."""
        self.failures[service] += 1
        if isinstance(error, TRANSIENT):
            self.away.add(service)
        else:
            self.away.discard(service)
        began = self.failing.get(service, (boottime(), ""))[0]
        self.failing[service] = began, cause_of(error)
        return self.failures[service]

    @contextmanager
    def asking(self, service: str) -> Iterator[None]:
        """Note that the service waits for an answer of the database while the block runs."""
        self.asked[service] = boottime()
        try:
            yield
        finally:
            self.asked.pop(service, None)

    def stalled(self, *, for_seconds: float) -> dict[str, str]:
        """Return service -> why it gets nothing done, for services in that state for so many seconds at least."""
        now = boottime()
        waiting = {
            service: f"have waited {now - began:.0f} s for an answer of the database"
            for service, began in self.asked.copy().items()
            if now - began >= for_seconds
        }
        failing = {
            service: f"have failed for {now - began:.0f} s ({cause})"
            for service, (began, cause) in self.failing.copy().items()
            if now - began >= for_seconds
        }
        return waiting | failing

    def ended(self, service: str) -> None:
        """Forget it: it has stopped on purpose."""
        self.succeeded.pop(service, None)
        self.failing.pop(service, None)


def cause_of(error: BaseException) -> str:
    """Return an error's kind and, where it is transient, the server's message: other messages may show a row."""
    kind = type(error).__name__
    if isinstance(error, asyncpg.PostgresError) and isinstance(error, TRANSIENT) and error.args:
        return f"{kind}: {str(error.args[0])[:200]}"
    return kind


def backoff_pause(failures: int) -> float:
    """Return seconds until the next try after so many failures in a row, jittered so that daemons don't come back in step."""
    longest: float = min(LONGEST_PAUSE, 0.1 * 2.0 ** min(failures, 10))
    return longest * random.uniform(0.5, 1.0)  # noqa: S311  no secret


def rest(usual: timedelta, *, took: float) -> timedelta:
    """Return the interval until the next turn of a service that is to spare the database, after one of so many seconds."""
    return max(usual, timedelta(seconds=min(took * DUTY, LONGEST_REST)))


async def both(first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B]) -> tuple[A, B]:
    """Do both at once, and return when both are done. What one raises ends the other, and leaves as it is, in no group."""
    try:
        async with asyncio.TaskGroup() as group:
            one, two = group.create_task(first), group.create_task(second)
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        raise error from error.__cause__  # with its own cause, and without the group as its context
    return one.result(), two.result()


def cancelling() -> int:
    """Return how often the current task has been told to end: the telling itself may be lost on the way.

    Where the first statement on a new connection fails, asyncpg's pool closes it, and raises that error in the place of a
    CancelledError that comes meanwhile. Whoever takes the error for one that passes by itself would go on for ever.
    """
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def uncancel() -> int:
    """Take back all cancellations of the current task; return how many there were."""
    task, taken = asyncio.current_task(), 0
    while task is not None and task.cancelling():
        task.uncancel()
        taken += 1
    return taken


async def run_forever(service: Service, telemetry: Telemetry, pulse: Pulse) -> NoReturn:
    """Run the service until cancelled. Survives TRANSIENT errors; any other exception propagates to the supervisor."""
    pulse.began(service.name)
    while True:
        try:
            await service.run_once()
        except TRANSIENT as error:
            failures = pulse.failed(service.name, error)
            pause = min(backoff_pause(failures), getattr(service, "longest_pause", LONGEST_PAUSE))
            telemetry.service_failed(service.name, error, failures=failures, again_in=pause)
        else:
            pulse.ran(service.name)
            telemetry.service_ran(service.name)
            pause = 0.0
            if service.interval is not None:
                pause = service.interval.total_seconds() * random.uniform(0.9, 1.0)  # noqa: S311  no secret
        if cancelling():
            raise asyncio.CancelledError
        if pause:
            await asyncio.sleep(pause)


class LoopThread:
    """A thread with an event loop of its own. Leaving the block stops the loop and joins the thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Run it over there; a bug surfaces here, and cancelling here ends it there."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _turn(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(task)
        self._loop.close()


async def on_own_thread(
    service: Service, telemetry: Telemetry, pulse: Pulse, *, close: Callable[[], Coroutine[Any, Any, None]]
) -> NoReturn:
    """Run `run_forever` on a loop of another thread, and at the end `close` over there, where its connection belongs."""
    with LoopThread(service.name) as thread:
        try:
            await thread.run(run_forever(service, telemetry, pulse))
        finally:
            await thread.run(close())
    raise AssertionError("run_forever came to an end")
