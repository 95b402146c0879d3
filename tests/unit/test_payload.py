"""JSON encoding of payloads and results, and text that PostgreSQL can store."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.domain.payload import encode, encode_result, storable_text
from rota.errors import InvalidPayload

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def nested(depth: int) -> Any:
    """Return a number inside `depth` lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, float("nan")]}, "$.a[1]"),
        ({"a": {"b": float("inf")}}, "$.a.b"),
        (float("-inf"), "$"),
        ({"a": "x\x00y"}, "$.a"),
        ({"x\x00y": 1}, "$"),
        (["\ud800"], "$[0]"),
        ({"\udfff": 1}, "$"),
        ({1: "x"}, "$"),
        (nested(102), "more than 100 deep"),
        (nested(5000), "more than 100 deep"),
        ({"a": datetime(2026, 1, 1, tzinfo=UTC)}, "datetime"),
        ({"a": Decimal(1)}, "Decimal"),
        ({"a": b"x"}, "bytes"),
        ({1, 2}, "set"),
        (10**5000, "payload"),
        ("x" * (1 << 20), "bytes"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_a_value_that_is_not_json_is_refused_with_its_path(value: Any, where: str) -> None:
    """Covers NUL, surrogates, NaN, Infinity, depth and size."""
    with pytest.raises(InvalidPayload) as refused:
        encode(value)
    assert where in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize(
    "value",
    [
        2**53 + 1,
        -(10**400),
        1e308,
        5e-324,
        "😀",
        "\u2028 \u202e",
        "",
        None,
        True,
        [],
        {},
        {"": {"": [[]]}},
        nested(99),
        0.1,
    ],
    ids=lambda value: repr(value)[:12],
)
def test_json_values_are_decoded_unchanged(value: Any) -> None:
    """Covers integers of any size, the smallest float and characters of four bytes."""
    assert json.loads(encode(value)) == value


def test_a_tuple_is_encoded_as_a_list_and_limits_count_utf8_bytes() -> None:
    assert encode((1, (2,))) == "[1, [2]]"
    assert encode("x" * 65_534, what="checkpoint")
    with pytest.raises(InvalidPayload, match=r"checkpoint has 98304 bytes|at most 65536"):
        encode("€" * 32_767, what="checkpoint")


@given(values)
def test_encode_returns_storable_json_or_raises_invalid_payload(value: Any) -> None:
    try:
        text = encode(value)
    except InvalidPayload:
        return
    assert "\x00" not in text
    assert text.encode()
    assert "\\u0000" not in text.replace("\\\\", "")
    json.loads(text, parse_constant=pytest.fail)


@given(values)
def test_encoding_a_result_never_raises(value: Any) -> None:
    """The job has succeeded, so an invalid result is escaped or dropped."""
    text = encode_result(value)
    if text is not None:
        assert len(text.encode()) <= 8192
        json.loads(text, parse_constant=pytest.fail)


class RaisingObject:
    """An object whose str, len and bool raise."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __len__ = __bool__ = __str__


@pytest.mark.parametrize(
    "value", [RaisingObject(), {RaisingObject(): 1}, [RaisingObject()], {"a": {RaisingObject(): RaisingObject()}}]
)
def test_a_result_of_objects_that_raise_is_dropped(value: Any) -> None:
    assert encode_result(value) is None


@given(st.text(), st.integers(10, 300))
def test_storable_text_has_no_nul_or_surrogate_and_keeps_its_end(text: str, limit: int) -> None:
    """The limit counts bytes; as JSON the text has at most twice as many."""
    stored = storable_text(text, limit)
    assert "\x00" not in stored
    assert len(stored.encode()) <= limit
    assert len(json.dumps(stored, ensure_ascii=False).encode()) <= 2 * limit + 2
    if text.isascii() and text.isprintable():
        assert stored.endswith(text[-(limit - 4) :])


def test_surrogates_and_nuls_are_escaped_and_not_dropped() -> None:
    assert storable_text("a\x00b\udcffc", 100) == "a\\x00b\\udcffc"
