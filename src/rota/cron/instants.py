"""Map the local times of a zone to instants.

Both are whole seconds since 1970-01-01T00:00: `at`, `start` and `end` are instants, `wall`, `low` and `top` are local times.
"""

from __future__ import annotations

from copy import copy
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from croniter import CroniterBadDateError

from rota.cron.expression import parse
from rota.cron.zones import zone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from zoneinfo import ZoneInfo

    from rota.cron import Cron
    from rota.cron.expression import Pattern

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
BEGIN = 0
END = int(datetime(2200, 1, 1, tzinfo=UTC).timestamp())  # the database refuses instants from here on
_DAY = 86_400
ONE_SECOND = timedelta(seconds=1)


def since_epoch(moment: datetime) -> timedelta:
    if not isinstance(moment, datetime):
        raise TypeError(f"a datetime is needed, not {type(moment).__name__}")
    offset = moment.utcoffset()
    if offset is None:
        raise ValueError(f"{moment.isoformat()} carries no timezone; write for example datetime(…, tzinfo=UTC)")
    # Not moment - _EPOCH, which overflows near datetime.min and datetime.max.
    return moment.replace(tzinfo=None) - _EPOCH.replace(tzinfo=None) - offset


def instant(at: int) -> datetime:
    return _EPOCH + timedelta(seconds=at)


# ── from the wall clock to instants ───────────────────────────────────────────────────────────────────────────────────


class _Span(NamedTuple):
    """A range of instants, start ≤ at < end, in which the zone's clock is `offset` seconds ahead of UTC."""

    start: int
    end: int
    offset: int


class _Timeline:
    """The spans of a zone. The changes of its offset are found with zoneinfo, and cached."""

    # Compare offsets every two days and bisect where they differ: in the zone data, no two changes since 1970 are closer than
    # a week. Looking back two days is enough: no fold is longer than a day.
    _CHUNK = 64 * _DAY
    _STRIDE = 2 * _DAY
    _LOOK_BACK = 2 * _DAY

    def __init__(self, info: ZoneInfo) -> None:
        self._info = info
        self._changes: dict[int, tuple[int, ...]] = {}

    def span_from(self, at: int) -> _Span:
        """Return a span that begins at `at`."""
        limit = at - at % self._CHUNK + self._CHUNK
        end = next((change for change in self._changes_up_to(limit) if change > at), limit)
        return _Span(at, end, self._offset(at))

    def span_before(self, at: int) -> _Span:
        """Return a span that ends at `at`."""
        limit = at + -at % self._CHUNK
        earlier = (change for change in reversed(self._changes_up_to(limit)) if change < at)
        return _Span(start := next(earlier, limit - self._CHUNK), at, self._offset(start))

    def reached(self, at: int) -> int:
        """Return the highest local time that the clock had reached before `at`. It has shown or skipped all earlier local times."""
        top = at + self._offset(at - 1)
        start = at - self._LOOK_BACK
        for change in self._changes_up_to(at + -at % self._CHUNK) + self._changes_up_to(start + -start % self._CHUNK):
            if start < change < at:
                top = max(top, change + self._offset(change - 1))
        return top

    def _offset(self, at: int) -> int:
        offset = datetime.fromtimestamp(at, self._info).utcoffset()
        assert offset is not None  # noqa: S101 — ZoneInfo always knows
        return offset // ONE_SECOND

    def _changes_up_to(self, limit: int) -> tuple[int, ...]:
        """Return the instants at which the offset changes, in the chunk that ends with `limit`."""
        if limit not in self._changes:
            steps = range(limit - self._CHUNK, limit, self._STRIDE)
            changes = (self._change_within(step, step + self._STRIDE) for step in steps)
            self._changes[limit] = tuple(change for change in changes if change is not None)
        return self._changes[limit]

    def _change_within(self, low: int, high: int) -> int | None:
        before = self._offset(low)
        if before == self._offset(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._offset(middle) == before else (low, middle)
        return high


@lru_cache(maxsize=1024)
def _timeline(timezone: str) -> _Timeline:
    return _Timeline(zone(timezone))


def fires(cron: Cron, at: int) -> Iterator[int]:
    """Yield each instant from `at` on at which the schedule fires."""
    timeline, clock = _timeline(cron.timezone), _WallClock(parse(cron.expr))
    while at < END:
        span = timeline.span_from(at)
        low, fires_at_start = _start_of_search(cron, span, timeline, clock)
        if fires_at_start:
            yield span.start
        top = min(span.end, END) + span.offset
        while (wall := clock.first_from(low)) < top:
            yield wall - span.offset
            low = wall + 1
        # Nothing matches from low to wall, so skip to a day before wall. That day is kept because a fold may repeat it.
        at = max(span.end, wall - _DAY) if low <= top - _DAY else span.end


def fires_back(cron: Cron, at: int) -> Iterator[int]:
    """Yield each instant before `at` at which the schedule fires, the latest first."""
    timeline, clock = _timeline(cron.timezone), _WallClock(parse(cron.expr))
    while at > BEGIN:
        span = timeline.span_before(at)
        low, fires_at_start = _start_of_search(cron, span, timeline, clock)
        top = span.end + span.offset
        while (wall := clock.last_before(top)) >= low:
            yield wall - span.offset
            top = wall
        if fires_at_start:
            yield span.start
        at = min(span.start, wall + _DAY) if top >= span.start + span.offset + _DAY else span.start


def _start_of_search(cron: Cron, span: _Span, timeline: _Timeline, clock: _WallClock) -> tuple[int, bool]:
    """Return the first local time of the span that may fire, and whether the span's start fires for skipped local times."""
    low = span.start + span.offset
    if not parse(cron.expr).has_fixed_times:
        return low, False
    reached = timeline.reached(span.start)
    if reached >= low:  # nothing was skipped; in a fold, its second pass ends at `reached`
        return (reached if cron.fold == "first" else low), False
    if cron.gap == "after" and clock.first_from(reached) < low:
        return low + 1, True
    return low, False


# ── the wall clock ────────────────────────────────────────────────────────────────────────────────────────────────────

_NEVER = 1 << 60


class _WallClock:
    """A search along the wall clock with croniter. It caches the last result of each rule."""

    def __init__(self, pattern: Pattern) -> None:
        self._rules = [copy(rule) for rule in pattern.rules]  # a search changes croniter's objects
        self._ahead = [(_NEVER, -_NEVER)] * len(self._rules)
        self._behind = [(-_NEVER, _NEVER)] * len(self._rules)

    def first_from(self, wall: int) -> int:
        """Return the first matching local time at or after `wall`, or _NEVER."""
        for index, rule in enumerate(self._rules):
            searched_from, match = self._ahead[index]
            if not searched_from <= wall <= match:
                try:
                    match = int(rule.get_next(float, start_time=wall - 1))
                except CroniterBadDateError:
                    match = _NEVER
                self._ahead[index] = (wall, match)
        return min(match for _, match in self._ahead)

    def last_before(self, wall: int) -> int:
        """Return the last matching local time before `wall`, or -_NEVER."""
        for index, rule in enumerate(self._rules):
            searched_from, match = self._behind[index]
            if not match < wall <= searched_from:
                try:
                    match = int(rule.get_prev(float, start_time=wall))
                except CroniterBadDateError:
                    match = -_NEVER
                self._behind[index] = (wall, match)
        return max(match for _, match in self._behind)
