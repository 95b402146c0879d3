"""The stored text of an exception: bounded, valid for PostgreSQL, and without values of the payload."""

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
class Attempt:
    """An attempt with a JSON payload."""

    payload: str = "{}"


class ErrorWithoutText(Exception):
    """An exception whose str() raises."""

    def __str__(self) -> str:
        raise RuntimeError

    __repr__ = __str__


def raise_and_catch(error: BaseException) -> BaseException:
    """Return the exception with a traceback."""
    try:
        raise error  # noqa: TRY301 - a traceback of one line
    except BaseException as caught:  # noqa: BLE001 - that is what it is for
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x" * 5_000_000),
        KeyError("\x00\udcff"),
        ErrorWithoutText(),
        ExceptionGroup("g", [ErrorWithoutText()]),
        SystemExit(1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_exception_has_a_text_that_can_be_stored(error: BaseException) -> None:
    """The text is bounded UTF-8 without NUL, and the kind is the name of the class."""
    failed = failure_of(raise_and_catch(error), Attempt())
    assert failed.kind == type(error).__name__
    assert len(failed.text.encode()) <= ERROR_LIMIT
    assert "\x00" not in failed.text
    assert not failed.permanent


def test_permanent_and_declared_exceptions_make_the_failure_permanent() -> None:
    """Subclasses count too."""
    assert failure_of(Permanent(), Attempt()).permanent
    assert failure_of(KeyError(), Attempt(), (LookupError,)).permanent
    assert not failure_of(KeyError(), Attempt(), (ValueError,)).permanent


SECRETS = ["S3CRET-canary", 'with "quotes" and \\', "ümläut € 😀", "line\nbreak"]


@pytest.mark.parametrize("secret", SECRETS)
def test_values_of_the_payload_are_masked_in_the_error(secret: str) -> None:
    """Exceptions often repeat their input as it is, as repr or as JSON."""
    payload = json.dumps({"deep": [{"password": secret}]})
    message = f"bad: {secret} / {secret!r} / {json.dumps(secret)} / {payload}"
    text = failure_of(raise_and_catch(ValueError(message)), Attempt(payload)).text
    assert secret not in text
    assert repr(secret)[1:-1] not in text
    assert "***" in text


@given(st.text())
def test_describing_a_failure_works_with_an_invalid_payload(payload: str) -> None:
    assert failure_of(ValueError("x"), Attempt(payload)).text


def test_masking_a_long_error_with_a_large_payload_is_fast() -> None:
    """The event loop is blocked meanwhile."""
    items = [f"value{n}" for n in range(60_000)]
    payload = json.dumps(items)
    error = raise_and_catch(ValueError(f"can't use {items}"))
    began = time.monotonic()
    failed = failure_of(error, Attempt(payload))
    assert time.monotonic() - began < 3
    assert failed.kind == "ValueError"
    assert "value59999" not in failed.text


@pytest.mark.parametrize(
    ("reason", "text"),
    [("moot", "moot"), (None, "None"), (7, "7"), ("a\x00b", "a\\x00b"), (ErrorWithoutText(), "ErrorWithoutText")],
    ids=lambda value: type(value).__name__,
)
def test_every_reason_becomes_text_that_can_be_stored(reason: Any, text: str) -> None:
    assert reason_text(reason).startswith(text)
    assert len(reason_text("x" * 10**6).encode()) <= 1000


def test_masking_with_a_payload_of_many_strings_is_fast() -> None:
    """Covers 80,000 strings, all with a common prefix."""
    values = [f"customer-{n:06}" for n in range(80_000)]
    attempt = Attempt(json.dumps([*values, "s3cret words"]))
    began = time.process_time()
    failed = failure_of(raise_and_catch(ValueError("can't use s3cret words")), attempt)
    assert "s3cret" not in failed.text
    failure_of(raise_and_catch(ValueError("can't use customer-000007 " * 400)), attempt)
    assert time.process_time() - began < 0.6, "it takes 0.1 s on an idle machine"


def test_masking_finds_values_in_plain_json_and_repr_form() -> None:
    secret = 'pass "word"\n\u00e9'
    attempt = Attempt(json.dumps([*(f"other {n}" for n in range(100)), secret]))
    for text in (secret, repr(secret), json.dumps(secret), str({"a": secret})):
        failed = failure_of(raise_and_catch(ValueError(text)), attempt)
        assert "word" not in failed.text
