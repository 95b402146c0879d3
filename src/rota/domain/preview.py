"""Preview the instants of a rule, and the effect of daylight saving on each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from rota.cron import zone

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rota.domain.schedule import Rule

_MICROSECOND = timedelta(microseconds=1)
_SECOND = timedelta(seconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """An instant of a rule, or one that the rule leaves out at a clock change. `local` is its time in the rule's zone."""

    scheduled_for: datetime
    local: datetime
    fires: bool
    note: str | None


def preview(rule: Rule, after: datetime, count: int) -> list[Instant]:
    """Return the next `count` fires after `after`, and the instants left out at gaps and folds between them. Raises InvalidCron."""
    # With these settings the rule fires at every instant, also at those that its own settings leave out.
    fires_always = replace(rule, dst_gap="after", dst_fold="both")
    instants: list[Instant] = []
    fires = 0
    moment = after
    while (
        fires < count and len(instants) < count * 3 + 10 and (following := fires_always.first_after(moment)) is not None
    ):
        moment = following
        instants.append(instant(rule, moment))
        fires += instants[-1].fires
    while instants and not instants[-1].fires:
        instants.pop()
    return instants


def instant(rule: Rule, moment: datetime) -> Instant:
    """Describe a moment: its local time, whether the rule fires then, and the effect of daylight saving."""
    local = moment.astimezone(zone(rule.timezone))
    fires = rule.first_after(moment - _MICROSECOND) == moment
    return Instant(scheduled_for=moment, local=local, fires=fires, note=_note(rule, moment, local, fires=fires))


def _note(rule: Rule, moment: datetime, local: datetime, *, fires: bool) -> str | None:
    if rule.cron is None:
        return None
    if (jump := local_time_before_jump(moment, rule.timezone)) is not None:
        strict = replace(rule, dst_gap="skip")
        if strict.first_after(moment - _MICROSECOND) != moment:
            where = f"gap: the clock jumps from {jump:%H:%M} to {local:%H:%M}"
            return f"{where}, fires once at the jump" if fires else f"{where}, skipped"
    if local.utcoffset() != local.replace(fold=1 - local.fold).utcoffset():
        which = "second" if local.fold else "first"
        left_out = not fires and _fires_both_times(rule, moment)
        return f"fold: {which} time that the clock shows this" + (", left out" if left_out else "")
    return None


def _fires_both_times(rule: Rule, moment: datetime) -> bool:
    return replace(rule, dst_fold="both").first_after(moment - _MICROSECOND) == moment


def first_pass_of_fold(rule: Rule, moment: datetime) -> datetime | None:
    """If the rule skips this moment as the second pass of a fold, return the first pass, at which it fires; else None."""
    if rule.cron is None or rule.first_after(moment - _MICROSECOND) == moment or not _fires_both_times(rule, moment):
        return None
    local = moment.astimezone(zone(rule.timezone))
    return local.replace(fold=1 - local.fold).astimezone(UTC)


def matches_local_time(rule: Rule, local_time: datetime) -> bool:
    """Return whether a cron rule matches this local time, also if the clock jumps over it."""
    at = local_time.replace(tzinfo=UTC)
    return replace(rule, timezone="UTC", start_at=None, end_at=None).first_after(at - _MICROSECOND) == at


def local_time_before_jump(moment: datetime, timezone: str) -> datetime | None:
    """If the zone's clock jumps ahead at this moment, return the local time before the jump; else None."""
    local_now = moment.astimezone(zone(timezone))
    local_before = (moment - _SECOND).astimezone(zone(timezone))
    offset, offset_before = local_now.utcoffset(), local_before.utcoffset()
    if offset is None or offset_before is None or offset <= offset_before:
        return None
    return local_before.replace(tzinfo=None) + _SECOND


def moments_of_local_time(local_time: datetime, timezone: str) -> list[datetime]:
    """Return the moments at which a zone's clock shows this local time: one, two in a fold, or in a gap the moment of the jump."""
    info = zone(timezone)
    passes = [local_time.replace(tzinfo=info, fold=fold).astimezone(UTC) for fold in (0, 1)]
    matching = [moment for moment in passes if moment.astimezone(info).replace(tzinfo=None) == local_time]
    if matching:
        return sorted(set(matching))
    # In a gap, the two offsets give a moment before and a moment after the jump. Bisect between them.
    low, high = sorted(passes)
    offset = low.astimezone(info).utcoffset()
    while high - low > _SECOND:
        middle = low + (high - low) // 2
        low, high = (middle, high) if middle.astimezone(info).utcoffset() == offset else (low, middle)
    return [high.replace(microsecond=0)]


def instants_between(rule: Rule, start: datetime, end: datetime) -> Iterator[datetime]:
    """Yield the instants with start <= instant < end, in order. Raises InvalidCron."""
    moment = start - _MICROSECOND
    while (following := rule.first_after(moment)) is not None and following < end:
        yield following
        moment = following


def adjacent_instants(rule: Rule, moment: datetime) -> tuple[datetime | None, datetime | None]:
    """Return the last instant before a moment and the first instant after it; None where there is none."""
    before = rule.last_until(moment - _MICROSECOND, 1)
    return before[-1] if before else None, rule.first_after(moment)
