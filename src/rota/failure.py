"""From an exception to a failure that can be stored and shown: bounded, storable, and without the payload's values."""

from __future__ import annotations

import json
import traceback
from typing import Any, Protocol

from rota.domain.outcome import Failed
from rota.payload import plain
from rota.signals import Permanent

ERROR_LIMIT = 8000
"""Most bytes of an error's text; its end is kept, where the reason stands."""

REASON_LIMIT = 1000
"""Most bytes of the reason with which a handler cancels its job."""

_SHORTEST_SECRET = 4

_MOST_WORK = 200_000_000
"""Most characters compared to mask an error's text: a fraction of a second, in which the loop stands still."""


class HasPayload(Protocol):
    """What carries the payload as text."""

    payload: str


def describe(error: BaseException, claim: HasPayload, permanent: tuple[type[BaseException], ...] = ()) -> Failed:
    """Return the failure for an exception that a handler raised.

    Exceptions like to repeat their input. Whatever text the payload holds is masked, so that an error can be looked at
    without looking at the payload.
    """
    kind = _kind(error)
    try:
        text = "".join(traceback.format_exception(error, limit=-12))
    except Exception as second:  # noqa: BLE001  an exception whose own __str__ raises
        text = f"{kind} (its text can't be had: {_kind(second)})"
    secrets = _texts(claim.payload)
    if len(secrets) * len(text) > _MOST_WORK:
        text = f"{kind} (its text is too long to take all values of this payload out of it)"
    for secret in secrets:
        text = text.replace(secret, "***")
    return Failed(
        kind=plain(kind, 200),
        text=plain(text, ERROR_LIMIT),
        permanent=isinstance(error, (Permanent, *permanent)),
    )


def why_again(wish: BaseException, claim: HasPayload) -> str:
    """Return what stands as the error of an attempt that wants another one: the error that the wish was raised from, if any."""
    because = wish.__cause__ if wish.__suppress_context__ else wish.__context__
    return "the handler asked to be called again" if because is None else describe(because, claim).text


def _kind(error: BaseException) -> str:
    """Return the name of its type, past whatever a metaclass makes of the attribute."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def readable(reason: Any) -> str:
    """Return a reason that a handler gave, whatever it is, as text that can be stored."""
    try:
        return plain(str(reason), REASON_LIMIT)
    except Exception as error:  # noqa: BLE001  an object whose own __str__ raises
        return f"{type(reason).__name__} (its text can't be had: {_kind(error)})"


def _texts(payload: str) -> list[str]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return []
    found: set[str] = set()
    left: list[Any] = [value]
    while left:
        match left.pop():
            case str() as text if len(text) >= _SHORTEST_SECRET:
                found |= {text, json.dumps(text)[1:-1], repr(text)[1:-1]}
            case dict() as item:
                left += item.values()
            case list() as item:
                left += item
            case _:
                continue
    return sorted(found, key=len, reverse=True)
