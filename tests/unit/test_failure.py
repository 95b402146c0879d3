"""From an exception to what is stored of it: bounded, storable, and without the payload's values."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.handler_exceptions import Permanent
from rota.handlers.failure import ERROR_LIMIT, failure_of, reason_text


@dataclass
class Carrier:
    """What carries a payload as text."""

    payload: str = "{}"


class Unspeakable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def raised(error: BaseException) -> BaseException:
    """Raise it, so that it has a traceback."""
    try:
        raise error  # noqa: TRY301 - a traceback of one line
    except BaseException as caught:  # noqa: BLE001 - that is what it is for
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 5_000_000),
        KeyError("\x00\udcff"),
        Unspeakable(),
        ExceptionGroup("g", [Unspeakable()]),
        SystemExit(1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_exception_has_a_text_that_can_be_stored(error: BaseException) -> None:
    """Bounded in bytes, without NUL, in UTF-8; its kind is the class's name."""
    failed = failure_of(raised(error), Carrier())
    assert failed.kind == type(error).__name__
    assert len(failed.text.encode()) <= ERROR_LIMIT
    assert "\x00" not in failed.text
    assert not failed.permanent


def test_permanent_is_what_says_so_and_what_was_declared() -> None:
    """Subclasses included."""
    assert failure_of(Permanent(), Carrier()).permanent
    assert failure_of(KeyError(), Carrier(), (LookupError,)).permanent
    assert not failure_of(KeyError(), Carrier(), (ValueError,)).permanent


SECRETS = ["S3CRET-canary", 'with "quotes" and \\', "ümläut € 😀", "line\nbreak"]


@pytest.mark.parametrize("secret", SECRETS)
def test_the_payloads_values_are_masked(secret: str) -> None:
    """B103: exceptions like to repeat their input, as it is, as repr, as JSON."""
    payload = json.dumps({"deep": [{"password": secret}]})
    told = f"bad: {secret} / {secret!r} / {json.dumps(secret)} / {payload}"
    text = failure_of(raised(ValueError(told)), Carrier(payload)).text
    assert secret not in text
    assert repr(secret)[1:-1] not in text
    assert "***" in text


@given(st.text())
def test_payloads_that_are_no_json_do_not_matter(payload: str) -> None:
    """Describing a failure never fails."""
    assert failure_of(ValueError("x"), Carrier(payload)).text


def test_a_large_payload_beside_a_long_text_holds_up_nobody() -> None:
    """A million bytes of short strings, repeated in the exception: still a moment, for the loop stands still meanwhile."""
    items = [f"value{n}" for n in range(60_000)]
    payload = json.dumps(items)
    error = raised(ValueError(f"can't use {items}"))
    began = time.monotonic()
    failed = failure_of(error, Carrier(payload))
    assert time.monotonic() - began < 3
    assert failed.kind == "ValueError"
    assert "value59999" not in failed.text


@pytest.mark.parametrize(
    ("reason", "text"),
    [("moot", "moot"), (None, "None"), (7, "7"), ("a\x00b", "a\\x00b"), (Unspeakable(), "Unspeakable")],
    ids=lambda value: type(value).__name__,
)
def test_a_reason_becomes_text_whatever_it_is(reason: Any, text: str) -> None:
    """It stands in the ledger, where a person reads it."""
    assert reason_text(reason).startswith(text)
    assert len(reason_text("x" * 10**6).encode()) <= 1000


def test_an_error_beside_a_payload_of_many_strings_is_masked_in_milliseconds() -> None:
    """Neither 80,000 strings nor a common beginning of all of them may hold the interpreter for long."""
    values = [f"customer-{n:06}" for n in range(80_000)]
    carrier = Carrier(json.dumps([*values, "s3cret words"]))
    began = time.process_time()
    failed = failure_of(raised(ValueError("can't use s3cret words")), carrier)
    assert "s3cret" not in failed.text
    failure_of(raised(ValueError("can't use customer-000007 " * 400)), carrier)
    assert time.process_time() - began < 0.6, "0.1 s on an idle machine"


def test_masking_finds_values_in_every_way_of_writing_them() -> None:
    """Among many others, as they are, as JSON and as Python writes them."""
    secret = 'pass "word"\n\u00e9'
    carrier = Carrier(json.dumps([*(f"other {n}" for n in range(100)), secret]))
    for text in (secret, repr(secret), json.dumps(secret), str({"a": secret})):
        failed = failure_of(raised(ValueError(text)), carrier)
        assert "word" not in failed.text
