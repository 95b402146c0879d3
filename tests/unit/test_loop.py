"""The one loop: what it survives, what it lets through, and how long it waits."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from rota.db.pool import ConnectionLost
from rota.lifecycle.heartbeat import Heartbeat
from rota.lifecycle.settle import Settler
from rota.supervision.loop import MAX_BACKOFF_SECONDS, backoff_pause, run_both, run_forever, throttled_interval
from rota.supervision.service_monitor import ServiceMonitor

if TYPE_CHECKING:
    from collections.abc import Callable


class Told:
    """What the loop tells of a service."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.ran = 0

    def service_failed(self, _service: str, _error: BaseException, *, failures: int, again_in: float) -> None:
        assert failures >= 1
        self.pauses.append(again_in)

    def service_ran(self, _service: str) -> None:
        self.ran += 1


class Stopped(Exception):
    """The end of a test's service: a bug, as far as the loop can tell."""


class Scripted:
    """A service that does what it is told, turn by turn."""

    name = "scripted"
    interval: timedelta | None = timedelta(0)

    def __init__(self, turns: list[BaseException | None]) -> None:
        self._turns = turns

    async def run_once(self) -> None:
        if not self._turns:
            raise Stopped
        if (error := self._turns.pop(0)) is not None:
            raise error


class Impatient(Scripted):
    """One that must not be kept waiting."""

    max_backoff_seconds = 0.5


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """What is told; the loop's pauses take no time here."""

    async def at_once(_: float) -> None:
        return

    monkeypatch.setattr(asyncio, "sleep", at_once)
    return Told()


@pytest.mark.parametrize(("kind", "longest"), [(Scripted, MAX_BACKOFF_SECONDS), (Impatient, 0.5)])
async def test_an_absent_database_is_waited_for_longer_and_longer_up_to_the_services_own_limit(
    told: Any, kind: Callable[[list[BaseException | None]], Scripted], longest: float
) -> None:
    """Leases end meanwhile: a heartbeat that waited a quarter of a minute would lose what a short outage spared."""
    with pytest.raises(Stopped):
        await run_forever(kind([OSError()] * 30), told, ServiceMonitor())
    assert len(told.pauses) == 30
    assert max(told.pauses) <= longest
    assert told.pauses[0] <= 0.2


async def test_only_transient_errors_are_survived_here(told: Any) -> None:
    """A lost connection is waited for; any other exception is the supervisor's to count."""
    with pytest.raises(Stopped):
        await run_forever(Scripted([ConnectionLost(), None, TimeoutError()]), told, ServiceMonitor())
    assert told.ran == 1
    with pytest.raises(ZeroDivisionError):
        await run_forever(Scripted([None, ZeroDivisionError()]), told, ServiceMonitor())


@pytest.mark.parametrize("fails", ["first", "second"])
async def test_a_failure_of_one_of_two_tasks_is_retried(fails: str) -> None:
    """Before Python 3.13, a failed TaskGroup leaves its parent marked as cancelled: the loop would take that as its end."""

    class Paired(Scripted):
        async def run_once(self) -> None:
            pair = super().run_once(), waiting()
            await run_both(*(pair if fails == "first" else pair[::-1]))

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(1)

    told, cancelled = Told(), list[int]()
    with pytest.raises(Stopped):
        await run_forever(Paired([OSError(), OSError()]), cast("Any", told), ServiceMonitor())
    assert len(told.pauses) == 2
    assert len(cancelled) == 3


@pytest.mark.parametrize("error", [ConnectionLost, None])
async def test_a_cancellation_that_a_driver_swallows_is_followed_all_the_same(error: type[Exception] | None) -> None:
    """The driver's pool raises the fault of a connection in the place of the cancellation: the loop would go on for ever."""

    class Deaf:
        name = "deaf"
        interval: timedelta | None = timedelta(0)

        async def run_once(self) -> None:
            begun.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if error is not None:
                raise error

    begun, told = asyncio.Event(), Told()
    running = asyncio.create_task(run_forever(Deaf(), cast("Any", told), ServiceMonitor()))
    await begun.wait()
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=10)
    assert done
    assert running.cancelled()


def test_who_spares_the_database_rests_for_a_while_and_not_for_days() -> None:
    """Ten times what it took, but a machine that slept a night during a turn took a night."""
    usual = timedelta(seconds=15)
    assert throttled_interval(usual, took=0.1) == usual
    assert throttled_interval(usual, took=3.0) == timedelta(seconds=30)
    assert throttled_interval(usual, took=8 * 3600.0) <= timedelta(minutes=10)


def test_heartbeats_and_settlements_are_tried_again_well_within_the_shortest_lease() -> None:
    """Three seconds is the shortest lease that the schema allows."""
    assert Heartbeat.max_backoff_seconds <= 1
    assert Settler.max_backoff_seconds <= 1
    assert 0 < backoff_pause(1) <= 0.2
    assert backoff_pause(10**6) <= MAX_BACKOFF_SECONDS
