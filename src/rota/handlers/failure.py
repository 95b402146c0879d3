"""Turn an exception into a failure with a text that can be stored: limited in size, and without the payload's values."""

from __future__ import annotations

import json
import re
import traceback
from typing import Any, Protocol

from rota.domain.outcome import Failed
from rota.domain.payload import storable_text
from rota.handler_exceptions import Permanent

ERROR_LIMIT = 8000
"""The most bytes kept of an error's text. Its end is kept, because a traceback ends with the reason."""

REASON_LIMIT = 1000
"""The most bytes kept of the reason with which a handler cancels its job."""

_MIN_SECRET_CHARACTERS = 4
"""Shorter values of a payload are not masked."""

_QUOTED = re.compile(r"""["'\\]""")
"""Characters that JSON or Python escape."""

_MAX_COMPARED_CHARACTERS = 50_000_000
"""The most characters compared to mask an error's text: about ten milliseconds."""

_MAX_TEXT_CHARACTERS = 1_000_000
"""The longest text that is searched for the values of a payload with more than _FEW_VALUES."""

_FEW_VALUES = 16
"""Up to this number, values of a payload are searched for one by one in a text of any length."""


class HasPayload(Protocol):
    """An object that carries the payload as text."""

    payload: str


def failure_of(error: BaseException, claim: HasPayload, permanent: tuple[type[BaseException], ...] = ()) -> Failed:
    """Return the failure for an exception that a handler raised.

    Exceptions often repeat their input. Every text value of the payload is masked, so that an error can be shown to a person
    who may not see the payload.
    """
    kind = _type_name(error)
    try:
        text = "".join(traceback.format_exception(error, limit=-12))
    except Exception as str_error:  # noqa: BLE001  an exception whose own __str__ raises
        text = f"{kind} (its __str__ raised {_type_name(str_error)})"
    if (masked := _masked(text, claim.payload)) is not None:
        text = masked
    else:
        text = f"{kind} (its text is too long to mask all values of this payload)"
    return Failed(
        kind=storable_text(kind, 200),
        text=storable_text(text, ERROR_LIMIT),
        permanent=isinstance(error, (Permanent, *permanent)),
    )


def retry_error_text(retry: BaseException, claim: HasPayload) -> str:
    """Return the error text of an attempt that raised Retry: the text of the exception that it was raised from, if any."""
    cause = retry.__cause__ if retry.__suppress_context__ else retry.__context__
    return "the handler asked to be called again" if cause is None else failure_of(cause, claim).text


def _type_name(error: BaseException) -> str:
    """Return the name of the exception's type, even if a metaclass overrides `__name__`."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def reason_text(reason: Any) -> str:
    """Return the reason that a handler gave, an object of any type, as text that can be stored."""
    try:
        return storable_text(str(reason), REASON_LIMIT)
    except Exception as error:  # noqa: BLE001  an object whose own __str__ raises
        return f"{type(reason).__name__} (its __str__ raised {_type_name(error)})"


def _masked(text: str, payload: str) -> str | None:
    """Return the text with the payload's values masked; None if masking would take too long."""
    values = _string_values(payload)
    if len(values) > _FEW_VALUES:
        if len(text) > _MAX_TEXT_CHARACTERS:
            return None
        # Most values of a large payload don't occur in the text: look up their first characters before searching for them.
        prefixes = {text[at : at + _MIN_SECRET_CHARACTERS] for at in range(len(text))}
        values = {value for value in values if value[:_MIN_SECRET_CHARACTERS] in prefixes}
    if len(values) * len(text) > _MAX_COMPARED_CHARACTERS:
        return None
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def _string_values(payload: str) -> set[str]:
    """Return the payload's strings, unescaped and as JSON and Python escape them."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return set()
    texts: set[str] = set()
    unvisited: list[Any] = [value]
    while unvisited:
        match unvisited.pop():
            case str() as text if len(text) >= _MIN_SECRET_CHARACTERS:
                texts.add(text)
                if not (text.isascii() and text.isprintable()) or _QUOTED.search(text):
                    texts |= {json.dumps(text)[1:-1], repr(text)[1:-1]}
            case dict() as item:
                unvisited += item.values()
            case list() as item:
                unvisited += item
            case _:
                continue
    return texts
