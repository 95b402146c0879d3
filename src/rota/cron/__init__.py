"""Compute the instants of a cron expression.

`expression` parses and validates it. `instants` lets croniter search the local times, and maps them to instants itself: croniter
fires twice in every fold, and once too often after some gaps. `zones` loads time zones, `words` describes an expression in English.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

from rota.cron.expression import parse
from rota.cron.instants import BEGIN, END, ONE_SECOND, fires, fires_back, instant, since_epoch
from rota.cron.words import describe_pattern
from rota.cron.zones import tzdata_version, zone
from rota.errors import InvalidCron

if TYPE_CHECKING:
    from datetime import datetime


__all__ = ["Cron", "Fold", "Gap", "InvalidCron", "next_fire", "tzdata_version", "zone"]

Gap = Literal["after", "skip"]
Fold = Literal["first", "both"]


@dataclass(frozen=True, slots=True)
class Cron:
    """A cron expression in a time zone.

    `gap` and `fold` are for entries at fixed times (neither minute nor hour starts with `*`). A time that the clock
    jumps over fires at the jump ("after"), once, or not at all ("skip"). A time that the clock shows twice fires the
    first time ("first") or each time ("both"). Other entries follow real time: they fire whenever the clock matches.

    Raises InvalidCron with the reason for an invalid expression or zone. Parsed expressions and zones are cached, so creating an
    equal Cron again is cheap.
    """

    expr: str
    _: KW_ONLY
    timezone: str = "UTC"
    gap: Gap = "after"
    fold: Fold = "first"

    def __post_init__(self) -> None:
        parse(self.expr)
        zone(self.timezone)
        for name, value, choices in (("gap", self.gap, get_args(Gap)), ("fold", self.fold, get_args(Fold))):
            if value not in choices:
                raise InvalidCron(f"{name} is {' or '.join(map(repr, choices))}, not {str(value)[:40]!r}")

    def next(self, after: datetime, count: int = 1) -> list[datetime]:
        """Return the first `count` fires strictly after `after`, in UTC, in order; fewer when there are no more.

        Fires lie within the years 1970 to 2199. `after` must carry its timezone, else ValueError.
        """
        second = since_epoch(after) // ONE_SECOND
        if count == 1:
            fire = _first_after(self.expr, self.timezone, self.gap, self.fold, second)
            return [] if fire is None else [fire]
        return [instant(at) for at in islice(fires(self, max(second + 1, BEGIN)), _checked_count(count))]

    def previous(self, before: datetime, count: int = 1) -> list[datetime]:
        """Return the last `count` fires strictly before `before`, in UTC, the latest first; the mirror of `next`."""
        second = -(-since_epoch(before) // ONE_SECOND)
        return [instant(at) for at in islice(fires_back(self, min(second, END)), _checked_count(count))]

    def explain(self) -> str:
        """Describe in English when this fires, such as `At 09:00 on Monday to Friday, Europe/Vienna time.`"""
        return f"{describe_pattern(parse(self.expr))}, {self.timezone}{'' if self.timezone == 'UTC' else ' time'}."


def next_fire(
    expr: str, after: datetime, *, timezone: str = "UTC", gap: Gap = "after", fold: Fold = "first"
) -> datetime | None:
    """Return the first fire strictly after `after`, or None when there are no more.

    Results are cached: thousands of schedules with the same expression and instant cost one search.
    """
    return _first_after(expr, timezone, gap, fold, since_epoch(after) // ONE_SECOND)


def _checked_count(count: int) -> int:
    if count < 0:
        raise ValueError(f"count is 0 or more, not {count}")
    return count


@lru_cache(maxsize=16_384)
def _first_after(expr: str, timezone: str, gap: Gap, fold: Fold, second: int) -> datetime | None:
    # The cache key is a whole second: as datetimes, the two passes of a fold would be equal.
    at = next(fires(Cron(expr, timezone=timezone, gap=gap, fold=fold), max(second + 1, BEGIN)), None)
    return None if at is None else instant(at)
