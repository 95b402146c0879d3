"""From an exception to a failure that can be stored and shown: bounded, storable, and without the payload's values."""

from __future__ import annotations

import json
import re
import traceback
from typing import Any, Protocol

from rota.domain.outcome import Failed
from rota.domain.payload import plain
from rota.handler_exceptions import Permanent

ERROR_LIMIT = 8000
"""Most bytes of an error's text; its end is kept, where the reason stands."""

REASON_LIMIT = 1000
"""Most bytes of the reason with which a handler cancels its job."""

_SHORTEST_SECRET = 4

_QUOTED = re.compile(r"""["'\\]""")
"""Characters that JSON or Python write otherwise."""

_MOST_WORK = 50_000_000
"""Most characters compared to mask an error's text: some ten milliseconds."""

_MOST_TEXT = 1_000_000
"""Most characters of an error's text that are searched for values of a payload with many."""

_FEW = 16
"""Values of a payload that are searched for one by one, however long the text is."""


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
    if (masked := _masked(text, claim.payload)) is not None:
        text = masked
    else:
        text = f"{kind} (its text is too long to take all values of this payload out of it)"
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


def _masked(text: str, payload: str) -> str | None:
    """Return the text without the payload's values; None if that would take too long."""
    values = _texts(payload)
    if len(values) > _FEW:
        if len(text) > _MOST_TEXT:
            return None
        # Most values of a large payload don't occur: their beginnings are looked up, and only the others are searched for.
        pieces = {text[at : at + _SHORTEST_SECRET] for at in range(len(text))}
        values = {value for value in values if value[:_SHORTEST_SECRET] in pieces}
    if len(values) * len(text) > _MOST_WORK:
        return None
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def _texts(payload: str) -> set[str]:
    """Return the payload's strings, as they are and as JSON and Python write them."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return set()
    found: set[str] = set()
    left: list[Any] = [value]
    while left:
        match left.pop():
            case str() as text if len(text) >= _SHORTEST_SECRET:
                found.add(text)
                if not (text.isascii() and text.isprintable()) or _QUOTED.search(text):
                    found |= {json.dumps(text)[1:-1], repr(text)[1:-1]}
            case dict() as item:
                left += item.values()
            case list() as item:
                left += item
            case _:
                continue
    return found
