"""Exceptions that a handler raises to decide how its job goes on."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Self

LONGEST_DELAY = timedelta(days=366)
"""The longest interval that the database accepts."""


class Permanent(Exception):
    """The job can never succeed: it becomes a dead letter at once, whatever attempts are left."""


class _Again(Exception):
    def __init__(self, *, after: timedelta | None = None, at: datetime | None = None) -> None:
        if (after is None) == (at is None):
            raise TypeError(f"{type(self).__name__} takes either after= (a timedelta) or at= (a datetime)")
        for name, value, kind, cure in (
            ("after", after, timedelta, "timedelta(seconds=30)"),
            ("at", at, datetime, "datetime.now(UTC) + timedelta(hours=1)"),
        ):
            if value is not None and not isinstance(value, kind):
                wrong = f"{type(self).__name__}({name}=…) can't be a {type(value).__name__}"
                raise TypeError(f"{wrong}: write a {kind.__name__}, such as {cure}")
        if at is not None and at.utcoffset() is None:
            raise ValueError(f"{type(self).__name__}(at=…) needs a datetime with a zone, not a naive one")
        if at is not None and not datetime(1970, 1, 1, tzinfo=UTC) <= at < datetime(2200, 1, 1, tzinfo=UTC):
            raise ValueError(f"{type(self).__name__}(at=…) must lie between the years 1970 and 2200")
        if after is not None and not timedelta(0) <= after <= LONGEST_DELAY:
            raise ValueError(f"{type(self).__name__}(after=…) must lie between 0 and 366 days")
        super().__init__(after, at)
        self.after = after
        self.at = at

    def __repr__(self) -> str:
        when = f"after={self.after!r}" if self.at is None else f"at={self.at!r}"
        return f"{type(self).__name__}({when})"

    def as_answer(self) -> dict[str, Any]:
        return {
            "after": None if self.after is None else self.after.total_seconds(),
            "at": None if self.at is None else self.at.isoformat(),
        }

    @classmethod
    def of(cls, answer: dict[str, Any]) -> Self:
        if answer["after"] is not None:
            return cls(after=timedelta(seconds=answer["after"]))
        return cls(at=datetime.fromisoformat(answer["at"]))


class Retry(_Again):
    """The attempt failed. Run the job again `after` that long or `at` that instant. The attempt counts.

    With `raise Retry(…) from error`, the job's history shows that error.
    """


class Snooze(_Again):
    """The job can't run yet. Call the handler again `after` that long or `at` that instant. The attempt does not count."""


class Hold(_Again):
    """Close the key of the job (its limit_key): no job of the key starts for that long, and then this job runs again.

    For an answer such as HTTP 429. The attempt does not count. A job without a limit_key is snoozed instead.
    """


class Cancel(Exception):
    """The job is no longer needed. It ends as cancelled, with this reason in the ledger."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
