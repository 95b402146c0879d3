"""Prepare many jobs of one call as rows for COPY, or as statements for connections without COPY."""

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

PER_JOB_COLUMNS = frozenset({"run_at", "priority", "unique_key", "idempotency_key", "meta", "limit_key"})
"""Columns that `enqueue_many` also takes as a function of the payload."""

MAX_BATCH_JOBS = 5000
"""The most jobs in a COPY or a statement."""

BATCH_BYTES = 4 << 20
"""The approximate size limit of a statement."""

PIECE_BYTES = 1 << 13
"""The approximate number of bytes of a COPY sent at once. The server works on them while the next are prepared."""

_NULL = "\\N"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement that inserts the jobs of payloads[first:end]."""

    first: int
    end: int
    query: Query
    arguments: tuple[str, str, str]

    @contextmanager
    def naming_payloads(self) -> Iterator[None]:
        """Name the payloads in a Refused error."""
        try:
            yield
        except Refused as error:
            raise Refused(f"payloads[{self.first}:{self.end}]: {error}", sqlstate=error.sqlstate) from None


class ManyJobs:
    """The jobs of one call. Raises TypeError for invalid arguments, and for columns that can't be shared."""

    def __init__(self, handler: str, payloads: Iterable[Any], columns: Mapping[str, Any], encode: Encode) -> None:
        check_handler_name(handler)
        # Texts, mappings and models are iterable, too, but each is a single payload.
        if not isinstance(payloads, Iterable) or isinstance(payloads, str | bytes | Mapping | BaseModel):
            raise TypeError(f"payloads can't be a {type(payloads).__name__}: write a list of payloads")
        if not callable(encode):
            raise TypeError(f"encode can't be a {type(encode).__name__}: write a function from a payload to JSON text")
        self._handler = handler
        self._payloads = payloads
        self._encode = encode
        self._shared: dict[str, Any] = {}
        self._per_job: dict[str, Callable[[Any], Any]] = {}
        self._fault: Exception | None = None
        self.sent = 0
        """The number of jobs inserted so far."""
        if columns.get("on_conflict") not in {None, "keep"}:
            raise TypeError("enqueue_many keeps live jobs with the same unique_key: on_conflict can only be 'keep'")
        for name, value in columns.items():
            if value is None or name == "on_conflict":
                continue
            if callable(value) and name in PER_JOB_COLUMNS:
                self._per_job[name] = value
            elif name in {"unique_key", "idempotency_key"}:
                raise TypeError(
                    f"{name} must differ from job to job: give a function of the payload, {name}=lambda payload: …"
                )
            else:
                self._shared[name] = option(name, value)

    @property
    def has_unique_keys(self) -> bool:
        """Whether the jobs have unique keys, which COPY can't resolve."""
        return "unique_key" in self._per_job

    @property
    def copy_columns(self) -> Sequence[str]:
        """The columns of `copies`, in their order."""
        return ("handler", "payload", *self._per_job, *self._shared)

    def copies(self) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Yield for each COPY the index of its first payload, and its rows, which are encoded while they are read.

        An error is raised only when the next COPY is requested: raised earlier, the driver would send its text to the server.
        """
        remaining = iter(self._payloads)
        first = 0
        # Read before the COPY begins: the payloads may come from the same connection.
        while chunk := list(islice(remaining, MAX_BATCH_JOBS)):
            yield first, self._rows(chunk, first)
            if self._fault is not None:
                raise self._fault
            first += len(chunk)
            self.sent = first

    def statements(self) -> Iterator[Statement]:
        """Yield the statements that insert the jobs."""
        query: Query = "enqueue_keyed_jobs" if self._per_job else "enqueue_jobs"
        options = json.dumps(self._shared)
        jobs: list[str] = []
        first = size = 0
        for index, payload in enumerate(self._payloads):
            with _naming_payload(index):
                text = self._job(payload)
            jobs.append(text)
            size += len(text)
            if len(jobs) == MAX_BATCH_JOBS or size > BATCH_BYTES:
                yield Statement(first, index + 1, query, (self._handler, options, f"[{','.join(jobs)}]"))
                jobs, first, size = [], index + 1, 0
        if jobs:
            yield Statement(first, first + len(jobs), query, (self._handler, options, f"[{','.join(jobs)}]"))

    def count_inserted(self, statement: Statement, row: Sequence[Any] | None) -> None:
        """Count the jobs that a statement inserted. Only the keyed statement returns a number."""
        returns_count = statement.query == "enqueue_keyed_jobs"
        self.sent += row[0] if row and returns_count else statement.end - statement.first

    def _job(self, payload: Any) -> str:
        text = self._text(payload)
        if not self._per_job:
            return text
        columns = {
            name: option(name, value)
            for name, compute in self._per_job.items()
            if (value := compute(payload)) is not None
        }
        return f'{{"payload":{text}' + (f",{json.dumps(columns)[1:]}" if columns else "}")

    def _text(self, payload: Any) -> str:
        text = "null" if payload is None else self._encode(payload)
        if not isinstance(text, str):
            raise TypeError(f"encode returned a {type(text).__name__}: return JSON as text")
        return text

    def _rows(self, chunk: list[Any], first: int) -> Iterator[bytes]:
        begin = f"{_copy_text(self._handler)}\t"
        end = "".join(f"\t{_copy_text(value)}" for value in self._shared.values()) + "\n"
        rows: list[bytes] = []
        size = 0
        index = first
        try:
            for payload in chunk:
                text = self._text(payload)
                text = _NULL if text == "null" else _escaped_for_copy(text)
                for name, compute in self._per_job.items():
                    value = compute(payload)
                    text += f"\t{_NULL if value is None else _copy_text(option(name, value))}"
                rows.append(f"{begin}{text}{end}".encode())
                size += len(rows[-1])
                index += 1
                if size > PIECE_BYTES:
                    yield b"".join(rows)
                    rows, size = [], 0
            yield b"".join(rows)
        except Exception as error:  # noqa: BLE001  raised by `copies`
            self._fault = _with_payload_index(error, index)


def _copy_text(value: Any) -> str:
    """Return a value in COPY's text format."""
    return _escaped_for_copy(json.dumps(value) if isinstance(value, dict) else str(value))


def _escaped_for_copy(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


@contextmanager
def _naming_payload(index: int) -> Iterator[None]:
    try:
        yield
    except InvalidPayload as error:
        raise _with_payload_index(error, index) from None
    except Exception as error:
        _with_payload_index(error, index)
        raise


def _with_payload_index(error: Exception, index: int) -> Exception:
    """Return the error with the index of its payload: in the text of an InvalidPayload, in a note of any other error."""
    where = f"payloads[{index}]"
    if type(error) is InvalidPayload:
        return InvalidPayload(f"{where}: {error}").with_traceback(error.__traceback__)
    error.add_note(f"in {where}")
    return error
