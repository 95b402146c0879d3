"""Cron expressions, compared with an independent reference that steps through real time."""

from __future__ import annotations

import struct
import zoneinfo
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from functools import lru_cache
from importlib.resources import files
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rota.cron import Cron, Fold, Gap, InvalidCron, next_fire, tzdata_version, zone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ZONES = (
    *("UTC", "Africa/Cairo", "Africa/Casablanca", "Africa/El_Aaiun", "Africa/Monrovia", "Africa/Windhoek"),
    *("America/Asuncion", "America/Caracas", "America/Havana", "America/Los_Angeles", "America/Noronha"),
    *("America/New_York", "America/Nuuk", "America/Santiago", "America/Sao_Paulo", "America/St_Johns"),
    *("Antarctica/Casey", "Antarctica/Troll", "Asia/Amman", "Asia/Gaza", "Asia/Kathmandu", "Asia/Pyongyang"),
    *("Asia/Tehran", "Asia/Yakutsk", "Australia/Lord_Howe", "Australia/Sydney", "Europe/Berlin", "Europe/Dublin"),
    *("Europe/Istanbul", "Europe/Lisbon", "Europe/Moscow", "Europe/Volgograd", "Pacific/Apia", "Pacific/Chatham"),
    *("Pacific/Enderbury", "Pacific/Fiji", "Pacific/Kiritimati", "Pacific/Kwajalein", "Pacific/Norfolk"),
)
MINUTE, HOUR, DAY = 60, 3600, 86_400
# Skipped days, half-hour and two-hour changes, a moved standard time, an offset of 44:30, changes a week apart.
ODD = (
    *(("Pacific/Apia", 2011), ("Pacific/Kwajalein", 1993), ("Pacific/Kiritimati", 1994), ("Pacific/Enderbury", 1994)),
    *(("Australia/Lord_Howe", 2024), ("America/Caracas", 2007), ("America/Caracas", 2016), ("Asia/Pyongyang", 2018)),
    *(("Europe/Volgograd", 2020), ("Europe/Moscow", 2014), ("Europe/Lisbon", 1996), ("Asia/Yakutsk", 2011)),
    *(("Africa/Monrovia", 1972), ("America/Noronha", 2000), ("Asia/Gaza", 2054), ("Africa/El_Aaiun", 1976)),
    *(("Europe/Chisinau", 2020), ("Europe/Warsaw", 1985), ("Asia/Jerusalem", 2046), ("America/Boise", 1974)),
    *(("Antarctica/Troll", 2024), ("Africa/Casablanca", 2040), ("Europe/Dublin", 1971), ("America/Havana", 2015)),
)


# ── the reference ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Field:
    """The text of one field and the values it matches, generated together."""

    text: str
    values: frozenset[int]
    last: bool = False
    nth: frozenset[tuple[int, int]] = frozenset()

    @property
    def starred(self) -> bool:
        return self.text[0] == "*"


@dataclass(frozen=True)
class Entry:
    second: Field
    minute: Field
    hour: Field
    monthday: Field
    month: Field
    weekday: Field

    @property
    def expr(self) -> str:
        fields = (self.minute, self.hour, self.monthday, self.month, self.weekday)
        seconds = () if self.second.text == "" else (self.second,)
        return " ".join(field.text for field in (*seconds, *fields))

    @property
    def fixed(self) -> bool:
        return not self.minute.starred and not self.hour.starred

    def matches(self, wall: int) -> bool:
        days, second_of_day = divmod(wall, DAY)
        return (
            second_of_day // HOUR in self.hour.values
            and second_of_day // MINUTE % 60 in self.minute.values
            and second_of_day % 60 in self.second.values
            and self.matches_day(days)
        )

    @lru_cache(maxsize=100_000)  # noqa: B019 — entries are few and short-lived
    def matches_day(self, days: int) -> bool:
        day = date(1970, 1, 1) + timedelta(days=days)
        monthday = day.day in self.monthday.values or (self.monthday.last and (day + timedelta(1)).day == 1)
        weekday = day.isoweekday() % 7
        weekdays = (
            weekday in self.weekday.values
            or (weekday, (day.day + 6) // 7) in self.weekday.nth
            or ((weekday, 0) in self.weekday.nth and (day + timedelta(7)).month != day.month)
        )
        both = self.monthday.starred or self.weekday.starred
        return day.month in self.month.values and (monthday and weekdays if both else monthday or weekdays)


class Reading(NamedTuple):
    at: int
    wall: int


@lru_cache(maxsize=64)
def read_local_clock(name: str, start: int, end: int, step: int) -> tuple[Reading, ...]:
    """Return the zone's local time at every step of real time."""
    info = zone(name)
    readings = []
    for at in range(start, end, step):
        offset = datetime.fromtimestamp(at, info).utcoffset()
        assert offset is not None
        readings.append(Reading(at, at + int(offset.total_seconds())))
    return tuple(readings)


def expected_fires(entry: Entry, readings: tuple[Reading, ...], step: int, gap: Gap, fold: Fold) -> Iterator[int]:
    """Apply the policy at every reading. The first reading only provides the previous offset."""
    highest = readings[0].wall
    for at, wall in readings[1:]:
        jumped_over = range(highest + step, wall, step)
        if not entry.fixed:
            fires = entry.matches(wall)
        elif wall > highest:
            fires = entry.matches(wall) or (gap == "after" and any(map(entry.matches, jumped_over)))
        else:
            fires = fold == "both" and entry.matches(wall)
        if fires:
            yield at
        highest = max(highest, wall)


@lru_cache(maxsize=4096)
def offset_changes(name: str, year: int) -> tuple[int, ...]:
    """Find the instants of a year at which the zone's offset changes."""
    info = zone(name)

    def offset(at: int) -> timedelta | None:
        return datetime.fromtimestamp(at, info).utcoffset()

    start, end = (int(datetime(each, 1, 1, tzinfo=UTC).timestamp()) for each in (year, year + 1))
    found = []
    for hour in range(start, end, 6 * HOUR):
        if offset(hour) != (before := offset(hour - 6 * HOUR)):
            minute = next(at for at in range(hour - 6 * HOUR, hour + 1, MINUTE) if offset(at) != before)
            found.append(next(at for at in range(minute - MINUTE, minute + 1) if offset(at) != before))
    return tuple(found)


# ── strategies ────────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def items(draw: st.DrawFn, low: int, high: int, *, top: int | None = None) -> tuple[str, frozenset[int]]:
    """Draw one list item: a value, a range or a step.

    `top` is the largest value that the syntax accepts (7 for weekdays).
    """
    top = high if top is None else top
    first = draw(st.integers(low, top))
    last = draw(st.integers(first, top))
    step = draw(st.integers(1, high - low + 1))
    return draw(
        st.sampled_from(
            [
                (f"{first}", frozenset({first})),
                (f"{first:02}", frozenset({first})),
                (f"{first}-{last}", frozenset(range(first, last + 1))),
                (f"{first}-{last}/{step}", frozenset(range(first, last + 1, step))),
                (f"{first}/{step}", frozenset(range(first, top + 1, step))),
                (f"*/{step}", frozenset(range(low, high + 1, step))),
            ]
        )
    )


@st.composite
def fields(draw: st.DrawFn, low: int, high: int, *, top: int | None = None) -> Field:
    if draw(st.integers(0, 9)) < 3:
        return Field("*", frozenset(range(low, high + 1)))
    chosen = draw(st.lists(items(low, high, top=top), min_size=1, max_size=3))
    return Field(",".join(text for text, _ in chosen), frozenset().union(*(values for _, values in chosen)))


@st.composite
def monthdays(draw: st.DrawFn) -> Field:
    field = draw(fields(1, 31))
    match draw(st.integers(0, 9)):
        case 0:
            return Field("L", frozenset(), last=True)
        case 1:
            return Field(f"{field.text},L", field.values, last=True)
        case _:
            return field


@st.composite
def weekdays(draw: st.DrawFn) -> Field:
    field = draw(fields(0, 6, top=7))
    field = Field(field.text, frozenset(value % 7 for value in field.values))
    day, week = draw(st.integers(0, 7)), draw(st.integers(1, 5))
    text, pair = draw(
        st.sampled_from(
            [(f"{day}#{week}", (day % 7, week)), (f"{day}L", (day % 7, 0)), (f"l{day}", (day % 7, 0))],
        )
    )
    match draw(st.integers(0, 9)):
        case 0 | 1:
            return Field(text, frozenset(), nth=frozenset({pair}))
        case 2:
            return Field(f"{field.text},{text}", field.values, nth=frozenset({pair}))
        case _:
            return field


@st.composite
def entries(draw: st.DrawFn, *, seconds: bool = False) -> Entry:
    any_day = st.just(Field("*", frozenset(range(1, 32))))
    any_month = st.just(Field("*", frozenset(range(1, 13))))
    any_weekday = st.just(Field("*", frozenset(range(7))))
    return Entry(
        second=draw(fields(0, 59)) if seconds else Field("", frozenset({0})),
        minute=draw(fields(0, 59)),
        hour=draw(fields(0, 23)),
        monthday=draw(st.one_of(any_day, monthdays())),
        month=draw(st.one_of(any_month, fields(1, 12))),
        weekday=draw(st.one_of(any_weekday, weekdays())),
    )


second_shifts = st.integers(-2 * HOUR, 2 * HOUR)
gaps: st.SearchStrategy[Gap] = st.sampled_from(["after", "skip"])
folds: st.SearchStrategy[Fold] = st.sampled_from(["first", "both"])


@st.composite
def windows(draw: st.DrawFn) -> tuple[str, int]:
    """Draw a zone and an instant at which its offset changes, or the middle of a year without a change."""
    years = st.one_of(st.integers(1971, 2037), st.integers(2038, 2190))
    name, year = draw(st.one_of(st.tuples(st.sampled_from(ZONES), years), st.sampled_from(ODD)))
    middle = int(datetime(year, 7, 1, tzinfo=UTC).timestamp())
    return name, draw(st.sampled_from(offset_changes(name, year) or (middle,)))


fast_settings = settings(deadline=None, max_examples=150, database=None, suppress_health_check=list(HealthCheck))


def parse_valid(entry: Entry, name: str, gap: Gap, fold: Fold) -> Cron:
    try:
        return Cron(entry.expr, timezone=name, gap=gap, fold=fold)
    except InvalidCron as refusal:
        assume("never fire" not in str(refusal))
        raise


def assert_same_fires(
    entry: Entry, readings: tuple[Reading, ...], name: str, step: int, middle: int, gap: Gap, fold: Fold
) -> None:
    cron = parse_valid(entry, name, gap, fold)
    first, end = readings[0].at, readings[-1].at + step
    expected = list(islice(expected_fires(entry, readings, step, gap, fold), 150))
    is_complete = len(expected) < 150

    actual = [int(fire.timestamp()) for fire in cron.next(as_datetime(first), len(expected) + is_complete)]
    if is_complete and actual and actual[-1] >= end:
        actual.pop()
    assert actual == expected, cron

    before = end if is_complete else expected[-1] + 1
    backward = [int(fire.timestamp()) for fire in cron.previous(as_datetime(before), len(expected) + 1)]
    if backward and backward[-1] <= first:
        backward.pop()
    assert backward == expected[::-1], cron

    # Search from the middle in both directions.
    middle = max(first, min(middle, before))
    later = [fire for fire in expected if fire > middle][:3]
    earlier = [fire for fire in expected if fire < middle][:-4:-1]
    assert [int(fire.timestamp()) for fire in cron.next(as_datetime(middle), len(later))] == later, (cron, middle)
    assert [int(fire.timestamp()) for fire in cron.previous(as_datetime(middle), len(earlier))] == earlier, (
        cron,
        middle,
    )


def as_datetime(at: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=at)


# ── properties ────────────────────────────────────────────────────────────────────────────────────────────────────────


@fast_settings
@given(entries(), windows(), second_shifts, gaps, folds)
def test_fires_near_offset_changes_match_the_minute_by_minute_reference(
    entry: Entry, window: tuple[str, int], shift: int, gap: Gap, fold: Fold
) -> None:
    """Holds in every zone and era, and in both directions."""
    name, change = window
    start = change - change % MINUTE - 36 * HOUR
    readings = read_local_clock(name, start, start + 72 * HOUR, MINUTE)
    assume(all(reading.wall % MINUTE == 0 for reading in (readings[0], readings[-1])))
    assert_same_fires(entry, readings, name, MINUTE, change + shift, gap, fold)


@fast_settings
@given(entries(seconds=True), windows(), second_shifts, gaps, folds)
def test_fires_with_a_seconds_field_match_the_second_by_second_reference(
    entry: Entry, window: tuple[str, int], shift: int, gap: Gap, fold: Fold
) -> None:
    """Some offsets are not whole minutes."""
    name, change = window
    readings = read_local_clock(name, change - 2 * HOUR, change + 2 * HOUR, 1)
    assert_same_fires(entry, readings, name, 1, change + shift, gap, fold)


def fires_by_calendar(entry: Entry, name: str, years: range, gap: Gap, fold: Fold, most: int) -> list[int]:
    """Return the fires of every matching local time of every day of the given years."""
    info = zone(name)
    seconds = sorted(entry.second.values)
    times = [HOUR * h + MINUTE * m + s for h in entry.hour.values for m in entry.minute.values for s in seconds]
    fires = set()
    first, end = ((date(year, 1, 1) - date(1970, 1, 1)).days for year in (years.start, years.stop))
    for days in filter(entry.matches_day, range(first, end)):
        for time_of_day in times:
            reading = (as_datetime(days * DAY) + timedelta(seconds=time_of_day)).replace(tzinfo=None)
            passes = [int(reading.replace(tzinfo=info, fold=fold).timestamp()) for fold in (0, 1)]
            real = sorted({at for at in passes if datetime.fromtimestamp(at, info).replace(tzinfo=None) == reading})
            if real:
                fires.update(real[:1] if entry.fixed and fold == "first" else real)
            elif entry.fixed and gap == "after":
                jumps = (
                    offset_changes(name, reading.year - 1)
                    + offset_changes(name, reading.year)
                    + offset_changes(name, reading.year + 1)
                )
                fires.update(jump for jump in jumps if min(passes) < jump <= max(passes))
        if len(fires) > most + 100:  # a fold can change the order of the last few
            break
    return sorted(fires)[:most]


@fast_settings
@given(entries(), st.sampled_from(ZONES), st.integers(1971, 2186), gaps, folds)
def test_rare_fires_over_years_match_the_calendar_reference(
    entry: Entry, name: str, year: int, gap: Gap, fold: Fold
) -> None:
    """Many offset changes lie between two rare fires."""
    assume(len(entry.hour.values) * len(entry.minute.values) <= 8)
    years = range(year, year + 12)
    cron = parse_valid(entry, name, gap, fold)
    expected = fires_by_calendar(entry, name, years, gap, fold, most=100)[1:-1]
    assume(len(expected) > 2)
    start, end = as_datetime(expected[0] - 1), as_datetime(expected[-1] + 1)

    assert [int(fire.timestamp()) for fire in cron.next(start, len(expected))] == expected
    assert [int(fire.timestamp()) for fire in cron.previous(end, len(expected))] == expected[::-1]


# ── rules ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("expr", "same"),
    [
        ("1-1 * * * *", "1 * * * *"),
        ("0 5-5 * * *", "0 5 * * *"),
        ("0 0 * 1-1 *", "0 0 * 1 *"),
        ("0 0 * * 7-7", "0 0 * * 0"),
        ("5/15 * * * *", "5-59/15 * * * *"),
        ("59/15 * * * *", "59 * * * *"),
        ("*/60 */24 * * *", "0 0 * * *"),
        ("0 0 * * 5L", "0 0 * * L5"),
        ("0 0 * * friL", "0 0 * * 5l"),
        ("0 0 * * FRI#3,7#1", "0 0 * * 5#3,0#1"),
        ("0 0 * * 5-7", "0 0 * * 5,6,0"),
        ("0 0 * * 7", "0 0 * * SUN"),
        ("0 0 * * 0-7", "0 0 * * *"),
        ("0 0 * jan-Mar MON-fri", "0 0 * 1-3 1-5"),
        ("00 09 01 01 *", "0 9 1 1 *"),
        ("  0\t9   * * *\n", "0 9 * * *"),
        ("0 0 9 * * *", "0 9 * * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "@Yearly"),
        ("@monthly", "0 0 1 * *"),
        ("@weekly", "0 0 * * 0"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "@daily"),
        ("@hourly", "0 * * * *"),
        ("0 0 31 2 1", "0 0 * 2 1"),
        ("0 0 */2 * 1", "0 0 */2 * 1-1"),
        ("0 0 5,* * 1", "0 0 * * *"),
        ("0 0 *,5 * 1", "0 0 * * 1"),
        (f"{','.join(map(str, range(60)))} 0 * * *", "0-59 0 * * *"),
    ],
)
def test_equivalent_expressions_fire_at_the_same_instants(expr: str, same: str) -> None:
    """croniter reads some of these differently: it takes a range like 5-5 as the whole cycle."""
    assert Cron(expr).next(NOW, 40) == Cron(same).next(NOW, 40)
    assert Cron(expr).previous(NOW, 40) == Cron(same).previous(NOW, 40)


@pytest.mark.parametrize(
    ("expr", "reason"),
    [
        ("", "no fields where 5 or 6 are needed"),
        ("0 9 * *", "4 fields where 5 or 6 are needed"),
        ("0 0 0 1 1 * 2027", "a year field is not supported"),
        ("0 0 1 1 * 2027", "weekday 2027 is outside 0-7; a year field is not supported"),
        ("60 * * * *", "minute 60 is outside 0-59"),
        ("0 0 0 * *", "day of month 0 is outside 1-31"),
        ("99999999999999999999 * * * *", "is outside 0-59"),
        ("50-10 * * * *", "`50-10` runs backwards; write `50-59,0-10`"),
        ("0 23-0 * * *", "`23-0` runs backwards; write `23,0`"),
        ("0 0 * * FRI-MON", "`FRI-MON` runs backwards; write `5-7,1`"),
        ("0 0 * * sat-sun", "`SAT-SUN` runs backwards; write `6-7`"),
        ("0 0 * NOV-FEB *", "`NOV-FEB` runs backwards; write `11-12,1-2`"),
        ("*/61 * * * *", "the step of `*/61` is outside 1-60"),
        ("*/0 * * * *", "the step of `*/0` is outside 1-60"),
        ("0 0 * * */8", "outside 1-7"),
        ("0 0 ? * MON", "`?` is not supported; write `*`"),
        ("H * * * *", "`H` and `R` are not supported"),
        ("R(0-5)/2 * * * *", "`H` and `R` are not supported"),
        ("0 0 15W * *", "nearest working day"),
        ("0 0 L-3 * *", "`L` is the last day of the month"),
        ("0 0 * * L", "the last Friday is `5L` or `L5`"),
        ("0 0 * * 1-5L", "the last one `5L` or `L5`"),
        ("0 0 * * 5#6", "the week of a month is 1-5"),
        ("0 0 * * Monday", "names have three letters; write `MON`"),
        ("0 0 * mon *", "`MON` is no month"),
        ("1,,2 * * * *", "empty list item"),
        ("1- * * * *", "the range has no end"),
        ("-5 * * * *", "a value is a plain number"),
        ("*5 * * * *", "not a value, a range (`1-5`) or a step"),
        ("@reboot", "the nicknames are @yearly"),
        ("@every 5m", "use `every`"),
        ("CRON_TZ=Europe/Paris 0 0 * * *", "the timezone is a setting of its own"),
        ("0 0 30 2 *", "there is no February 30, so this would never fire"),
        ("0 0 31 4,6 *", "there is no April 31 or June 31, so this would never fire"),
        ("0 0 */31 * 5#3", "no day is both `*/31` as day of month and `5#3` as weekday"),
        ("0 0 */23 1 5L", "no day is both `*/23` as day of month and `5L` as weekday"),
        ("\u0665 * * * *", "has no place in an expression"),
        ("0\u00a09 * * * *", "has no place in an expression"),
        ("0 9 * * *\x00", "has no place in an expression"),
        ("0 9\n* * *", "has no place in an expression"),
        ("0" * 1001, "at most 1000"),
    ],
)
def test_an_invalid_expression_is_refused_with_the_reason(expr: str, reason: str) -> None:
    """Authors often read the message in the log of another service."""
    with pytest.raises(InvalidCron) as refusal:
        Cron(expr)
    assert reason in str(refusal.value)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "the timezone is empty"),
        ("europe/vienna", "did you mean `Europe/Vienna`?"),
        ("Europe/Viena", "did you mean `Europe/Vienna`?"),
        (" UTC", "did you mean `UTC`?"),
        ("../etc/passwd", "there is no timezone"),
        ("/etc/localtime", "there is no timezone"),
        ("localtime", "there is no timezone"),
        ("right/Europe/Vienna", "there is no timezone"),
        ("Europe", "there is no timezone"),
        ("Europe/Vienna\x00", "there is no timezone"),
        ("x" * 10_000, "there is no timezone"),
    ],
)
def test_an_unknown_timezone_is_refused(name: str, reason: str) -> None:
    """Names are compared with a list, so a path, another case or the machine's setting is refused."""
    with pytest.raises(InvalidCron) as refusal:
        Cron("@daily", timezone=name)
    assert reason in str(refusal.value)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("policy", [{"gap": "before"}, {"gap": ""}, {"fold": "second"}, {"fold": None}])
def test_an_unknown_daylight_saving_policy_is_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(InvalidCron, match=r"is '[a-z]+' or '[a-z]+', not "):
        Cron("@daily", **policy)


def test_a_datetime_without_a_timezone_is_refused() -> None:
    """Python reads a naive datetime in the machine's zone, its author in the schedule's."""
    naive: Any = datetime(2026, 1, 1)  # noqa: DTZ001 — that is the point
    for call in (Cron("@daily").next, Cron("@daily").previous, lambda at: next_fire("@daily", at)):
        with pytest.raises(ValueError, match="carries no timezone"):
            call(naive)
        with pytest.raises(TypeError, match="a datetime is needed, not float"):
            call(0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is a str, not NoneType"):
        Cron(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count is 0 or more"):
        Cron("@daily").next(NOW, -1)


def test_next_and_previous_exclude_the_given_instant() -> None:
    """Otherwise the search from a fire would return the same fire again."""
    microsecond, fire = timedelta(microseconds=1), datetime(2026, 1, 1, 9, tzinfo=UTC)
    daily, day = Cron("0 9 * * *"), timedelta(days=1)

    assert daily.next(fire - microsecond) == [fire]
    assert daily.next(fire) == daily.next(fire + microsecond) == [fire + day]
    assert daily.previous(fire + microsecond) == [fire]
    assert daily.previous(fire) == daily.previous(fire - microsecond) == [fire - day]
    assert daily.next(fire, 0) == daily.previous(fire, 0) == []


def test_both_passes_of_a_repeated_hour_are_different_instants() -> None:
    """Python treats the two datetimes as equal, so a cache keyed by datetime would mix up their fires."""
    first = datetime(2023, 10, 29, 2, 15, tzinfo=zone("Europe/Berlin"))
    second = first.replace(fold=1)
    assert first == second

    for ask in (Cron("30 * * * *", timezone="Europe/Berlin").next, lambda at: [next_fire("30 * * * *", at)]):
        assert ask(first) == [datetime(2023, 10, 29, 0, 30, tzinfo=UTC)]
        assert ask(second) == [datetime(2023, 10, 29, 1, 30, tzinfo=UTC)]


def test_a_search_that_starts_inside_a_repeated_hour_recognises_it() -> None:
    """Readings before the start decide whether a local time is repeated.

    The offset change lies on the border of a search window.
    """
    within = datetime(2020, 10, 25, 0, 10, tzinfo=UTC)
    first = Cron("30 2 * * *", timezone="Europe/Chisinau")
    both = Cron("30 2 * * *", timezone="Europe/Chisinau", fold="both")

    assert first.next(within) == [datetime(2020, 10, 26, 0, 30, tzinfo=UTC)]
    assert both.next(within) == [datetime(2020, 10, 25, 0, 30, tzinfo=UTC)]


def test_two_offset_changes_a_week_apart_are_both_found() -> None:
    """Offsets are sampled at intervals, so a change reverted within one interval would be missed."""
    midnights = Cron("0 0 * * *", timezone="America/Noronha").next(datetime(2000, 10, 7, 12, tzinfo=UTC), 9)

    assert [fire.hour for fire in midnights] == [2, 1, 1, 1, 1, 1, 1, 2, 2]


def test_the_cache_of_next_fire_separates_policies_and_timezones() -> None:
    after = datetime(2024, 3, 10, tzinfo=UTC)
    crons = [
        Cron("30 2 * * *", timezone=timezone_, gap=gap)
        for timezone_ in ("America/New_York", "UTC")
        for gap in get_args(Gap)
    ]
    for cron in crons * 2:
        actual = next_fire(cron.expr, after, timezone=cron.timezone, gap=cron.gap, fold=cron.fold)
        assert [actual] == cron.next(after) == cron.next(after, 2)[:1]
    assert len({cron.next(after)[0] for cron in crons}) == 3


def test_no_fires_exist_outside_1970_to_2200() -> None:
    """Outside these bounds of the schema the search returns fewer fires. It neither fails nor overflows."""
    hourly, leap_sunday = Cron("@hourly"), Cron("0 0 29 2 */7")
    last = datetime(2199, 12, 31, 23, tzinfo=UTC)
    latest = datetime.max.replace(tzinfo=timezone(timedelta(hours=-14)))
    earliest = datetime.min.replace(tzinfo=timezone(timedelta(hours=14)))

    assert hourly.next(last - timedelta(hours=2), 5) == [last - timedelta(hours=1), last]
    assert hourly.next(last) == hourly.next(latest, 3) == hourly.previous(earliest, 3) == []
    assert hourly.previous(latest) == [last]
    assert hourly.next(earliest) == [datetime(1970, 1, 1, tzinfo=UTC)]
    assert next_fire("@hourly", latest) is None
    sundays = [day for year in range(1972, 2200, 4) if year != 2100 if (day := date(year, 2, 29)).isoweekday() == 7]
    assert [fire.date() for fire in leap_sunday.next(earliest, 99)] == sundays
    assert [fire.date() for fire in leap_sunday.previous(latest, 99)] == sundays[::-1]


def test_one_cron_can_be_used_by_many_threads() -> None:
    """All schedules with the same expression share one object."""
    cron = Cron("*/7 3-20 1,15 * 1-5", timezone="America/Havana")
    expected = cron.next(NOW, 50)
    with ThreadPoolExecutor(8) as pool:
        for actual in pool.map(lambda _: cron.next(NOW, 50), range(64)):
            assert actual == expected


def test_crons_with_the_same_settings_are_equal() -> None:
    """They serve as dictionary keys and are pickled."""
    assert Cron("@daily", timezone="Asia/Tokyo") == Cron("@daily", timezone="Asia/Tokyo")
    assert len({Cron("@daily"), Cron("@daily"), Cron("@daily", gap="skip")}) == 2


def test_timezones_come_from_the_tzdata_package_before_the_system(tmp_path: Path) -> None:
    """Two nodes with different system files would fire at different times."""
    (tmp_path / "Europe").mkdir()
    tokyo = files("tzdata.zoneinfo").joinpath("Asia", "Tokyo").read_bytes()
    (tmp_path / "Europe" / "Vienna").write_bytes(tokyo)
    zoneinfo.reset_tzpath(to=[tmp_path])
    try:
        zone.cache_clear()
        assert NOW.astimezone(zone("Europe/Vienna")).utcoffset() == timedelta(hours=1)
        assert str(zone("Europe/Vienna")) == "Europe/Vienna"
    finally:
        zoneinfo.reset_tzpath()
    assert tzdata_version()[:2] == "20"


def test_no_zone_changes_its_offset_twice_within_five_days() -> None:
    """The search samples the offset every second day and looks two days back for a repeated hour."""
    for name in files("tzdata").joinpath("zones").read_text().split():
        content = files("tzdata.zoneinfo").joinpath(*name.split("/")).read_bytes()
        second = content.index(b"TZif", 1)
        times, types = struct.unpack(">2l", content[second + 32 : second + 40])
        body = second + 44
        instants = struct.unpack(f">{times}q", content[body : body + 8 * times])
        kinds = content[body + 8 * times : body + 9 * times]
        offsets = [struct.unpack_from(">l", content, body + 9 * times + 6 * i)[0] for i in range(types)]
        steps = pairwise(zip(instants, kinds, strict=True))
        moves = [at for (_, last), (at, kind) in steps if at >= 0 and offsets[kind] != offsets[last]]
        assert all(later - earlier > 5 * DAY for earlier, later in pairwise(moves)), name


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        ("* * * * *", "Every minute, UTC."),
        ("*/5 * * * *", "Every 5 minutes, UTC."),
        ("*/7 9-10 * * *", "At minutes 0, 7, 14, 21, 28, 35, 42, 49 and 56 of hours 9 and 10, UTC."),
        ("0 * * * *", "Every hour on the hour, UTC."),
        ("30 * * * *", "At minute 30 of every hour, UTC."),
        ("15 */2 * * *", "At minute 15 of every 2nd hour, UTC."),
        ("* 2 * * *", "Every minute from 02:00 to 02:59, UTC."),
        ("*/15 9-17 * * 1-5", "Every 15 minutes from 09:00 to 17:59 on Monday to Friday, UTC."),
        ("0 9 * * *", "At 09:00 every day, UTC."),
        ("0 9,17 * * mon", "At 09:00 and 17:00 on Monday, UTC."),
        ("30 0 0 L * *", "At 00:00:30 on the last day of the month, UTC."),
        ("0 9 1,15,L * *", "At 09:00 on the 1st, 15th and last day of the month, UTC."),
        ("0 12 * * 5L,1#1", "At 12:00 on the first Monday of the month and the last Friday of the month, UTC."),
        ("0 0 13 * 5", "At 00:00 on the 13th day of the month or on Friday, UTC."),
        ("0 0 29 2 */7", "At 00:00 on the 29th day of the month if it is Sunday in February, UTC."),
        ("0 0 * * 5-7", "At 00:00 on Friday to Sunday, UTC."),
        ("0 0 1-31 1-3,7 1", "At 00:00 every day in January to March and July, UTC."),
        ("*/15 * * * * *", "Every 15 seconds, UTC."),
        ("* 5,8 * * * *", "Every second of minutes 5 and 8, UTC."),
        ("7 * 3 * * *", "At second 7 of every minute from 03:00 to 03:59, UTC."),
        ("0 0 */3 * *", "At 00:00 on every 3rd day of the month from the 1st on, UTC."),
    ],
)
def test_explain_describes_a_schedule_in_words(expr: str, words: str) -> None:
    assert Cron(expr).explain() == words


@fast_settings
@given(entries(), st.sampled_from(ZONES))
def test_every_valid_expression_can_be_explained(entry: Entry, name: str) -> None:
    words = parse_valid(entry, name, "after", "first").explain()
    assert words[0].isupper()
    assert "  " not in words
    assert words.endswith((f", {name} time.", ", UTC."))


@fast_settings
@given(st.one_of(st.text(max_size=40), st.text("0123456789*/-,#LWHR?@ \t", max_size=40)), st.text(max_size=20))
def test_parsing_any_text_succeeds_or_raises_invalid_cron(expr: str, name: str) -> None:
    """One bad row must not stop the other schedules."""
    for expression, timezone_ in ((expr, "UTC"), ("@daily", name)):
        try:
            cron = Cron(expression, timezone=timezone_)
        except InvalidCron:
            continue
        assert cron.next(NOW)
