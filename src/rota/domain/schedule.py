"""Decide about the instants of a schedule: (rule, last decision, now) -> fires and the next instant.

The work is bounded, however many instants were missed: only the newest are looked up. The others become one row, and are
counted up to a thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from rota.cron import Cron, Fold, Gap, next_fire, zone

if TYPE_CHECKING:
    from collections.abc import Mapping

Misfire = Literal["latest", "skip", "all"]
Overlap = Literal["skip", "allow", "queue_one", "replace"]

Attempted = Literal["enqueue", "wait_behind_first", "enqueue_or_wait", "wait"]
"""How to try to run a fire. The statement that writes it decides the disposition: see record_fires.sql."""

Recorded = Literal["replaced", "skipped_misfire", "skipped_overlap", "skipped_gap", "skipped_paused"]
"""Dispositions that are final without trying to run the fire."""

MAX_COUNTED = 1000
"""Missed instants are counted exactly up to this number."""

_END = datetime(2200, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The part of a schedule's definition that decides when it fires and what becomes of each fire."""

    cron: str | None = None
    every: timedelta | None = None
    anchor: datetime | None = None
    """The start of the interval `every`."""
    timezone: str = "UTC"
    start_at: datetime | None = None
    end_at: datetime | None = None
    dst_gap: Gap = "after"
    dst_fold: Fold = "first"
    misfire: Misfire = "latest"
    on_time_within: timedelta = timedelta(seconds=60)
    too_late_after: timedelta | None = None
    catch_up_limit: int = 100
    overlap: Overlap = "skip"

    def validate(self) -> None:
        """Raise ValueError for costly values that only a row written without the constraints can have."""
        if self.every is not None and self.every < timedelta(seconds=1):
            raise ValueError("every must lie between 1 second and 366 days")
        if not 1 <= self.catch_up_limit <= 1000:
            raise ValueError("catch_up_limit must lie between 1 and 1000")

    def first_after(self, moment: datetime) -> datetime | None:
        """Return the first instant strictly after `moment`, or None when there are no more. Raises InvalidCron."""
        if self.start_at is not None:
            moment = max(moment, self.start_at - _MICROSECOND)
        instant = self._interval_instant_after(moment) if self.every is not None else self._cron_after(moment)
        return instant if instant is not None and instant < (self.end_at or _END) and instant < _END else None

    def last_until(self, moment: datetime, count: int) -> tuple[datetime, ...]:
        """Return the last `count` instants up to and including `moment`, in order; fewer when there are no more."""
        before = moment + _MICROSECOND
        if self.end_at is not None:
            before = min(before, self.end_at)
        if self.every is not None:
            instants = self._interval_instants_before(before, count)
        else:
            instants = _cron_instants_before(self._cron(), _round_up_to_second(before), count)
        return tuple(instant for instant in instants if self.start_at is None or instant >= self.start_at)

    def count(self, first: datetime, last: datetime) -> int | None:
        """Return the number of instants from `first` to `last`, or None if there are more than a thousand."""
        number = (
            _count_cron_instants(self._cron(), first, last) if self.every is None else (last - first) // self.every + 1
        )
        return number if number <= MAX_COUNTED else None

    def gaps(self, after: datetime, before: datetime) -> tuple[datetime, ...]:
        """Return the instants between the two that are skipped because of a daylight-saving gap (`dst_gap` skip)."""
        if self.cron is None or self.dst_gap != "skip":
            return ()
        without_skip = replace(self, dst_gap="after")
        skipped = []
        moment: datetime | None = after
        for _ in range(2):
            moment = without_skip.first_after(moment) if moment is not None else None
            if moment is None or moment >= before:
                break
            if self.first_after(moment - _MICROSECOND) != moment:
                skipped.append(moment)
        return tuple(skipped)

    def _cron(self) -> Cron:
        assert self.cron is not None  # noqa: S101  exactly one of the two is given
        return Cron(self.cron, timezone=self.timezone, gap=self.dst_gap, fold=self.dst_fold)

    def _cron_after(self, moment: datetime) -> datetime | None:
        assert self.cron is not None  # noqa: S101  exactly one of the two is given
        return next_fire(self.cron, moment, timezone=self.timezone, gap=self.dst_gap, fold=self.dst_fold)

    def _interval_instant_after(self, moment: datetime) -> datetime | None:
        assert self.every is not None and self.anchor is not None  # noqa: S101, PT018  they come together
        if moment >= _END:
            return None
        return self.anchor + max(self._first_interval_number, (moment - self.anchor) // self.every + 1) * self.every

    def _interval_instants_before(self, before: datetime, count: int) -> tuple[datetime, ...]:
        assert self.every is not None and self.anchor is not None  # noqa: S101, PT018  they come together
        newest = -((self.anchor - before) // self.every) - 1
        oldest = max(self._first_interval_number, newest - count + 1)
        return tuple(self.anchor + number * self.every for number in range(oldest, newest + 1))

    @property
    def _first_interval_number(self) -> int:
        """0 with start_at, which is itself an instant. 1 without it: `every` counts from the creation, which is no instant."""
        return 0 if self.start_at is not None else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fire:
    """The decision about one instant, or about a range of instants that ends with it."""

    scheduled_for: datetime
    plan: Attempted | Recorded
    missed_from: datetime | None = None
    missed_count: int | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The decisions about a schedule at one moment."""

    next_fire_at: datetime | None
    """The first undecided instant, later than now; None if there is none."""
    decided_up_to: datetime | None = None
    fires: tuple[Fire, ...] = field(default=())

    def first(self, count: int) -> Plan:
        """Return the decisions about the first `count` fires only. The last of these and the next one must be single instants."""
        return Plan(
            next_fire_at=self.fires[count].scheduled_for,
            decided_up_to=self.fires[count - 1].scheduled_for,
            fires=self.fires[:count],
        )


def check_rule(columns: Mapping[str, Any]) -> None:
    """Raise InvalidCron if rota.cron rejects a schedule's columns. Its message is more precise than SQL's."""
    timezone = columns.get("timezone") or "UTC"
    if (cron := columns.get("cron")) is None:
        zone(timezone)
    else:
        Cron(
            cron,
            timezone=timezone,
            gap=columns.get("dst_gap") or "after",
            fold=columns.get("dst_fold") or "first",
        )


def plan(
    rule: Rule,
    *,
    now: datetime,
    next_fire_at: datetime | None,
    base: datetime | None = None,
    paused_from: datetime | None = None,
) -> Plan:
    """Decide about every instant up to `now`.

    `next_fire_at` is the first undecided instant; if None, it is the first one after `base`, which is the later of the last edit
    and the last decision. `paused_from` is the start of a pause that has just ended. Raises InvalidCron, and also ValueError or
    ArithmeticError if croniter can't handle an expression.
    """
    rule.validate()
    fires: list[Fire] = []
    first = next_fire_at
    if base is not None:
        if paused_from is not None:
            fires += _one_fire_for_range(rule, paused_from, base, plan="skipped_paused", note="it was paused")
        if first is None:
            first = rule.first_after(base)
    if first is None or first > now:
        return Plan(next_fire_at=first, fires=tuple(fires))
    if base is not None:
        fires += (Fire(scheduled_for=instant, plan="skipped_gap") for instant in rule.gaps(base, first))
    following = rule.first_after(first)
    if following is None or following > now:
        due: tuple[datetime, ...] = (first,)
        missed = None
    else:
        due, missed = _newest_due(rule, first, now)
        following = rule.first_after(due[-1])
    chosen = _instants_to_run(rule, due, now)
    if not_chosen := [instant for instant in due if instant not in chosen]:
        missed = not_chosen[-1]
    if missed is not None:
        fires.append(_missed_fire(rule, first, missed, now))
    fires += _attempted_fires(rule, chosen, now)
    return Plan(next_fire_at=following, decided_up_to=due[-1], fires=tuple(fires))


def _newest_due(rule: Rule, first: datetime, now: datetime) -> tuple[tuple[datetime, ...], datetime | None]:
    """Return the newest due instants, as many as may have to run, and the last due instant before them, if any."""
    wanted = 2
    newest = rule.last_until(now, wanted)
    if len(newest) == wanted and (rule.misfire == "all" or newest[0] > now - rule.on_time_within):
        wanted = max(2, rule.catch_up_limit + 1)
        newest = rule.last_until(now, wanted)
    # `first` is due even if newer zone data no longer contains it.
    later = tuple(instant for instant in newest if instant > first)
    if len(later) < wanted:
        return (first, *later), None
    return later[1:], later[0]


def _instants_to_run(rule: Rule, due: tuple[datetime, ...], now: datetime) -> tuple[datetime, ...]:
    """Return the due instants whose fires should run."""
    not_too_late = [instant for instant in due if rule.too_late_after is None or instant >= now - rule.too_late_after]
    on_time = [instant for instant in not_too_late if instant > now - rule.on_time_within]
    match rule.misfire:
        case "all":
            chosen = not_too_late
        case "latest":
            chosen = on_time or [instant for instant in not_too_late if instant == due[-1]]
        case "skip":
            chosen = on_time
    return tuple(chosen[-rule.catch_up_limit :])


def _missed_fire(rule: Rule, first: datetime, last: datetime, now: datetime) -> Fire:
    too_late = rule.too_late_after is not None and last < now - rule.too_late_after
    return Fire(
        scheduled_for=last,
        plan="skipped_misfire",
        missed_from=first,
        missed_count=rule.count(first, last),
        note="later than too_late_after" if too_late else f"misfire is {rule.misfire}",
    )


def _attempted_fires(rule: Rule, chosen: tuple[datetime, ...], now: datetime) -> list[Fire]:
    """Return a fire for each instant that should run, oldest first, with the way to try it."""
    if rule.overlap == "allow":
        return [Fire(scheduled_for=instant, plan="enqueue") for instant in chosen]
    late = bool(chosen) and chosen[0] <= now - rule.on_time_within
    later = len(chosen) - 1
    plans: list[Attempted | Recorded] = ["enqueue"]
    if rule.misfire == "all" and (late or later > 0):
        plans = ["enqueue_or_wait"]
        plans += ["wait"] * later
    elif rule.overlap == "replace":
        plans[:0] = ["replaced"] * later
    elif rule.overlap == "queue_one":
        plans.append("wait_behind_first")
        plans += ["skipped_overlap"] * later
    else:
        plans += ["skipped_overlap"] * later
    return [Fire(scheduled_for=instant, plan=how) for instant, how in zip(chosen, plans, strict=False)]


def _one_fire_for_range(rule: Rule, after: datetime, until: datetime, *, plan: Recorded, note: str) -> list[Fire]:
    """Return one fire for all instants after `after` and up to `until`, or an empty list if there are none."""
    first = rule.first_after(after)
    if first is None or first > until:
        return []
    last = rule.last_until(until, 1)[-1]
    return [
        Fire(scheduled_for=last, plan=plan, missed_from=first, missed_count=rule.count(first, last), note=note),
    ]


def _round_up_to_second(before: datetime) -> datetime:
    """Round up to a whole second, as all cron instants are whole seconds. This makes results cacheable."""
    return before if not before.microsecond else before.replace(microsecond=0) + timedelta(seconds=1)


@lru_cache(maxsize=4096)
def _cron_instants_before(cron: Cron, before: datetime, count: int) -> tuple[datetime, ...]:
    return tuple(reversed(cron.previous(before, count)))


@lru_cache(maxsize=4096)
def _count_cron_instants(cron: Cron, first: datetime, last: datetime) -> int:
    return sum(instant <= last for instant in cron.next(first - _MICROSECOND, MAX_COUNTED + 1))
