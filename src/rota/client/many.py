"""Many jobs of one call: their rows for COPY, or statements for connections that can't; which payload an error is about."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from rota.client.columns import option
from rota.domain.validation import check_handler_name
from rota.errors import InvalidPayload, Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rota.db.drivers import Query

    Encode = Callable[[Any], str]

OWN = frozenset({"run_at", "priority", "unique_key", "idempotency_key", "meta"})
"""What may differ from job to job in `enqueue_many`, given as a function of the payload."""

BATCH = 5000
"""Jobs in a COPY or a statement, and …"""

BATCH_BYTES = 4 << 20
"""… about how many bytes of a statement."""

PIECE = 1 << 13
"""About how many bytes of a COPY are sent at once: the server works on them while the next are made."""

_NULL = "\\N"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement's jobs, those from `first` to before `end` of the payloads given."""

    first: int
    end: int
    query: Query
    arguments: tuple[str, str, str]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Say in what the database refuses whose jobs it is about."""
        try:
            yield
        except Refused as error:
            raise Refused(f"payloads[{self.first}:{self.end}]: {error}", sqlstate=error.sqlstate) from None


class Many:
    """The jobs of one call. Raises TypeError for invalid arguments, and for columns that can't be shared."""

    def __init__(self, handler: str, payloads: Iterable[Any], columns: Mapping[str, Any], encode: Encode) -> None:
        check_handler_name(handler)
        # These are iterable, but one payload rather than many.
        if not isinstance(payloads, Iterable) or isinstance(payloads, str | bytes | Mapping | BaseModel):
            raise TypeError(f"payloads can't be a {type(payloads).__name__}: write a list of payloads")
        if not callable(encode):
            raise TypeError(f"encode can't be a {type(encode).__name__}: write a function from a payload to JSON text")
        self._handler = handler
        self._payloads = payloads
        self._encode = encode
        self._shared: dict[str, Any] = {}
        self._own: dict[str, Callable[[Any], Any]] = {}
        self._fault: Exception | None = None
        self.sent = 0
        """How many jobs were made."""
        if columns.get("on_conflict") not in {None, "keep"}:
            raise TypeError("enqueue_many keeps live jobs with the same unique_key: on_conflict can only be 'keep'")
        for name, value in columns.items():
            if value is None or name == "on_conflict":
                continue
            if callable(value) and name in OWN:
                self._own[name] = value
            elif name in {"unique_key", "idempotency_key"}:
                raise TypeError(
                    f"{name} must differ from job to job: give a function of the payload, {name}=lambda payload: …"
                )
            else:
                self._shared[name] = option(name, value)

    @property
    def keyed(self) -> bool:
        """Say whether live jobs may have to be left alone, which COPY can't."""
        return "unique_key" in self._own

    @property
    def copied(self) -> Sequence[str]:
        """The columns of `copies`, in their order."""
        return ("handler", "payload", *self._own, *self._shared)

    def copies(self) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Yield for each COPY the number of its first payload, and its rows, which are made while they are being read.

        An error waits until the rows so far have been read, and leaves before the next COPY.
        """
        left = iter(self._payloads)
        first = 0
        # Before the COPY begins, so that they may come from the connection that it keeps busy.
        while chunk := list(islice(left, BATCH)):
            yield first, self._rows(chunk, first)
            if self._fault is not None:
                raise self._fault
            first += len(chunk)
            self.sent = first

    def statements(self) -> Iterator[Statement]:
        """Yield the statements that insert the jobs."""
        query: Query = "enqueue_keyed_jobs" if self._own else "enqueue_jobs"
        options = json.dumps(self._shared)
        jobs: list[str] = []
        first = size = 0
        for number, payload in enumerate(self._payloads):
            with _named(number):
                text = self._job(payload)
            jobs.append(text)
            size += len(text)
            if len(jobs) == BATCH or size > BATCH_BYTES:
                yield Statement(first, number + 1, query, (self._handler, options, f"[{','.join(jobs)}]"))
                jobs, first, size = [], number + 1, 0
        if jobs:
            yield Statement(first, first + len(jobs), query, (self._handler, options, f"[{','.join(jobs)}]"))

    def made(self, statement: Statement, row: Sequence[Any] | None) -> None:
        """Count what a statement has made: all of its jobs, unless it says how many."""
        says = statement.query == "enqueue_keyed_jobs"
        self.sent += row[0] if row and says else statement.end - statement.first

    def _job(self, payload: Any) -> str:
        text = self._text(payload)
        if not self._own:
            return text
        columns = {name: option(name, value) for name, of in self._own.items() if (value := of(payload)) is not None}
        return f'{{"payload":{text}' + (f",{json.dumps(columns)[1:]}" if columns else "}")

    def _text(self, payload: Any) -> str:
        text = "null" if payload is None else self._encode(payload)
        if not isinstance(text, str):
            raise TypeError(f"encode returned a {type(text).__name__}: return JSON as text")
        return text

    def _rows(self, chunk: list[Any], first: int) -> Iterator[bytes]:
        begin = f"{_text(self._handler)}\t"
        end = "".join(f"\t{_text(value)}" for value in self._shared.values()) + "\n"
        rows: list[bytes] = []
        size = 0
        number = first
        try:
            for payload in chunk:
                text = self._text(payload)
                text = _NULL if text == "null" else _escaped(text)
                for name, of in self._own.items():
                    value = of(payload)
                    text += f"\t{_NULL if value is None else _text(option(name, value))}"
                rows.append(f"{begin}{text}{end}".encode())
                size += len(rows[-1])
                number += 1
                if size > PIECE:
                    yield b"".join(rows)
                    rows, size = [], 0
            yield b"".join(rows)
        except Exception as error:  # noqa: BLE001  raised by `copies`: see there
            self._fault = _naming(error, number)


def _text(value: Any) -> str:
    """Return a value as COPY's text format has it."""
    return _escaped(json.dumps(value) if isinstance(value, dict) else str(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


@contextmanager
def _named(number: int) -> Iterator[None]:
    try:
        yield
    except InvalidPayload as error:
        raise _naming(error, number) from None
    except Exception as error:
        _naming(error, number)
        raise


def _naming(error: Exception, number: int) -> Exception:
    """Return the error with the number of its payload: in its text where that is ours, else beside it."""
    where = f"payloads[{number}]"
    if type(error) is InvalidPayload:
        return InvalidPayload(f"{where}: {error}").with_traceback(error.__traceback__)
    error.add_note(f"in {where}")
    return error
