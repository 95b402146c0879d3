"""Orders to stop: each is taken once, whenever it comes, and only a main loop that doesn't turn is ended by force."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, cast

from rota.runtime import shutdown as stops_module
from rota.runtime.shutdown import Stops, _LastResort

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


async def test_the_second_order_counts_while_the_first_one_still_unwinds() -> None:
    """Giving up a connection that is being opened takes a moment: whoever presses Ctrl-C twice within it means both."""
    stops = Stops()
    async with stops.cutting():
        stops.order()
        try:
            await asyncio.Event().wait()
        finally:
            stops.order()
    assert stops.claiming.is_set()
    assert stops.running.is_set()


async def test_an_order_after_the_block_cuts_nothing() -> None:
    """From then on there is something to drain."""
    stops = Stops()
    async with stops.cutting():
        pass
    stops.order()
    assert stops.claiming.is_set()
    assert not stops.running.is_set()


class Asked:
    """A loop that is asked to turn and has come to its end meanwhile."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def call_soon_threadsafe(self, _: Callable[[], None]) -> None:
        self.asked.set()


def test_a_loop_that_ends_while_it_is_asked_whether_it_turns_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the block is what a loop that turns comes to: the process has ended well, and must say so."""
    monkeypatch.setattr(stops_module, "TURNS_WITHIN", 0.5)
    loop, hung = Asked(), threading.Event()
    last_resort = _LastResort(cast("Any", loop), patience=(0.0, 0.0), dump=lambda: None, hung=hung.set)
    with last_resort.beside_the_loop():
        last_resort._orders.put(0.0)  # as a signal does
        assert loop.asked.wait(10)
    assert not hung.is_set()


def test_a_loop_that_never_turns_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that blocks it keeps the orders from being taken."""
    monkeypatch.setattr(stops_module, "TURNS_WITHIN", 0.01)
    hung = threading.Event()
    last_resort = _LastResort(cast("Any", Asked()), patience=(0.0, 0.0), dump=lambda: None, hung=hung.set)
    with last_resort.beside_the_loop():
        last_resort._orders.put(0.0)  # as a signal does
        assert hung.wait(10)
