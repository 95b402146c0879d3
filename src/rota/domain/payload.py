"""JSON on its way into the database and out of it: what can't be stored is refused with the path to it."""

from __future__ import annotations

import json
import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rota.errors import InvalidPayload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LIMITS = {"payload": 1 << 20, "checkpoint": 1 << 16, "meta": 1 << 16, "result": 1 << 13}
"""Most bytes of each kind of value, as text."""

DEPTH = 100

_UNSEEN = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\t\n\r"}


def encode(value: Any, *, what: str = "payload") -> str:
    """Return `value` as JSON text. Raises InvalidPayload, naming the path, for what PostgreSQL or other languages can't take."""
    try:
        # With the blanks that the database writes, too, so that both count the same bytes.
        text = _JSON.encode(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        _check(value, what)
        raise InvalidPayload(f"{what}: {error}") from error
    # The walk that knows the path costs more than all the rest: only for what may have one.
    if "\\u0000" in text or not _is_plain(value, 0):
        _check(value, what)
    if size > LIMITS[what]:
        raise InvalidPayload(
            f"{what} has {size} bytes as JSON, at most {LIMITS[what]} fit: store it elsewhere and send a reference"
        )
    return text


def encode_result(value: Any) -> str | None:
    """Return a handler's result as JSON that can surely be stored, or None when it is nothing, no JSON, or too large.

    The work is done when a result is looked at: an odd one must not make the job fail. So NUL and lone surrogates are escaped.
    """
    if value is None:
        return None
    try:
        if not _may_fit(value, LIMITS["result"]):
            return None
        text = json.dumps(_escaped(value), ensure_ascii=False, allow_nan=False)
    except Exception:  # noqa: BLE001  objects of the handler's own making take part in this
        return None
    return text if len(text.encode()) <= LIMITS["result"] else None


def seconds(value: timedelta) -> str:
    """Write a duration exactly, as PostgreSQL reads it: not in days, which are of another kind there."""
    # PostgreSQL 14 takes no number of microseconds beyond 32 bits.
    whole, rest = divmod(abs(value // timedelta(microseconds=1)), 1_000_000)
    sign = "-" if value < timedelta(0) else ""
    return f"{sign}{whole}.{rest:06} seconds" if rest else f"{sign}{whole} seconds"


def plain(text: str, limit: int) -> str:
    """Return text that PostgreSQL can store: no NUL, no surrogates, and at most `limit` bytes, of which the end counts most.

    Other control characters are escaped, too, by fewer bytes than JSON would need: as JSON it is at most twice as long.
    """
    raw = text[-limit:].translate(_UNSEEN).encode("utf-8", "backslashreplace")
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
    """Say whether the value may have at most `size` bytes as JSON, in a time that is bounded by `size`."""
    left = [value]
    while left and size >= 0:
        item = left.pop()
        match item:
            case str():
                size -= len(item)
            case dict() | list() | tuple():
                size -= len(item)
                if size >= 0:
                    left += [*item.keys(), *item.values()] if isinstance(item, dict) else item
            case _:
                size -= 1
    return size >= 0


def _refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} is not JSON: turn it into text, a number, a list or an object")


_LISTS = (list, tuple)
_SCALARS = frozenset({str, int, float, bool, type(None)})
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, default=_refuse)


def _check(value: Any, what: str) -> None:
    for path, fault in _faults(value, "$", 0):
        raise InvalidPayload(f"{what} {path}: {fault}")


def _is_plain(value: Any, depth: int) -> bool:
    """Say whether it surely has no key but text and doesn't nest too deep, neither of which JSON text shows."""
    items: Iterable[Any]
    if isinstance(value, dict):
        for key in value:
            if type(key) is not str:
                return False
        items = value.values()
    elif isinstance(value, _LISTS):
        items = value
    else:
        return True
    if depth > DEPTH:
        return False
    for item in items:  # noqa: SIM110  a generator costs more than all of it
        if type(item) not in _SCALARS and not _is_plain(item, depth + 1):
            return False
    return True


def _faults(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:  # noqa: PLR0912
    if depth > DEPTH:
        yield path[:200], f"nests more than {DEPTH} deep"
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
