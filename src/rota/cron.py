"""From a cron expression to instants: the one path that the scheduler, the previews and the tests share.

An expression is checked here (`_parse`), its wall clock is searched by croniter (`_WallClock`), and the wall clock is
mapped to instants here again (`_fires`), because croniter fires twice in every fold and once too often after some gaps.
Both clocks are whole seconds since 1970-01-01T00:00: `at`, `start` and `end` are instants, `wall`, `low` and `top` are
readings of the zone's clock.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from functools import cache, lru_cache
from importlib import import_module
from importlib.resources import files
from itertools import islice, pairwise, product
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args
from zoneinfo import ZoneInfo, available_timezones

from croniter import CroniterBadDateError, croniter

from rota.errors import ConfigError, InvalidCron

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Cron", "Fold", "Gap", "InvalidCron", "next_fire", "tzdata_version", "zone"]

Gap = Literal["after", "skip"]
Fold = Literal["first", "both"]


@dataclass(frozen=True, slots=True)
class Cron:
    """When a schedule fires: a cron expression, read on the clock of one timezone.

    `gap` and `fold` are for entries at fixed times (neither minute nor hour starts with `*`). A time that the clock
    jumps over fires at the jump ("after"), once, or not at all ("skip"). A time that the clock shows twice fires the
    first time ("first") or each time ("both"). Other entries follow real time: they fire whenever the clock matches.

    Whatever is refused raises InvalidCron, whose message names the reason. Equal values are equal Crons; parsed
    expressions and zones are shared and remembered, so that making one again costs next to nothing.
    """

    expr: str
    _: KW_ONLY
    timezone: str = "UTC"
    gap: Gap = "after"
    fold: Fold = "first"

    def __post_init__(self) -> None:
        _parse(self.expr)
        zone(self.timezone)
        for name, value, known in (("gap", self.gap, get_args(Gap)), ("fold", self.fold, get_args(Fold))):
            if value not in known:
                raise InvalidCron(f"{name} is {' or '.join(map(repr, known))}, not {str(value)[:40]!r}")

    def next(self, after: datetime, count: int = 1) -> list[datetime]:
        """Return the first `count` fires strictly after `after`, in UTC, in order; fewer when there are no more.

        Fires lie within the years 1970 to 2199. `after` must carry its timezone, else ValueError.
        """
        second = _since_epoch(after) // _A_SECOND
        if count == 1:
            fire = _first_after(self.expr, self.timezone, self.gap, self.fold, second)
            return [] if fire is None else [fire]
        return [_instant(at) for at in islice(_fires(self, max(second + 1, _BEGIN)), _at_least_none(count))]

    def previous(self, before: datetime, count: int = 1) -> list[datetime]:
        """Return the last `count` fires strictly before `before`, in UTC, the latest first; the mirror of `next`."""
        second = -(-_since_epoch(before) // _A_SECOND)
        return [_instant(at) for at in islice(_fires_back(self, min(second, _END)), _at_least_none(count))]

    def explain(self) -> str:
        """Say in plain words when this fires, such as `At 09:00 on Monday to Friday, Europe/Vienna time.`"""
        return f"{_in_words(_parse(self.expr))}, {self.timezone}{'' if self.timezone == 'UTC' else ' time'}."


def next_fire(
    expr: str, after: datetime, *, timezone: str = "UTC", gap: Gap = "after", fold: Fold = "first"
) -> datetime | None:
    """Return the first fire strictly after `after`, or None when there are no more.

    Answers are remembered, so that thousands of schedules which share an expression and an instant cost one search.
    """
    return _first_after(expr, timezone, gap, fold, _since_epoch(after) // _A_SECOND)


@cache
def zone(name: str) -> ZoneInfo:
    """Return the timezone of that exact name from the tzdata package, else from the system, else raise InvalidCron.

    zoneinfo by itself reads the system's files first, which are often years behind: two nodes would then compute
    different fires. Names are looked up in lists and never handed to the file system as they come.
    """
    if not isinstance(name, str):
        raise TypeError(f"a timezone is given by its name, not as {type(name).__name__}")
    if name in _packaged_zones():
        with files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as file:
            return ZoneInfo.from_file(file, key=name)
    if name in _system_zones():
        return ZoneInfo(name)
    if not name:
        raise InvalidCron("the timezone is empty; write a name such as `Europe/Vienna`, or `UTC`")
    known = {each.casefold(): each for each in _packaged_zones()}
    likely = get_close_matches(name[:60].casefold(), known, n=1, cutoff=0.75)
    hint = f"; did you mean `{known[likely[0]]}`?" if likely else "; write a name such as `Europe/Vienna`, or `UTC`"
    raise InvalidCron(f"there is no timezone {name[:60]!r}{hint}")


def tzdata_version() -> str:
    """Return the release of the zone data in use, such as `2026a`; where it differs, fires may differ. ConfigError without any."""
    try:
        return str(import_module("tzdata").IANA_VERSION)
    except ModuleNotFoundError as error:
        # Without this, a machine without zone files would know UTC alone, and one with old files would compute other fires.
        raise ConfigError(
            "the package tzdata is missing, without which no timezone can be trusted: install it"
        ) from error


@cache
def _packaged_zones() -> frozenset[str]:
    tzdata_version()
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="utf-8").split())


@cache
def _system_zones() -> frozenset[str]:
    return frozenset(available_timezones()) - {"localtime"}  # whatever this one machine is set to


# ── instants ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BEGIN = 0
_END = int(datetime(2200, 1, 1, tzinfo=UTC).timestamp())  # the database refuses instants from here on
_DAY = 86_400
_A_SECOND = timedelta(seconds=1)


def _since_epoch(moment: datetime) -> timedelta:
    if not isinstance(moment, datetime):
        raise TypeError(f"a datetime is needed, not {type(moment).__name__}")
    offset = moment.utcoffset()
    if offset is None:
        raise ValueError(f"{moment.isoformat()} carries no timezone; write for example datetime(…, tzinfo=UTC)")
    # Not moment - _EPOCH: that overflows beside datetime.min and datetime.max.
    return moment.replace(tzinfo=None) - _EPOCH.replace(tzinfo=None) - offset


def _instant(at: int) -> datetime:
    return _EPOCH + timedelta(seconds=at)


def _at_least_none(count: int) -> int:
    if count < 0:
        raise ValueError(f"count is 0 or more, not {count}")
    return count


@lru_cache(maxsize=16_384)
def _first_after(expr: str, timezone: str, gap: Gap, fold: Fold, second: int) -> datetime | None:
    # The key is a whole second, not the datetime asked from: two passes of a fold are equal datetimes in one zone.
    at = next(_fires(Cron(expr, timezone=timezone, gap=gap, fold=fold), max(second + 1, _BEGIN)), None)
    return None if at is None else _instant(at)


# ── from the wall clock to instants ───────────────────────────────────────────────────────────────────────────────────


class _Span(NamedTuple):
    """A stretch of instants, start ≤ at < end, in which the zone's clock is `offset` ahead of UTC."""

    start: int
    end: int
    offset: int


class _Timeline:
    """The spans of a zone. Where its offset changes is found by asking zoneinfo, and remembered."""

    # Offsets are compared every other day and the changes between are bisected. In the zone data no two changes since
    # 1970 lie closer than a week. No fold is longer than a day, so what happened earlier can't be shown again.
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
        """Return the wall second that the clock had come up to before `at`: all below it have been shown or jumped."""
        top = at + self._offset(at - 1)
        start = at - self._LOOK_BACK
        for change in self._changes_up_to(at + -at % self._CHUNK) + self._changes_up_to(start + -start % self._CHUNK):
            if start < change < at:
                top = max(top, change + self._offset(change - 1))
        return top

    def _offset(self, at: int) -> int:
        offset = datetime.fromtimestamp(at, self._info).utcoffset()
        assert offset is not None  # noqa: S101 — ZoneInfo always knows
        return offset // _A_SECOND

    def _changes_up_to(self, limit: int) -> tuple[int, ...]:
        """Return the instants in the chunk up to `limit`, itself included, from which a new offset holds."""
        if limit not in self._changes:
            steps = range(limit - self._CHUNK, limit, self._STRIDE)
            found = (self._change_within(step, step + self._STRIDE) for step in steps)
            self._changes[limit] = tuple(change for change in found if change is not None)
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


def _fires(cron: Cron, at: int) -> Iterator[int]:
    """Yield each instant from `at` on at which the schedule fires."""
    timeline, clock = _timeline(cron.timezone), _WallClock(_parse(cron.expr))
    while at < _END:
        span = timeline.span_from(at)
        low, fires_at_start = _opening(cron, span, timeline, clock)
        if fires_at_start:
            yield span.start
        top = min(span.end, _END) + span.offset
        while (wall := clock.first_from(low)) < top:
            yield wall - span.offset
            low = wall + 1
        # Nothing matches from low to wall: go near wall at once, unless a fold may show again what lies below low.
        at = max(span.end, wall - _DAY) if low <= top - _DAY else span.end


def _fires_back(cron: Cron, at: int) -> Iterator[int]:
    """Yield each instant before `at` at which the schedule fires, the latest first."""
    timeline, clock = _timeline(cron.timezone), _WallClock(_parse(cron.expr))
    while at > _BEGIN:
        span = timeline.span_before(at)
        low, fires_at_start = _opening(cron, span, timeline, clock)
        top = span.end + span.offset
        while (wall := clock.last_before(top)) >= low:
            yield wall - span.offset
            top = wall
        if fires_at_start:
            yield span.start
        at = min(span.start, wall + _DAY) if top >= span.start + span.offset + _DAY else span.start


def _opening(cron: Cron, span: _Span, timeline: _Timeline, clock: _WallClock) -> tuple[int, bool]:
    """Return the first wall second of the span that may fire, and whether its start fires for times jumped over."""
    low = span.start + span.offset
    if not _parse(cron.expr).fixed:
        return low, False
    reached = timeline.reached(span.start)
    if reached >= low:  # nothing jumped over; in a fold, reached is where its second pass ends
        return (reached if cron.fold == "first" else low), False
    if cron.gap == "after" and clock.first_from(reached) < low:
        return low + 1, True
    return low, False


# ── the wall clock ────────────────────────────────────────────────────────────────────────────────────────────────────

_NEVER = 1 << 60


class _WallClock:
    """One search along the wall clock, by croniter. It keeps what each rule answered last, and asks only beyond it."""

    def __init__(self, pattern: _Pattern) -> None:
        self._rules = [copy(rule) for rule in pattern.rules]  # croniter's objects move: the pattern's own are shared
        self._ahead = [(_NEVER, -_NEVER)] * len(self._rules)
        self._behind = [(-_NEVER, _NEVER)] * len(self._rules)

    def first_from(self, wall: int) -> int:
        """Return the first matching wall second at or after `wall`, or _NEVER."""
        for i, rule in enumerate(self._rules):
            asked, found = self._ahead[i]
            if not asked <= wall <= found:
                try:
                    found = int(rule.get_next(float, start_time=wall - 1))
                except CroniterBadDateError:
                    found = _NEVER
                self._ahead[i] = (wall, found)
        return min(found for _, found in self._ahead)

    def last_before(self, wall: int) -> int:
        """Return the last matching wall second before `wall`, or -_NEVER."""
        for i, rule in enumerate(self._rules):
            asked, found = self._behind[i]
            if not found < wall <= asked:
                try:
                    found = int(rule.get_prev(float, start_time=wall))
                except CroniterBadDateError:
                    found = -_NEVER
                self._behind[i] = (wall, found)
        return max(found for _, found in self._behind)


# ── the expression ────────────────────────────────────────────────────────────────────────────────────────────────────

_LONGEST = 1000
_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
# Not calendar.month_name: that speaks the language of the process's locale.
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What one field of an expression may say."""

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()  # the long names of the values, from the lowest on

    @property
    def size(self) -> int:
        return 7 if self is _WEEKDAY else self.high - self.low + 1


_SECOND = _Kind(name="second", low=0, high=59)
_MINUTE = _Kind(name="minute", low=0, high=59)
_HOUR = _Kind(name="hour", low=0, high=23)
_MONTHDAY = _Kind(name="day of month", low=1, high=31)
_MONTH = _Kind(name="month", low=1, high=12, words=_MONTHS)
_WEEKDAY = _Kind(name="weekday", low=0, high=7, words=_WEEKDAYS)
_KINDS = (_SECOND, _MINUTE, _HOUR, _MONTHDAY, _MONTH, _WEEKDAY)

_ITEM = re.compile(r"(?:\*|(\d+|[a-z]{3})(?:-(\d+|[a-z]{3}))?)(?:/(\d+))?")
_NTH = re.compile(r"(\d+|[a-z]{3})#(\d+)")
_LAST = re.compile(r"l(\d+|[a-z]{3})|(\d+|[a-z]{3})l")
_LAST_OF_MONTH = 0  # stands for the last day among days, for the last week among the weeks of a month


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """One field, read: `values` are the plain ones, `nth` the (weekday, week of the month) pairs of a weekday field."""

    kind: _Kind
    text: str
    values: frozenset[int]
    nth: frozenset[tuple[int, int]] = frozenset()

    @property
    def starred(self) -> bool:
        return self.text.startswith("*")

    @property
    def full(self) -> bool:
        return len(self.values - {_LAST_OF_MONTH} if self.kind is _MONTHDAY else self.values) == self.kind.size

    @property
    def step(self) -> int:
        """Return n where the whole field says `*/n`, 1 for `*`, else 0."""
        return int(self.text[2:] or 1) if re.fullmatch(r"\*(/\d+)?", self.text) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pattern:
    """An expression that can fire. A wall second matches it when one of the rules does."""

    second: _Field
    minute: _Field
    hour: _Field
    monthday: _Field
    month: _Field
    weekday: _Field
    rules: tuple[croniter, ...]

    @property
    def fixed(self) -> bool:
        return not (self.minute.starred or self.hour.starred)

    @property
    def either_day(self) -> bool:
        return _either_day(self.monthday, self.weekday)


@lru_cache(maxsize=2048)
def _parse(expr: str) -> _Pattern:
    """Read and check an expression, or raise InvalidCron."""
    texts = _split(expr)
    fields = tuple(_read_field(kind, text) for kind, text in zip(_KINDS, texts, strict=True))
    second, minute, hour, monthday, month, weekday = fields
    days = [(m, w) for m, w in _day_rules(monthday, weekday) if _occurs(m, month, w)]
    if not days:
        raise InvalidCron(_why_never(monthday, month, weekday))
    rules = tuple(
        # day_or=False because Vixie's rule has been applied: within a rule both days must match.
        croniter(
            " ".join(map(_canonical, (second, minute, hour, m, month, w))),
            0,
            day_or=False,
            second_at_beginning=True,
            implement_cron_bug=True,
        )
        for m, w in days
    )
    return _Pattern(
        second=second, minute=minute, hour=hour, monthday=monthday, month=month, weekday=weekday, rules=rules
    )


def _split(expr: str) -> list[str]:
    if not isinstance(expr, str):
        raise TypeError(f"a cron expression is a str, not {type(expr).__name__}")
    if len(expr) > _LONGEST:
        raise InvalidCron(f"the expression has {len(expr)} characters; at most {_LONGEST} are read")
    text = expr.strip(" \t\r\n")
    strange = next((c for c in text if not (" " <= c <= "~" or c == "\t")), None)
    if strange is not None:
        raise InvalidCron(f"the character {strange!a} has no place in an expression")
    text = text.lower()
    if text.startswith("@"):
        if text not in _NICKNAMES:
            hint = "; for a fixed interval use `every` instead of cron" if text.startswith("@every") else ""
            raise InvalidCron(f"`{text}` is not supported; the nicknames are {', '.join(_NICKNAMES)}{hint}")
        text = _NICKNAMES[text]
    if "=" in text:
        raise InvalidCron("`=` has no place in an expression; the timezone is a setting of its own beside it")
    texts = text.split()
    if len(texts) == 5:
        return ["0", *texts]
    if len(texts) == 6:
        return texts
    hint = "; a year field is not supported" if len(texts) == 7 else ""
    raise InvalidCron(
        f"{len(texts) or 'no'} field{'' if len(texts) == 1 else 's'} where 5 or 6 are needed: "
        f"minute hour day month weekday, with seconds in front if you like{hint}"
    )


def _read_field(kind: _Kind, text: str) -> _Field:
    values: set[int] = set()
    nth: set[tuple[int, int]] = set()
    for item in text.split(","):
        if match := _ITEM.fullmatch(item):
            values.update(_read_range(kind, item, *match.groups()))
        elif kind is _MONTHDAY and item == "l":
            values.add(_LAST_OF_MONTH)
        elif kind is _WEEKDAY and (match := _LAST.fullmatch(item)):
            nth.add((_read_value(kind, match[1] or match[2]) % 7, _LAST_OF_MONTH))
        elif kind is _WEEKDAY and (match := _NTH.fullmatch(item)):
            week = int(match[2])
            if not 1 <= week <= 5:
                raise InvalidCron(
                    f"`{item.upper()}`: the week of a month is 1-5, or write `{match[1].upper()}L` for the last"
                )
            nth.add((_read_value(kind, match[1]) % 7, week))
        else:
            raise InvalidCron(_why_unreadable(kind, text, item))
    plain = {value % 7 for value in values} if kind is _WEEKDAY else values
    return _Field(kind=kind, text=text, values=frozenset(plain), nth=frozenset(p for p in nth if p[0] not in plain))


def _read_range(kind: _Kind, item: str, first: str | None, last: str | None, step: str | None) -> range:
    low = kind.low if first is None else _read_value(kind, first)
    alone = first is not None and last is None and step is None
    high = low if alone else kind.high if last is None else _read_value(kind, last)
    if low > high:
        raise InvalidCron(f"{kind.name}: `{item.upper()}` runs backwards{_the_right_way(kind, low, high, step)}")
    if step is not None and not 1 <= int(step) <= kind.size:
        raise InvalidCron(f"{kind.name}: the step of `{item}` is outside 1-{kind.size}")
    return range(low, high + 1, int(step or 1))


def _the_right_way(kind: _Kind, low: int, high: int, step: str | None) -> str:
    if step is not None:
        return ""
    bottom = 1 if kind is _WEEKDAY else kind.low
    parts = [(low, kind.high), (bottom, high)] if high >= bottom else [(low, kind.high)]
    return f"; write `{','.join(f'{a}' if a == b else f'{a}-{b}' for a, b in parts)}`"


def _read_value(kind: _Kind, text: str) -> int:
    if text.isdigit():
        if not kind.low <= int(text) <= kind.high:
            hint = "; a year field is not supported" if kind is _WEEKDAY and len(text) == 4 else ""
            raise InvalidCron(f"{kind.name} {text} is outside {kind.low}-{kind.high}{hint}")
        return int(text)
    for value, word in enumerate(kind.words, kind.low):
        if text == word[:3].lower():
            return value
    raise InvalidCron(f"`{text.upper()}` is no {kind.name}")


_UNREADABLE: tuple[tuple[str, _Kind | None, str], ...] = (
    ("", None, "there is an empty list item"),
    (r".*\?.*", None, "`?` is not supported; write `*`"),
    (r"\d+w|w\d+|lw|wl", None, "`W`, the nearest working day, is not supported"),
    (r"[hr](\W.*)?", None, "`H` and `R` are not supported; write the value (a schedule's `jitter` spreads the load)"),
    (r"l", _WEEKDAY, "`L` alone is no weekday; the last Friday is `5L` or `L5`, the last day `L` in the day field"),
    (r".*[#l].*", _WEEKDAY, "the third Friday is `5#3`, the last one `5L` or `L5`; nothing else takes `#` or `L`"),
    (r".*l.*", _MONTHDAY, "`L` is the last day of the month and takes no offset, range or step"),
    (r"\w+-", None, "the range has no end"),
    (r"[+-]\d.*", None, "a value is a plain number"),
    (r".*", None, "this is not a value, a range (`1-5`) or a step (`*/5`, `10-50/5`)"),
)


def _why_unreadable(kind: _Kind, text: str, item: str) -> str:
    shown = f"`{item or text}`".upper()
    long = {word.lower() for word in kind.words}.intersection(re.findall(r"\w+", item))
    if long:
        return f"{kind.name} {shown}: names have three letters; write `{min(long)[:3].upper()}`"
    return next(
        f"{kind.name} {shown}: {reason}"
        for shape, only, reason in _UNREADABLE
        if only in (None, kind) and re.fullmatch(shape, item)
    )


# ── days ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_LENGTHS = {2: (28, 29)} | dict.fromkeys((4, 6, 9, 11), (30,)) | dict.fromkeys((1, 3, 5, 7, 8, 10, 12), (31,))


def _either_day(monthday: _Field, weekday: _Field) -> bool:
    """Vixie's rule: both day fields must match as soon as one of them starts with `*`; else one is enough."""
    return not (monthday.starred or weekday.starred)


def _day_rules(monthday: _Field, weekday: _Field) -> list[tuple[_Field, _Field]]:
    """Return pairs of day fields, each to be met in both, which together mean what the two fields mean.

    croniter ANDs numbered weekdays (`5#3`) with whatever stands beside them and refuses a mixture such as `1,5#3`, so
    plain and numbered weekdays are rules of their own.
    """
    any_monthday = _Field(kind=_MONTHDAY, text="*", values=frozenset(range(1, 32)))
    any_weekday = _Field(kind=_WEEKDAY, text="*", values=frozenset(range(7)))
    plain = _Field(kind=_WEEKDAY, text=weekday.text, values=weekday.values)
    numbered = _Field(kind=_WEEKDAY, text=weekday.text, values=frozenset(), nth=weekday.nth)
    weekdays = [part for part in (plain, numbered) if part.values or part.nth]
    if not _either_day(monthday, weekday):
        return [(monthday, part) for part in weekdays]
    return [(monthday, any_weekday), *((any_monthday, part) for part in weekdays)]


def _occurs(monthday: _Field, month: _Field, weekday: _Field) -> bool:
    """Tell whether such a day ever comes: in the long run a month of each length begins on each weekday."""
    weeks = {week for _, week in weekday.nth}
    return any(
        weekday.values or (day + 6) // 7 in weeks or (_LAST_OF_MONTH in weeks and day > length - 7)
        for each in month.values
        for length in _LENGTHS[each]
        for day in (value or length for value in monthday.values)
        if day <= length
    )


def _why_never(monthday: _Field, month: _Field, weekday: _Field) -> str:
    first = min(monthday.values)
    if all(first > max(_LENGTHS[each]) for each in month.values):
        missing = _listed([f"{_MONTHS[each - 1]} {first}" for each in sorted(month.values)], last="or")
        return f"there is no {missing}, so this would never fire"
    days = f"`{monthday.text.upper()}` as day of month and `{weekday.text.upper()}` as weekday"
    return f"no day is both {days}, so this would never fire; both are needed as soon as one starts with `*`"


def _canonical(field: _Field) -> str:
    """Write a field for croniter in the plainest way, where an equal range or a step can't mean something else."""
    if field.full:
        return "*"
    plain = [str(value) if value or field.kind is not _MONTHDAY else "L" for value in sorted(field.values)]
    return ",".join(plain + [f"{day}#{week}" if week else f"L{day}" for day, week in sorted(field.nth)])


# ── in words ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_MOST_TIMES = 6
_WEEKS = ("last", "first", "second", "third", "fourth", "fifth")


def _in_words(pattern: _Pattern) -> str:
    times = list(islice(_times(pattern), _MOST_TIMES + 1))
    if len(times) <= _MOST_TIMES:
        shape = "{:02}:{:02}" if pattern.second.values == {0} else "{:02}:{:02}:{:02}"
        text = f"At {_listed([shape.format(*time) for time in times])} {_days_in_words(pattern) or 'every day'}"
    else:
        text = f"{_units_of_time_in_words(pattern)} {_days_in_words(pattern)}".rstrip()
    if pattern.month.full:
        return text
    return f"{text} in {_listed(_runs(sorted(pattern.month.values), lambda month: _MONTHS[month - 1]))}"


def _times(pattern: _Pattern) -> Iterator[tuple[int, ...]]:
    return product(*(sorted(field.values) for field in (pattern.hour, pattern.minute, pattern.second)))


def _units_of_time_in_words(pattern: _Pattern) -> str:
    if pattern.hour.full and pattern.minute.values == pattern.second.values == {0}:
        return "Every hour on the hour"
    fields = [pattern.minute, pattern.hour]
    if pattern.second.values != {0}:
        fields.insert(0, pattern.second)
    text = _unit_in_words(fields[0], smallest=True)
    for finer, field in pairwise(fields):
        steady = finer.full or text.startswith("every")
        hours = sorted(field.values)
        if field.full and steady:
            continue
        if field is pattern.hour and steady and hours == list(range(hours[0], hours[-1] + 1)):
            text += f" from {hours[0]:02}:00 to {hours[-1]:02}:59"
        else:
            text += f" of {_unit_in_words(field, smallest=False)}"
    return f"E{text[1:]}" if text.startswith("every") else f"At {text}"


def _unit_in_words(field: _Field, *, smallest: bool) -> str:
    name = field.kind.name
    if field.full:
        return f"every {name}"
    if field.step and field.kind.size % field.step == 0:
        return f"every {field.step} {name}s" if smallest else f"every {_ordinal(field.step)} {name}"
    values = sorted(field.values)
    return f"{name}{'s' if len(values) > 1 else ''} {_listed(_runs(values, str))}"


def _days_in_words(pattern: _Pattern) -> str:
    if pattern.either_day:
        monthdays, weekdays = _monthdays_in_words(pattern.monthday), _weekdays_in_words(pattern.weekday, last="and")
        return f"on {monthdays} or on {weekdays}" if monthdays and weekdays else ""
    monthdays, weekdays = _monthdays_in_words(pattern.monthday), _weekdays_in_words(pattern.weekday, last="or")
    if monthdays and weekdays:
        return f"on {monthdays} if it is {weekdays}"
    weekdays = _weekdays_in_words(pattern.weekday, last="and")
    return f"on {monthdays or weekdays}" if monthdays or weekdays else ""


def _monthdays_in_words(field: _Field) -> str:
    if field.full:
        return ""
    if field.step:
        return f"every {_ordinal(field.step)} day of the month from the 1st on"
    days = _runs(sorted(field.values - {_LAST_OF_MONTH}), _ordinal)
    return f"the {_listed(days + ['last'] * (_LAST_OF_MONTH in field.values))} day of the month"


def _weekdays_in_words(field: _Field, *, last: str) -> str:
    if field.full:
        return ""
    days = _runs(sorted(day or 7 for day in field.values), lambda day: _WEEKDAYS[day % 7])
    days += [f"the {_WEEKS[week]} {_WEEKDAYS[day]} of the month" for day, week in sorted(field.nth)]
    return _listed(days, last)


def _runs(values: list[int], word: Callable[[int], str]) -> list[str]:
    """Word the values, with three or more neighbours as one `first to last`."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return [
        text for run in runs for text in ([f"{word(run[0])} to {word(run[-1])}"] if len(run) > 2 else map(word, run))
    ]


def _ordinal(number: int) -> str:
    teens = 11 <= number % 100 <= 13
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def _listed(words: list[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
