"""Wait for facts with a deadline. Only this file lets tests sleep."""

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
) -> T: ...  # falsy values of T are never returned
@overload
async def eventually(fact: Callable[[], T | None], *, within: float = ..., what: str = ...) -> T: ...
async def eventually(fact: Callable[[], object], *, within: float = 10.0, what: str = "") -> object:
    """Return the first truthy value of `fact()`, which may be a coroutine function. Fail if there is none in time.

    An exception of `fact` propagates at once.
    """
    deadline = time.monotonic() + within
    while True:
        value = fact()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        _check_deadline(deadline, within, what, value)
        await asyncio.sleep(POLL_S)


def until(fact: Callable[[], T | None], *, within: float = 10.0, what: str = "") -> T:
    """Blocking variant of eventually()."""
    deadline = time.monotonic() + within
    while True:
        if value := fact():
            return value
        _check_deadline(deadline, within, what, value)
        time.sleep(POLL_S)


def _check_deadline(deadline: float, within: float, what: str, value: object) -> None:
    if time.monotonic() > deadline:
        raise AssertionError(f"timeout of {within:g} s: waited for {what or 'a condition'} (last value: {value!r})")


async def pace(seconds: float) -> None:
    """Let a load generator pause between two actions. Tests must not use it."""
    await asyncio.sleep(seconds)
