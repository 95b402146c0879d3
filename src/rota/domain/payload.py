"""Encode values as JSON for the database. A value that can't be stored is rejected with its path."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rota.errors import InvalidPayload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LIMITS = {"payload": 1 << 20, "checkpoint": 1 << 16, "meta": 1 << 16, "result": 1 << 13}
"""The largest size of each kind of value, in bytes of JSON text."""

MAX_DEPTH = 100

_CONTROL_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\t\n\r"}


def encode(value: Any, *, what: str = "payload") -> str:
    """Return `value` as JSON text. Raises InvalidPayload with the path of a value that PostgreSQL or other languages can't read."""
    try:
        # With the same spaces as jsonb output, so that Python and the database count the same bytes.
        text = _JSON.encode(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        _raise_first_fault(value, what)
        raise InvalidPayload(f"{what}: {error}") from error
    # _raise_first_fault() finds the path of a fault, but is slow. Call it only for values that may be invalid.
    if "\\u0000" in text or not _is_valid_shape(value, 0):
        _raise_first_fault(value, what)
    if size > LIMITS[what]:
        raise InvalidPayload(
            f"{what} has {size} bytes as JSON, at most {LIMITS[what]} fit: store it elsewhere and send a reference"
        )
    return text


def encode_result(value: Any) -> str | None:
    """Return a handler's result as JSON that can be stored, or None if it is None, not JSON, or too large.

    The job's work is done at this point, so an unusual result must not fail it: NUL and lone surrogates are escaped.
    """
    if value is None:
        return None
    try:
        if not _may_fit(value, LIMITS["result"]):
            return None
        text = json.dumps(_escaped(value), ensure_ascii=False, allow_nan=False)
    except Exception:  # noqa: BLE001  methods of the handler's own objects may raise anything
        return None
    return text if len(text.encode()) <= LIMITS["result"] else None


def interval_text(value: timedelta) -> str:
    """Format a duration exactly for PostgreSQL. Not in days: there, a day may last 23 or 25 hours."""
    # Not in microseconds alone: PostgreSQL 14 limits them to 32 bits.
    whole, microseconds = divmod(abs(value // timedelta(microseconds=1)), 1_000_000)
    sign = "-" if value < timedelta(0) else ""
    return f"{sign}{whole}.{microseconds:06} seconds" if microseconds else f"{sign}{whole} seconds"


def storable_text(text: str, limit: int) -> str:
    """Return text that PostgreSQL can store: no NUL, no surrogates, and at most the last `limit` bytes.

    Other control characters are escaped, too, in fewer bytes than JSON needs: as JSON, the text is at most twice as long.
    """
    raw = text[-limit:].translate(_CONTROL_ESCAPES).encode("utf-8", "backslashreplace")
    if len(raw) > limit or len(text) > limit:
        raw = b"... " + raw[-(limit - 4) :]
    return raw.decode("utf-8", "ignore")


def _escaped(value: Any) -> Any:
    match value:
        case str():
            return value.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_escaped(str(key)): _escaped(item) for key, item in value.items()}
        case list() | tuple():
            return [_escaped(item) for item in value]
        case _:
            return value


def _may_fit(value: Any, size: int) -> bool:
    """Return False if the value needs more than `size` bytes as JSON. Takes time in proportion to `size`, not to the value."""
    pending = [value]
    while pending and size >= 0:
        item = pending.pop()
        match item:
            case str():
                size -= len(item)
            case dict() | list() | tuple():
                size -= len(item)
                if size >= 0:
                    pending += [*item.keys(), *item.values()] if isinstance(item, dict) else item
            case _:
                size -= 1
    return size >= 0


def _reject_type(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not JSON: turn it into text, a number, a list or an object")


_LIST_TYPES = (list, tuple)
_SCALAR_TYPES = frozenset({str, int, float, bool, type(None)})
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, default=_reject_type)


def _raise_first_fault(value: Any, what: str) -> None:
    for path, fault in _faults(value, "$", 0):
        raise InvalidPayload(f"{what} {path}: {fault}")


def _is_valid_shape(value: Any, depth: int) -> bool:
    """Return whether all keys are str and the nesting is not too deep. The JSON text shows neither."""
    items: Iterable[Any]
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                return False
        items = value.values()
    elif isinstance(value, _LIST_TYPES):
        items = value
    else:
        return True
    if depth > MAX_DEPTH:
        return False
    for item in items:  # noqa: SIM110  a generator is slower than this whole function
        if type(item) not in _SCALAR_TYPES and not _is_valid_shape(item, depth + 1):
            return False
    return True


def _faults(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:  # noqa: PLR0912
    if depth > MAX_DEPTH:
        yield path[:200], f"nests more than {MAX_DEPTH} deep"
        return
    match value:
        case str():
            if (fault := _text_fault(value)) is not None:
                yield path, fault
        case float():
            if not math.isfinite(value):
                yield path, f"{value} is not JSON: use null or text"
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    yield path, f"the key {key!r} is not text"
                elif (fault := _text_fault(key)) is not None:
                    yield path, f"a key: {fault}"
                else:
                    yield from _faults(item, f"{path}.{key}", depth + 1)
        case list() | tuple():
            for index, item in enumerate(value):
                yield from _faults(item, f"{path}[{index}]", depth + 1)
        case _:
            return


def _text_fault(text: str) -> str | None:
    if text.isascii():
        return "a NUL character can't be stored: encode binary data as base64" if "\x00" in text else None
    if "\x00" in text:
        return "a NUL character can't be stored: encode binary data as base64"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "a lone surrogate is no character: decode the text properly before sending it"
    return None
