"""Shutdown requests: each one counts, and only a blocked main loop is ended by force."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

from rota.runtime import shutdown
from rota.runtime.shutdown import ShutdownRequests, _BlockedLoopGuard

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


async def test_the_second_request_counts_while_startup_is_being_cancelled() -> None:
    """Cancelling the opening of a connection takes a moment. A second Ctrl-C within it must not be lost."""
    requests = ShutdownRequests()
    async with requests.cancelling_startup():
        requests.request_next()
        try:
            await asyncio.Event().wait()
        finally:
            requests.request_next()
    assert requests.drain_requested.is_set()
    assert requests.interrupt_requested.is_set()


async def test_a_request_after_startup_cancels_nothing() -> None:
    """After startup there may be jobs to drain."""
    requests = ShutdownRequests()
    async with requests.cancelling_startup():
        pass
    requests.request_next()
    assert requests.drain_requested.is_set()
    assert not requests.interrupt_requested.is_set()


class BlockedLoop:
    """A loop that runs no callback."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def call_soon_threadsafe(self, _: Callable[[], None]) -> None:
        self.asked.set()


def test_a_loop_that_ends_before_it_responds_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that leaves the block has shut down properly, so the process must not be ended as hung."""
    monkeypatch.setattr(shutdown, "LOOP_RESPONSE_SECONDS", 0.5)
    loop, hung = BlockedLoop(), threading.Event()
    guard = _BlockedLoopGuard(cast("Any", loop), time_limits=(0.0, 0.0), dump=lambda: None, hung=hung.set)
    with guard.installed():
        guard._request_seconds.put(0.0)  # the signal handler does the same
        assert loop.asked.wait(10)
    assert not hung.is_set()


def test_a_blocked_loop_is_reported_as_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a handler blocks the loop, it can't carry out shutdown requests."""
    monkeypatch.setattr(shutdown, "LOOP_RESPONSE_SECONDS", 0.01)
    hung = threading.Event()
    guard = _BlockedLoopGuard(cast("Any", BlockedLoop()), time_limits=(0.0, 0.0), dump=lambda: None, hung=hung.set)
    with guard.installed():
        guard._request_seconds.put(0.0)  # the signal handler does the same
        assert hung.wait(10)
