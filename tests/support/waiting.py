"""Wait for facts, with a deadline: the only place in the tests that lets time pass."""

from __future__ import annotations

import asyncio
import inspect
import time
from typing import TYPE_CHECKING, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

POLL_S = 0.01


@overload
async def eventually(
    fact: Callable[[], Awaitable[T | None]], *, within: float = ..., what: str = ...
) -> T: ...  # the falsy forms of T never come back
@overload
async def eventually(fact: Callable[[], T | None], *, within: float = ..., what: str = ...) -> T: ...
async def eventually(fact: Callable[[], object], *, within: float = 10.0, what: str = "") -> object:
    """Return the first truthy value of `fact()`, which may be a coroutine function; fail when none comes in time.

    What `fact` raises leaves this at once: a fact that can't be asked for is no fact that is still to come.
    """
    deadline = time.monotonic() + within
    while True:
        value = fact()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        _still_time(deadline, within, what, value)
        await asyncio.sleep(POLL_S)


def until(fact: Callable[[], T | None], *, within: float = 10.0, what: str = "") -> T:
    """The blocking variant of eventually()."""
    deadline = time.monotonic() + within
    while True:
        if value := fact():
            return value
        _still_time(deadline, within, what, value)
        time.sleep(POLL_S)


def _still_time(deadline: float, within: float, what: str, value: object) -> None:
    if time.monotonic() > deadline:
        raise AssertionError(
            f"{what or 'what was waited for'} has not come about within {within:g} s (last seen: {value!r})"
        )


async def pace(seconds: float) -> None:
    """Let a load generator pause between two actions. A test waits for facts instead."""
    await asyncio.sleep(seconds)
