"""Describe a cron expression in English."""

from __future__ import annotations

from itertools import islice, pairwise, product
from typing import TYPE_CHECKING

from rota.cron.expression import LAST_OF_MONTH, MONTHS, WEEKDAYS, join_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rota.cron.expression import Field, Pattern

_MAX_LISTED_TIMES = 6
_WEEKS = ("last", "first", "second", "third", "fourth", "fifth")


def describe_pattern(pattern: Pattern) -> str:
    times = list(islice(_times(pattern), _MAX_LISTED_TIMES + 1))
    if len(times) <= _MAX_LISTED_TIMES:
        shape = "{:02}:{:02}" if pattern.second.values == {0} else "{:02}:{:02}:{:02}"
        text = f"At {join_words([shape.format(*time) for time in times])} {_days_in_words(pattern) or 'every day'}"
    else:
        text = f"{_units_of_time_in_words(pattern)} {_days_in_words(pattern)}".rstrip()
    if pattern.month.matches_all:
        return text
    return f"{text} in {join_words(_runs(sorted(pattern.month.values), lambda month: MONTHS[month - 1]))}"


def _times(pattern: Pattern) -> Iterator[tuple[int, ...]]:
    return product(*(sorted(field.values) for field in (pattern.hour, pattern.minute, pattern.second)))


def _units_of_time_in_words(pattern: Pattern) -> str:
    if pattern.hour.matches_all and pattern.minute.values == pattern.second.values == {0}:
        return "Every hour on the hour"
    fields = [pattern.minute, pattern.hour]
    if pattern.second.values != {0}:
        fields.insert(0, pattern.second)
    text = _unit_in_words(fields[0], smallest=True)
    for finer, field in pairwise(fields):
        steady = finer.matches_all or text.startswith("every")
        hours = sorted(field.values)
        if field.matches_all and steady:
            continue
        if field is pattern.hour and steady and hours == list(range(hours[0], hours[-1] + 1)):
            text += f" from {hours[0]:02}:00 to {hours[-1]:02}:59"
        else:
            text += f" of {_unit_in_words(field, smallest=False)}"
    return f"E{text[1:]}" if text.startswith("every") else f"At {text}"


def _unit_in_words(field: Field, *, smallest: bool) -> str:
    name = field.kind.name
    if field.matches_all:
        return f"every {name}"
    if field.step and field.kind.size % field.step == 0:
        return f"every {field.step} {name}s" if smallest else f"every {_ordinal(field.step)} {name}"
    values = sorted(field.values)
    return f"{name}{'s' if len(values) > 1 else ''} {join_words(_runs(values, str))}"


def _days_in_words(pattern: Pattern) -> str:
    if pattern.matches_either_day:
        monthdays, weekdays = _monthdays_in_words(pattern.monthday), _weekdays_in_words(pattern.weekday, last="and")
        return f"on {monthdays} or on {weekdays}" if monthdays and weekdays else ""
    monthdays, weekdays = _monthdays_in_words(pattern.monthday), _weekdays_in_words(pattern.weekday, last="or")
    if monthdays and weekdays:
        return f"on {monthdays} if it is {weekdays}"
    weekdays = _weekdays_in_words(pattern.weekday, last="and")
    return f"on {monthdays or weekdays}" if monthdays or weekdays else ""


def _monthdays_in_words(field: Field) -> str:
    if field.matches_all:
        return ""
    if field.step:
        return f"every {_ordinal(field.step)} day of the month from the 1st on"
    days = _runs(sorted(field.values - {LAST_OF_MONTH}), _ordinal)
    return f"the {join_words(days + ['last'] * (LAST_OF_MONTH in field.values))} day of the month"


def _weekdays_in_words(field: Field, *, last: str) -> str:
    if field.matches_all:
        return ""
    days = _runs(sorted(day or 7 for day in field.values), lambda day: WEEKDAYS[day % 7])
    days += [f"the {_WEEKS[week]} {WEEKDAYS[day]} of the month" for day, week in sorted(field.nth)]
    return join_words(days, last)


def _runs(values: list[int], word: Callable[[int], str]) -> list[str]:
    """Format the values as words. Three or more consecutive values become `first to last`."""
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
