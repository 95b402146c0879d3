"""Parse a cron expression. An expression that is ambiguous or can never fire is rejected with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from croniter import croniter

from rota.errors import InvalidCron

_MAX_CHARACTERS = 1000
_NICKNAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
# Not calendar.month_name, which depends on the process's locale.
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
WEEKDAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")


@dataclass(frozen=True, slots=True, kw_only=True)
class _FieldKind:
    """The values that one field of an expression may have."""

    name: str
    low: int
    high: int
    words: tuple[str, ...] = ()  # the long names of the values, from the lowest on

    @property
    def size(self) -> int:
        return 7 if self is _WEEKDAY else self.high - self.low + 1


_SECOND = _FieldKind(name="second", low=0, high=59)
_MINUTE = _FieldKind(name="minute", low=0, high=59)
_HOUR = _FieldKind(name="hour", low=0, high=23)
MONTHDAY = _FieldKind(name="day of month", low=1, high=31)
_MONTH = _FieldKind(name="month", low=1, high=12, words=MONTHS)
_WEEKDAY = _FieldKind(name="weekday", low=0, high=7, words=WEEKDAYS)
_FIELD_KINDS = (_SECOND, _MINUTE, _HOUR, MONTHDAY, _MONTH, _WEEKDAY)

_ITEM = re.compile(r"(?:\*|(\d+|[a-z]{3})(?:-(\d+|[a-z]{3}))?)(?:/(\d+))?")
_NTH = re.compile(r"(\d+|[a-z]{3})#(\d+)")
_LAST = re.compile(r"l(\d+|[a-z]{3})|(\d+|[a-z]{3})l")
LAST_OF_MONTH = 0  # a marker: the last day of the month, or its last week


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A parsed field. `values` are plain values; `nth` are the (weekday, week of the month) pairs of a weekday field."""

    kind: _FieldKind
    text: str
    values: frozenset[int]
    nth: frozenset[tuple[int, int]] = frozenset()

    @property
    def starts_with_star(self) -> bool:
        """Whether it is `*` or begins with it, as `*/5` does."""
        return self.text.startswith("*")

    @property
    def matches_all(self) -> bool:
        """Whether every value matches."""
        return len(self.values - {LAST_OF_MONTH} if self.kind is MONTHDAY else self.values) == self.kind.size

    @property
    def step(self) -> int:
        """n if the whole field is `*/n`, 1 for `*`, else 0."""
        return int(self.text[2:] or 1) if re.fullmatch(r"\*(/\d+)?", self.text) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """An expression that can fire. A local time matches it if it matches one of the rules."""

    second: Field
    minute: Field
    hour: Field
    monthday: Field
    month: Field
    weekday: Field
    rules: tuple[croniter, ...]

    @property
    def has_fixed_times(self) -> bool:
        """Whether neither minute nor hour starts with `*`, so that clock changes are treated specially; see `Cron`."""
        return not (self.minute.starts_with_star or self.hour.starts_with_star)

    @property
    def matches_either_day(self) -> bool:
        """Whether a day matches if only one of its two day fields does."""
        return _matches_either_day(self.monthday, self.weekday)


@lru_cache(maxsize=2048)
def parse(expr: str) -> Pattern:
    """Parse and validate an expression. Raises InvalidCron."""
    texts = _split(expr)
    fields = tuple(_read_field(kind, text) for kind, text in zip(_FIELD_KINDS, texts, strict=True))
    second, minute, hour, monthday, month, weekday = fields
    day_rules = [
        (rule_monthday, rule_weekday)
        for rule_monthday, rule_weekday in _day_rules(monthday, weekday)
        if _occurs(rule_monthday, month, rule_weekday)
    ]
    if not day_rules:
        raise InvalidCron(_why_never(monthday, month, weekday))
    rules = tuple(
        # day_or=False: _day_rules() has applied Vixie's rule, so within a rule both day fields must match.
        croniter(
            " ".join(map(_canonical, (second, minute, hour, rule_monthday, month, rule_weekday))),
            0,
            day_or=False,
            second_at_beginning=True,
            implement_cron_bug=True,
        )
        for rule_monthday, rule_weekday in day_rules
    )
    return Pattern(
        second=second, minute=minute, hour=hour, monthday=monthday, month=month, weekday=weekday, rules=rules
    )


def _split(expr: str) -> list[str]:
    if not isinstance(expr, str):
        raise TypeError(f"a cron expression is a str, not {type(expr).__name__}")
    if len(expr) > _MAX_CHARACTERS:
        raise InvalidCron(f"the expression has {len(expr)} characters; at most {_MAX_CHARACTERS} are read")
    text = expr.strip(" \t\r\n")
    invalid = next((character for character in text if not (" " <= character <= "~" or character == "\t")), None)
    if invalid is not None:
        raise InvalidCron(f"the character {invalid!a} has no place in an expression")
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


def _read_field(kind: _FieldKind, text: str) -> Field:
    values: set[int] = set()
    nth: set[tuple[int, int]] = set()
    for item in text.split(","):
        if match := _ITEM.fullmatch(item):
            values.update(_read_range(kind, item, *match.groups()))
        elif kind is MONTHDAY and item == "l":
            values.add(LAST_OF_MONTH)
        elif kind is _WEEKDAY and (match := _LAST.fullmatch(item)):
            nth.add((_read_value(kind, match[1] or match[2]) % 7, LAST_OF_MONTH))
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
    return Field(
        kind=kind, text=text, values=frozenset(plain), nth=frozenset(pair for pair in nth if pair[0] not in plain)
    )


def _read_range(kind: _FieldKind, item: str, first: str | None, last: str | None, step: str | None) -> range:
    low = kind.low if first is None else _read_value(kind, first)
    alone = first is not None and last is None and step is None
    high = low if alone else kind.high if last is None else _read_value(kind, last)
    if low > high:
        raise InvalidCron(f"{kind.name}: `{item.upper()}` runs backwards{_suggest_range(kind, low, high, step)}")
    if step is not None and not 1 <= int(step) <= kind.size:
        raise InvalidCron(f"{kind.name}: the step of `{item}` is outside 1-{kind.size}")
    return range(low, high + 1, int(step or 1))


def _suggest_range(kind: _FieldKind, low: int, high: int, step: str | None) -> str:
    if step is not None:
        return ""
    bottom = 1 if kind is _WEEKDAY else kind.low
    parts = [(low, kind.high), (bottom, high)] if high >= bottom else [(low, kind.high)]
    return f"; write `{','.join(f'{start}' if start == end else f'{start}-{end}' for start, end in parts)}`"


def _read_value(kind: _FieldKind, text: str) -> int:
    if text.isdigit():
        if not kind.low <= int(text) <= kind.high:
            hint = "; a year field is not supported" if kind is _WEEKDAY and len(text) == 4 else ""
            raise InvalidCron(f"{kind.name} {text} is outside {kind.low}-{kind.high}{hint}")
        return int(text)
    for value, word in enumerate(kind.words, kind.low):
        if text == word[:3].lower():
            return value
    raise InvalidCron(f"`{text.upper()}` is no {kind.name}")


_UNREADABLE: tuple[tuple[str, _FieldKind | None, str], ...] = (
    ("", None, "there is an empty list item"),
    (r".*\?.*", None, "`?` is not supported; write `*`"),
    (r"\d+w|w\d+|lw|wl", None, "`W`, the nearest working day, is not supported"),
    (r"[hr](\W.*)?", None, "`H` and `R` are not supported; write the value (a schedule's `jitter` spreads the load)"),
    (r"l", _WEEKDAY, "`L` alone is no weekday; the last Friday is `5L` or `L5`, the last day `L` in the day field"),
    (r".*[#l].*", _WEEKDAY, "the third Friday is `5#3`, the last one `5L` or `L5`; nothing else takes `#` or `L`"),
    (r".*l.*", MONTHDAY, "`L` is the last day of the month and takes no offset, range or step"),
    (r"\w+-", None, "the range has no end"),
    (r"[+-]\d.*", None, "a value is a plain number"),
    (r".*", None, "this is not a value, a range (`1-5`) or a step (`*/5`, `10-50/5`)"),
)


def _why_unreadable(kind: _FieldKind, text: str, item: str) -> str:
    shown = f"`{item or text}`".upper()
    long_names = {word.lower() for word in kind.words}.intersection(re.findall(r"\w+", item))
    if long_names:
        return f"{kind.name} {shown}: names have three letters; write `{min(long_names)[:3].upper()}`"
    return next(
        f"{kind.name} {shown}: {reason}"
        for pattern, only_kind, reason in _UNREADABLE
        if only_kind in (None, kind) and re.fullmatch(pattern, item)
    )


# ── days ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_MONTH_LENGTHS = {2: (28, 29)} | dict.fromkeys((4, 6, 9, 11), (30,)) | dict.fromkeys((1, 3, 5, 7, 8, 10, 12), (31,))


def _matches_either_day(monthday: Field, weekday: Field) -> bool:
    """Vixie's rule: if a day field starts with `*`, both day fields must match; otherwise either is enough."""
    return not (monthday.starts_with_star or weekday.starts_with_star)


def _day_rules(monthday: Field, weekday: Field) -> list[tuple[Field, Field]]:
    """Return pairs of day fields. The expression fires on a day that matches both fields of a pair.

    croniter combines a numbered weekday (`5#3`) with the day of month by AND, and rejects a mixture such as `1,5#3`. So plain and
    numbered weekdays become separate pairs.
    """
    any_monthday = Field(kind=MONTHDAY, text="*", values=frozenset(range(1, 32)))
    any_weekday = Field(kind=_WEEKDAY, text="*", values=frozenset(range(7)))
    plain = Field(kind=_WEEKDAY, text=weekday.text, values=weekday.values)
    numbered = Field(kind=_WEEKDAY, text=weekday.text, values=frozenset(), nth=weekday.nth)
    weekdays = [part for part in (plain, numbered) if part.values or part.nth]
    if not _matches_either_day(monthday, weekday):
        return [(monthday, part) for part in weekdays]
    return [(monthday, any_weekday), *((any_monthday, part) for part in weekdays)]


def _occurs(monthday: Field, month: Field, weekday: Field) -> bool:
    """Return whether such a day ever occurs. Over the years, a month of each length begins on each weekday."""
    weeks = {week for _, week in weekday.nth}
    return any(
        weekday.values or (day + 6) // 7 in weeks or (LAST_OF_MONTH in weeks and day > length - 7)
        for month_number in month.values
        for length in _MONTH_LENGTHS[month_number]
        for day in (value or length for value in monthday.values)
        if day <= length
    )


def _why_never(monthday: Field, month: Field, weekday: Field) -> str:
    first = min(monthday.values)
    if all(first > max(_MONTH_LENGTHS[month_number]) for month_number in month.values):
        missing = join_words(
            [f"{MONTHS[month_number - 1]} {first}" for month_number in sorted(month.values)], last="or"
        )
        return f"there is no {missing}, so this would never fire"
    days = f"`{monthday.text.upper()}` as day of month and `{weekday.text.upper()}` as weekday"
    return f"no day is both {days}, so this would never fire; both are needed as soon as one starts with `*`"


def _canonical(field: Field) -> str:
    """Format a field for croniter as a list of values: croniter reads some ranges and steps differently."""
    if field.matches_all:
        return "*"
    plain = [str(value) if value or field.kind is not MONTHDAY else "L" for value in sorted(field.values)]
    return ",".join(plain + [f"{day}#{week}" if week else f"L{day}" for day, week in sorted(field.nth)])


def join_words(words: list[str], last: str = "and") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
