"""The options that say what a schedule is, and the columns that they become."""

import json
from typing import Annotated, Any

import typer

from rota.commands.enqueue import checked_json
from rota.commands.options import duration, instant

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The schedule's name.")]


def text_option(option: str, help: str, metavar: str = "TEXT") -> Any:  # noqa: A002
    """Return an option that takes a text, and has no default to show."""
    return typer.Option(option, metavar=metavar, help=help, show_default=False)


def time_option(option: str, help: str) -> Any:  # noqa: A002
    """Return an option that takes a length of time."""
    return text_option(option, help, "DURATION")


CronText = Annotated[str | None, text_option("--cron", "When: a cron expression, or else:", "EXPR")]
EveryText = Annotated[str | None, time_option("--every", "How often: 90s, 1h30m. A day is 24 hours.")]
Timezone = Annotated[
    str | None, text_option("--timezone", "On whose clock, such as Europe/Berlin. [default: UTC]", "ZONE")
]
Payload = Annotated[str | None, text_option("--payload", "What its jobs carry; - reads it from the input.", "JSON")]
Queue = Annotated[str | None, text_option("--queue", "Instead of the handler's.")]
Priority = Annotated[int | None, typer.Option("--priority", min=0, max=9, help="0 first.", show_default="5")]
MaxAttempts = Annotated[int | None, typer.Option("--max-attempts", min=1, help="Of each job.", show_default=False)]
BackoffBase = Annotated[str | None, time_option("--backoff-base", "Before the first retry.")]
BackoffCap = Annotated[str | None, time_option("--backoff-cap", "At most between two tries.")]
RetryFor = Annotated[str | None, time_option("--retry-for", "Give up that long after the instant.")]
Timeout = Annotated[str | None, time_option("--timeout", "Interrupt an attempt after that long.")]
Lease = Annotated[str | None, time_option("--lease", "How long a claim holds without a heartbeat.")]
Delivery = Annotated[str | None, text_option("--delivery", "at_least_once or at_most_once.")]
StartWithin = Annotated[str | None, time_option("--start-within", "Not begun that long after it was due: expired.")]
Meta = Annotated[str | None, text_option("--meta", "An object kept beside its jobs.", "JSON")]
StartAt = Annotated[
    str | None, text_option("--start-at", "Not before, with its zone; --every counts from it.", "INSTANT")
]
EndAt = Annotated[str | None, text_option("--end-at", "Not at this instant or later.", "INSTANT")]
Misfire = Annotated[str | None, text_option("--misfire", "What was missed: latest, skip or all. [default: latest]")]
OnTimeWithin = Annotated[
    str | None, time_option("--on-time-within", "Later than this, an instant was missed. [default: 60s]")
]
TooLateAfter = Annotated[str | None, time_option("--too-late-after", "What was missed by more never runs.")]
CatchUpLimit = Annotated[int | None, typer.Option("--catch-up-limit", min=1, help="Of all.", show_default="100")]
Overlap = Annotated[
    str | None, text_option("--overlap", "While its last job lives: skip, allow, queue_one or replace. [default: skip]")
]
Gap = Annotated[str | None, text_option("--gap", "At times the clock jumps over: after or skip. [default: after]")]
Fold = Annotated[str | None, text_option("--fold", "At times the clock shows twice: first or both. [default: first]")]
Jitter = Annotated[str | None, time_option("--jitter", "Run later by up to this, always the same for one schedule.")]
ExpectSuccessWithin = Annotated[
    str | None, time_option("--expect-success-within", "Tell when there is none for so long.")
]
Description = Annotated[str | None, text_option("--description", "What it is for.")]
Owner = Annotated[str | None, text_option("--owner", "Whose it is.")]

_TEXTS = ("cron", "timezone", "queue", "delivery", "misfire", "overlap", "description", "owner")
_NUMBERS = ("priority", "max_attempts", "catch_up_limit")
_DURATIONS = (
    "every", "backoff_base", "backoff_cap", "retry_for", "timeout", "lease", "start_within", "on_time_within",
    "too_late_after", "jitter", "expect_success_within",
)  # fmt: skip
_INSTANTS = ("start_at", "end_at")
DEFAULTED = tuple(
    sorted({*_TEXTS, *_NUMBERS, *_DURATIONS, *_INSTANTS, "meta", "payload", "dst_gap", "dst_fold"} - {"cron", "every"})
)


def read_columns(given: dict[str, Any]) -> dict[str, Any]:
    """Read the options that were given into columns, as JSON; usage errors name the option."""
    from rota.domain.declaration import seconds

    columns: dict[str, Any] = {name: given[name] for name in (*_TEXTS, *_NUMBERS) if given[name] is not None}
    for name in _DURATIONS:
        length = duration(given[name], _option(name))
        if length is not None:
            columns[name] = seconds(length)
    for name in _INSTANTS:
        if (at := instant(given[name], _option(name))) is not None:
            columns[name] = at.isoformat()
    if given["meta"] is not None:
        columns["meta"] = json.loads(checked_json(given["meta"], "--meta"))
    columns |= {f"dst_{name}": given[name] for name in ("gap", "fold") if given[name] is not None}
    if given["cron"] is not None:
        check_rule(columns)
    elif given["timezone"] is not None:
        from rota.cron import zone

        zone(given["timezone"])
    return columns


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_rule(columns: dict[str, Any]) -> None:
    """Refuse what rota.cron refuses: it says more, and knows the zones, which SQL can't."""
    from rota.cron import Cron, zone

    if columns.get("cron") is None:
        zone(columns.get("timezone") or "UTC")
        return
    Cron(
        columns["cron"],
        timezone=columns.get("timezone") or "UTC",
        gap=columns.get("dst_gap") or "after",
        fold=columns.get("dst_fold") or "first",
    )
