"""run_forever: which errors it survives and how long it waits."""

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


class FakeTelemetry:
    """Telemetry that records the pauses and the successful runs of a service."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.ran = 0

    def service_failed(self, _service: str, _error: BaseException, *, failures: int, again_in: float) -> None:
        assert failures >= 1
        self.pauses.append(again_in)

    def service_ran(self, _service: str) -> None:
        self.ran += 1


class Stopped(Exception):
    """The scripted service raises it when its script ends."""


class ScriptedService:
    """A service whose runs raise the given errors in turn. None means success."""

    name = "scripted"
    interval: timedelta | None = timedelta(0)

    def __init__(self, turns: list[BaseException | None]) -> None:
        self._turns = turns

    async def run_once(self) -> None:
        if not self._turns:
            raise Stopped
        if (error := self._turns.pop(0)) is not None:
            raise error


class ServiceWithShortBackoff(ScriptedService):
    """A service with its own limit for the backoff."""

    max_backoff_seconds = 0.5


@pytest.fixture
def telemetry(monkeypatch: pytest.MonkeyPatch) -> FakeTelemetry:
    """Replace sleeping by no wait, and return telemetry that records the pauses."""

    async def skip_sleep(_: float) -> None:
        return

    monkeypatch.setattr(asyncio, "sleep", skip_sleep)
    return FakeTelemetry()


@pytest.mark.parametrize(("kind", "longest"), [(ScriptedService, MAX_BACKOFF_SECONDS), (ServiceWithShortBackoff, 0.5)])
async def test_backoff_grows_up_to_the_limit_of_the_service(
    telemetry: Any, kind: Callable[[list[BaseException | None]], ScriptedService], longest: float
) -> None:
    """Heartbeats need a short limit, because leases end meanwhile."""
    with pytest.raises(Stopped):
        await run_forever(kind([OSError()] * 30), telemetry, ServiceMonitor())
    assert len(telemetry.pauses) == 30
    assert max(telemetry.pauses) <= longest
    assert telemetry.pauses[0] <= 0.2


async def test_the_loop_retries_transient_errors_and_raises_all_others(telemetry: Any) -> None:
    """The supervisor counts the other errors."""
    with pytest.raises(Stopped):
        await run_forever(ScriptedService([ConnectionLost(), None, TimeoutError()]), telemetry, ServiceMonitor())
    assert telemetry.ran == 1
    with pytest.raises(ZeroDivisionError):
        await run_forever(ScriptedService([None, ZeroDivisionError()]), telemetry, ServiceMonitor())


@pytest.mark.parametrize("fails", ["first", "second"])
async def test_a_failure_of_one_of_two_tasks_is_retried(fails: str) -> None:
    """Before Python 3.13 a failed TaskGroup leaves its parent marked as cancelled, which would end the loop."""

    class Paired(ScriptedService):
        async def run_once(self) -> None:
            pair = super().run_once(), waiting()
            await run_both(*(pair if fails == "first" else pair[::-1]))

    async def waiting() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(1)

    telemetry, cancelled = FakeTelemetry(), list[int]()
    with pytest.raises(Stopped):
        await run_forever(Paired([OSError(), OSError()]), cast("Any", telemetry), ServiceMonitor())
    assert len(telemetry.pauses) == 2
    assert len(cancelled) == 3


@pytest.mark.parametrize("error", [ConnectionLost, None])
async def test_the_loop_stops_even_if_the_driver_swallows_the_cancellation(error: type[Exception] | None) -> None:
    """The driver's pool may raise a connection error instead of CancelledError."""

    class CancellationSwallowingService:
        name = "swallows_cancellation"
        interval: timedelta | None = timedelta(0)

        async def run_once(self) -> None:
            begun.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            if error is not None:
                raise error

    begun, telemetry = asyncio.Event(), FakeTelemetry()
    running = asyncio.create_task(
        run_forever(CancellationSwallowingService(), cast("Any", telemetry), ServiceMonitor())
    )
    await begun.wait()
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=10)
    assert done
    assert running.cancelled()


def test_a_throttled_interval_grows_with_the_run_time_up_to_ten_minutes() -> None:
    """The cap matters after a machine was suspended during a run."""
    base_interval = timedelta(seconds=15)
    assert throttled_interval(base_interval, took=0.1) == base_interval
    assert throttled_interval(base_interval, took=3.0) == timedelta(seconds=30)
    assert throttled_interval(base_interval, took=8 * 3600.0) <= timedelta(minutes=10)


def test_heartbeats_and_settlements_are_retried_within_the_shortest_lease() -> None:
    """The schema allows leases from three seconds."""
    assert Heartbeat.max_backoff_seconds <= 1
    assert Settler.max_backoff_seconds <= 1
    assert 0 < backoff_pause(1) <= 0.2
    assert backoff_pause(10**6) <= MAX_BACKOFF_SECONDS
