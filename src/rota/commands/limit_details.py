"""Describe limits in words, for `rota limit`, `rota job show` and `rota why`."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.commands.printing import format_duration, format_relative, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rota.db.limit_queries import JobLimit, LimitState, ListedLimit


def format_rule(limit: "LimitState | ListedLimit") -> str:
    """Describe what a limit allows: `2 running, 10 starts per 1m, weight 5`."""
    parts = []
    if limit.max_running is not None:
        parts.append(f"{limit.max_running:,} running" if limit.max_running else "paused (max_running 0)")
    if limit.max_starts is not None:
        parts.append(f"{plural(limit.max_starts, 'start')} per {format_length(limit.per)}")
    if limit.weight is not None:
        parts.append(f"weight {limit.weight:,}")
    return ", ".join(parts) or "nothing is limited"


def format_length(length: timedelta | None) -> str:
    """Format an interval in at most two units, or with its fraction of a second."""
    if length is not None and length % timedelta(seconds=1):
        return f"{length.total_seconds():g}s"
    return format_duration(length)


def describe_job_limits(limits: "Sequence[JobLimit]") -> str:
    """Describe what a due job waits for: `waits for limit tenant:42: 2 of 2 running (jobs 5 and 9), 318 ahead`.

    If all limits have a permit left, the job waits for its turn.
    """
    closed = [limit for limit in limits if not limit.state.is_open]
    if closed:
        return "waits for " + "; and for ".join(
            f"{_format_name(limit.state)}: {describe_use(limit.state)}, {_format_ahead(limit)}" for limit in closed
        )
    return "; ".join(
        f"{_format_name(limit.state)} has a permit: {describe_use(limit.state)}, {_format_ahead(limit)}"
        for limit in limits
    )


def describe_use(state: "LimitState") -> str:
    """Describe what a key has used of its limit, the reason why it is closed first."""
    parts = []
    if state.held_until is not None:
        reason = f" ({state.hold_reason})" if state.hold_reason else ""
        parts.append(f"held until {format_relative(state.held_until, state.now)}{reason}")
    if state.max_running == 0:
        parts.append("paused (max_running 0)" + (f", {state.running:,} still running" if state.running else ""))
    elif state.max_running is not None:
        ids = f" ({format_job_ids(state.holders, state.running)})" if state.running else ""
        parts.append(f"{state.running:,} of {state.max_running:,} running{ids}")
    if state.max_starts is not None and state.starts_left is not None:
        used = (
            f"{state.max_starts - state.starts_left:,} of {state.max_starts:,} starts within {format_length(state.per)}"
        )
        following = "" if state.next_start_at is None else f", the next one {_format_next_start(state)}"
        parts.append(used + following)
    return ", ".join(parts) or f"{state.running:,} running"


def format_job_ids(job_ids: "Sequence[int]", total: int) -> str:
    """Format ids: `job 5`, `jobs 5 and 9`, `jobs 5, 9, 11 and 318 more`."""
    texts = [str(job_id) for job_id in job_ids]
    if total > len(texts):
        texts.append(f"{total - len(texts):,} more")
    *others, last = texts
    return f"job {last}" if not others else f"jobs {', '.join(others)} and {last}"


def _format_name(state: "LimitState") -> str:
    pattern = f" (of {state.applies})" if state.applies not in {None, state.key} else ""
    return f"limit {state.key}{pattern}"


def _format_ahead(limit: "JobLimit") -> str:
    return f"more than {limit.ahead:,} ahead" if limit.more else f"{limit.ahead:,} ahead"


def _format_next_start(state: "LimitState") -> str:
    assert state.next_start_at is not None  # noqa: S101  checked by the caller
    return f"possible at {format_relative(state.next_start_at, state.now)}"
