"""`rota schedule`: make, edit, look at and stop what recurs."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.cron import print_instants
from rota.commands.enqueue import checked_json
from rota.commands.options import App, AsJson, ConfigFile, DryRun, Dsn, Embedded, Handler, Reason, duration, instant
from rota.commands.schedule_sheet import crowded, read_schedule, show_schedule, the_schedule, upcoming
from rota.commands.session import ask, configure, using
from rota.commands.show import age, console, moment, plural, print_json, printable, relative, table

if TYPE_CHECKING:
    from rota.db.pool import Connection
    from rota.db.reports import ScheduleDescription

app = typer.Typer(name="schedule", help="Make schedules, edit them, look at them, stop them.", no_args_is_help=True)

STATES = ("ok", "invalid", "paused", "overdue", "ended", "silent")

MOST = 100_000
"""Most instants of one backfill."""

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False, help="The schedule's name.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME…", show_default=False, help="Which.")]


def _text(option: str, help: str, metavar: str = "TEXT") -> Any:  # noqa: A002
    return typer.Option(option, metavar=metavar, help=help, show_default=False)


def _time(option: str, help: str) -> Any:  # noqa: A002
    return _text(option, help, "DURATION")


CronText = Annotated[str | None, _text("--cron", "When: a cron expression, or else:", "EXPR")]
EveryText = Annotated[str | None, _time("--every", "How often: 90s, 1h30m. A day is 24 hours.")]
Timezone = Annotated[str | None, _text("--timezone", "On whose clock, such as Europe/Berlin. [default: UTC]", "ZONE")]
Payload = Annotated[str | None, _text("--payload", "What its jobs carry; - reads it from the input.", "JSON")]
Queue = Annotated[str | None, _text("--queue", "Instead of the handler's.")]
Priority = Annotated[int | None, typer.Option("--priority", min=0, max=9, help="0 first.", show_default="5")]
MaxAttempts = Annotated[int | None, typer.Option("--max-attempts", min=1, help="Of each job.", show_default=False)]
BackoffBase = Annotated[str | None, _time("--backoff-base", "Before the first retry.")]
BackoffCap = Annotated[str | None, _time("--backoff-cap", "At most between two tries.")]
RetryFor = Annotated[str | None, _time("--retry-for", "Give up that long after the instant.")]
Timeout = Annotated[str | None, _time("--timeout", "Interrupt an attempt after that long.")]
Lease = Annotated[str | None, _time("--lease", "How long a claim holds without a heartbeat.")]
Delivery = Annotated[str | None, _text("--delivery", "at_least_once or at_most_once.")]
StartWithin = Annotated[str | None, _time("--start-within", "Not begun that long after it was due: expired.")]
Meta = Annotated[str | None, _text("--meta", "An object kept beside its jobs.", "JSON")]
StartAt = Annotated[str | None, _text("--start-at", "Not before, with its zone; --every counts from it.", "INSTANT")]
EndAt = Annotated[str | None, _text("--end-at", "Not at this instant or later.", "INSTANT")]
Misfire = Annotated[str | None, _text("--misfire", "What was missed: latest, skip or all. [default: latest]")]
OnTimeWithin = Annotated[
    str | None, _time("--on-time-within", "Later than this, an instant was missed. [default: 60s]")
]
TooLateAfter = Annotated[str | None, _time("--too-late-after", "What was missed by more never runs.")]
CatchUpLimit = Annotated[int | None, typer.Option("--catch-up-limit", min=1, help="Of all.", show_default="100")]
Overlap = Annotated[
    str | None, _text("--overlap", "While its last job lives: skip, allow, queue_one or replace. [default: skip]")
]
Gap = Annotated[str | None, _text("--gap", "At times the clock jumps over: after or skip. [default: after]")]
Fold = Annotated[str | None, _text("--fold", "At times the clock shows twice: first or both. [default: first]")]
Jitter = Annotated[str | None, _time("--jitter", "Run later by up to this, always the same for one schedule.")]
ExpectSuccessWithin = Annotated[str | None, _time("--expect-success-within", "Tell when there is none for so long.")]
Description = Annotated[str | None, _text("--description", "What it is for.")]
Owner = Annotated[str | None, _text("--owner", "Whose it is.")]
Limit = Annotated[int, typer.Option("--limit", min=1, max=100_000, help="How many at most.")]


@app.command()
def add(
    name: Name,
    handler: Annotated[str, typer.Argument(metavar="HANDLER", help="What its jobs run.", show_default=False)],
    cron: CronText = None,
    every: EveryText = None,
    timezone: Timezone = None,
    payload: Payload = None,
    queue: Queue = None,
    priority: Priority = None,
    max_attempts: MaxAttempts = None,
    backoff_base: BackoffBase = None,
    backoff_cap: BackoffCap = None,
    retry_for: RetryFor = None,
    timeout: Timeout = None,
    lease: Lease = None,
    delivery: Delivery = None,
    start_within: StartWithin = None,
    meta: Meta = None,
    start_at: StartAt = None,
    end_at: EndAt = None,
    misfire: Misfire = None,
    on_time_within: OnTimeWithin = None,
    too_late_after: TooLateAfter = None,
    catch_up_limit: CatchUpLimit = None,
    overlap: Overlap = None,
    gap: Gap = None,
    fold: Fold = None,
    jitter: Jitter = None,
    expect_success_within: ExpectSuccessWithin = None,
    description: Description = None,
    owner: Owner = None,
    paused: Annotated[bool, typer.Option("--paused", help="Let it wait for rota schedule resume.")] = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Make a schedule, and say when it fires next."""
    from rota.errors import RotaError

    if (cron is None) is (every is None):
        raise typer.BadParameter("say either --cron or --every", param_hint="--cron")
    given = _columns(locals())
    text = _payload(payload)

    async def insert(db: "Connection") -> "tuple[ScheduleDescription, list[str]]":
        from rota.db import operations

        columns = json.dumps({**given, "name": name, "handler": handler, "paused": paused})
        if await operations.add_schedule(db, columns=columns, payload=text) is None:
            raise RotaError(f"there is a schedule {name!r} already: rota schedule set changes it")
        made = await the_schedule(db, name)
        return made, await _warnings(db, made)

    with using(config_file, dsn, embedded=embedded) as config:
        made, warnings = ask(config, insert, name="schedule add")
    _say_when(made, warnings, as_json=as_json)


@app.command("set")
def set_(
    name: Name,
    handler: Annotated[str | None, _text("--handler", "What its jobs run.")] = None,
    cron: CronText = None,
    every: EveryText = None,
    timezone: Timezone = None,
    payload: Payload = None,
    queue: Queue = None,
    priority: Priority = None,
    max_attempts: MaxAttempts = None,
    backoff_base: BackoffBase = None,
    backoff_cap: BackoffCap = None,
    retry_for: RetryFor = None,
    timeout: Timeout = None,
    lease: Lease = None,
    delivery: Delivery = None,
    start_within: StartWithin = None,
    meta: Meta = None,
    start_at: StartAt = None,
    end_at: EndAt = None,
    misfire: Misfire = None,
    on_time_within: OnTimeWithin = None,
    too_late_after: TooLateAfter = None,
    catch_up_limit: CatchUpLimit = None,
    overlap: Overlap = None,
    gap: Gap = None,
    fold: Fold = None,
    jitter: Jitter = None,
    expect_success_within: ExpectSuccessWithin = None,
    description: Description = None,
    owner: Owner = None,
    default: Annotated[
        list[str] | None, typer.Option("--default", metavar="COLUMN", help="Give it its default.", show_default=False)
    ] = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Change what is named of a schedule. Nothing fires by that: what comes next lies strictly after the edit."""
    if cron is not None and every is not None:
        raise typer.BadParameter("say either --cron or --every", param_hint="--cron")
    given = _columns(locals())
    if handler is not None:
        given["handler"] = handler
    for column in default or []:
        if column not in _DEFAULTED:
            raise typer.BadParameter(f"{column!r} is none of {', '.join(_DEFAULTED)}", param_hint="--default")
        given.setdefault(column, None)
    if "cron" in given:
        given["every"] = None
    elif "every" in given:
        given["cron"] = None
    text = "{}" if payload is None and "payload" in given else _payload(payload)
    if not given and text is None:
        raise typer.BadParameter("say what is to change, such as --cron or --timezone", param_hint="NAME")

    async def edit(db: "Connection") -> "tuple[ScheduleDescription, list[str]]":
        from rota.db import operations

        known = await the_schedule(db, name)
        if given.keys() & {"cron", "every", "timezone", "dst_gap", "dst_fold"}:
            _check_rule({"cron": known.cron, "timezone": known.timezone} | given)
        await operations.edit_schedule(db, name=name, columns=json.dumps(given), payload=text)
        made = await the_schedule(db, name)
        return made, await _warnings(db, made)

    with using(config_file, dsn, embedded=embedded) as config:
        made, warnings = ask(config, edit, name="schedule set")
    _say_when(made, warnings, as_json=as_json)


@app.command("list")
def list_(
    handler: Handler = None,
    state: Annotated[
        str | None,
        typer.Option("--state", help=f"One of {', '.join(STATES)} (no success in time).", show_default=False),
    ] = None,
    limit: Limit = 1000,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """List schedules by name: when they fire, how they are, when they last succeeded."""
    if state is not None and state not in STATES:
        raise typer.BadParameter(f"{state!r} is none of {', '.join(STATES)}", param_hint="--state")
    with using(config_file, dsn, embedded=embedded) as config:
        from rota.db.reports import list_schedules

        found = ask(
            config, lambda db: list_schedules(db, handler=handler, state=state, limit=limit), name="schedule list"
        )
    if as_json:
        print_json(found)
        return
    rows = [
        (
            each.name,
            each.cron or f"every {age(each.every)}",
            each.timezone,
            each.handler,
            each.state,
            moment(each.next_fire_at),
            f"{age(each.now - each.last_success_at)} ago" if each.last_success_at else "never",
            each.consecutive_failures or "",
            each.invalid_reason or ("no success in time" if each.silent else ""),
        )
        for each in found
    ]
    columns = ("name…", "when", "zone", "handler…", "state", "next", "last success#", "failures#", "")
    console().print(table(None, *columns, rows=rows))
    if len(found) == limit:
        typer.echo(f"the first {limit:,}; there may be more: --limit", err=True)


@app.command()
def show(
    name: Name,
    payload: Annotated[bool, typer.Option("--payload", help="Show what its jobs carry, too.")] = False,
    fires: Annotated[int, typer.Option("--fires", min=0, max=10_000, help="How many of its last fires.")] = 10,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Say everything about a schedule, and what became of its last instants."""
    with using(config_file, dsn, embedded=embedded) as config:
        seen = ask(config, lambda db: read_schedule(db, name, fires=fires), name="schedule show")
    show_schedule(seen, payload=payload, as_json=as_json)


@app.command()
def preview(
    name: Name,
    after: Annotated[
        str | None, typer.Option("--after", metavar="INSTANT", help="After when, with its zone.", show_default="now")
    ] = None,
    count: Annotated[int, typer.Option("--count", min=1, max=10_000, help="How many.")] = 5,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """List a schedule's next instants, in UTC and on its own clock; gaps, folds and jitter are marked."""
    since = instant(after, "--after")
    with using(config_file, dsn, embedded=embedded) as config:
        seen = ask(config, lambda db: the_schedule(db, name), name="schedule preview")
    from rota.domain import preview as ahead

    found = ahead.preview(seen.rule, since or seen.now, count)
    if as_json:
        offset = seen.jitter_offset
        print_json([{**_fields(each), "run_at": each.scheduled_for + offset if each.fires else None} for each in found])
        return
    print_instants(found, seen.jitter_offset if seen.jitter else None)
    if not found:
        typer.echo("it has no more instants")
    if seen.paused:
        until = f" until {moment(seen.resume_at)}" if seen.resume_at else ""
        typer.echo(f"it is paused{until}: none of these will fire before it is resumed", err=True)


@app.command()
def pause(
    names: Names,
    until: Annotated[str | None, _text("--until", "Go on then, with its zone.", "INSTANT")] = None,
    delay: Annotated[str | None, _time("--for", "Go on after that long.")] = None,
    cancel_live: Annotated[bool, typer.Option("--cancel-live", help="Cancel the jobs that it has enqueued.")] = False,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Keep schedules from firing. What falls into the pause does not run later; it is recorded as skipped_paused."""
    if until is not None and delay is not None:
        raise typer.BadParameter("say either --until or --for", param_hint="--until")
    resume_at, later = instant(until, "--until"), duration(delay, "--for")
    chosen = list(dict.fromkeys(names))

    async def paused(db: "Connection") -> list[bool]:
        from rota.db import operations

        async with db.transaction():  # all that were named, or none
            return [
                await operations.pause_schedule(
                    db, name=name, resume_at=resume_at, delay=later, cancel_live=cancel_live, reason=reason
                )
                for name in chosen
            ]

    with using(config_file, dsn, embedded=embedded) as config:
        changed = ask(config, paused, name="schedule pause")
    if as_json:
        print_json({"paused": chosen, "changed": sum(changed)})
        return
    for name, new in zip(chosen, changed, strict=True):
        typer.echo(f"schedule {printable(name)} is paused{'' if new else ', as before'}")


@app.command()
def resume(
    names: Names,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Let paused schedules fire again, from their next instant on."""
    chosen = list(dict.fromkeys(names))

    async def resumed(db: "Connection") -> list[bool]:
        from rota.db import operations

        async with db.transaction():
            return [await operations.resume_schedule(db, name=name, reason=reason) for name in chosen]

    with using(config_file, dsn, embedded=embedded) as config:
        changed = ask(config, resumed, name="schedule resume")
    if as_json:
        print_json({"resumed": chosen, "changed": sum(changed)})
        return
    for name, new in zip(chosen, changed, strict=True):
        typer.echo(f"schedule {printable(name)} {'goes on' if new else 'was not paused'}")


@app.command("run-now")
def run_now(
    name: Name,
    payload: Annotated[str | None, _text("--payload", "Another payload, this once.", "JSON")] = None,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Enqueue a job of a schedule at once, paused or not, whatever else runs; print its number."""
    text = _payload(payload)

    async def run(db: "Connection") -> int:
        from rota.db import operations

        return await operations.run_schedule_now(db, name=name, payload=text, reason=reason)

    with using(config_file, dsn, embedded=embedded) as config:
        job_id = ask(config, run, name="schedule run-now")
    print_json({"name": name, "job_id": job_id}) if as_json else typer.echo(job_id)


@app.command()
def remove(
    names: Names,
    reason: Reason = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Remove schedules. Their history stays, and so do their live jobs."""
    chosen = list(dict.fromkeys(names))

    async def removed(db: "Connection") -> list[bool]:
        from rota.db import operations, reports

        declared = []
        async with db.transaction():  # all that were named, or none
            for name in chosen:
                known = await reports.describe_schedule(db, name=name)
                declared.append(known is not None and known.declared_by is not None)
                await operations.remove_schedule(db, name=name, reason=reason)
        return declared

    with using(config_file, dsn, embedded=embedded) as config:
        declared = ask(config, removed, name="schedule remove")
    print_json({"removed": chosen}) if as_json else None
    for name, by_code in zip(chosen, declared, strict=True):
        if not as_json:
            typer.echo(f"schedule {printable(name)} is removed")
        if by_code:
            typer.echo(
                f"note: {printable(name)} was declared in code: as long as it is, the next start inserts it anew "
                "(pausing holds)",
                err=True,
            )


@app.command()
def sync(
    app: App = None,
    dry_run: DryRun = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove what this app declared once and no longer does.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also over a newer release's declaration, or somebody else's schedule.")
    ] = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Bring the schedules that an app's code declares into the database, as its daemons do at their start."""
    from rota.app import find_app
    from rota.errors import ConfigError

    reference = configure(config_file, dsn, {"app": app}).app
    if reference is None:
        raise ConfigError("no app: pass --app module:app, or set ROTA_APP, or app in rota.toml")
    found = find_app(reference)
    declared = found.schedules
    with using(config_file, dsn, embedded=embedded, overrides={"app": app}) as config:
        from rota.services import declarations

        steps = ask(
            config,
            lambda db: declarations.apply(
                db,
                app=found.name,
                release=found.release,
                declarations=declared,
                force=force,
                prune=prune,
                dry_run=dry_run,
            ),
            name="schedule sync",
        )
    said = [(step.name, "removed" if prune and step.what == "undeclared" else step.what, step.why) for step in steps]
    if as_json:
        print_json(
            {
                "app": found.name,
                "dry_run": dry_run,
                "schedules": [{"name": n, "became": w, "why": y} for n, w, y in said],
            }
        )
    else:
        rows = [(name, what.replace("_", " "), "" if what == "removed" else why) for name, what, why in said]
        console().print(table(None, "schedule…", "became", "", rows=rows))
        count = plural(sum(step.writes for step in steps), "schedule")
        typer.echo(f"{'dry run, nothing was changed: ' if dry_run else ''}{count} written, of {len(steps):,}", err=True)
    if any(step.what == "refused" for step in steps):
        raise typer.Exit(1)


@app.command()
def backfill(
    name: Name,
    start: Annotated[str, _text("--from", "The first instant, with its zone.", "INSTANT")],
    end: Annotated[str, _text("--to", "Before this instant, with its zone.", "INSTANT")],
    spread: Annotated[str | None, _time("--spread", "Make the jobs due evenly over this time.")] = None,
    reason: Reason = None,
    dry_run: DryRun = False,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Enqueue jobs for past instants that did not run, each under its own scheduled_for, and each only once.

    Instants that have a fires row are left out; those skipped together, as a stretch, have none. The jobs run beside each
    other, whatever the schedule's overlap says: --spread thins them out.
    """
    first, before = instant(start, "--from"), instant(end, "--to")
    over = duration(spread, "--spread")
    assert first is not None  # noqa: S101  both are given
    assert before is not None  # noqa: S101
    if first >= before:
        raise typer.BadParameter("must lie before --to", param_hint="--from")

    async def fill(db: "Connection") -> dict[str, Any]:
        from itertools import islice

        from rota.db import operations, queries
        from rota.domain.preview import between
        from rota.errors import RotaError

        seen = await the_schedule(db, name)
        now = await queries.read_clock(db)
        instants = list(islice(between(seen.rule, first, min(before, now)), MOST + 1))
        more = len(instants) > MOST
        del instants[MOST:]
        if dry_run:
            return {
                "dry_run": True, "instants": len(instants), "more": more, "enqueued": 0, "left_out": 0, "undecided": 0,
                "first": instants[:1], "last": instants[-1:],
            }  # fmt: skip
        if more:
            raise RotaError(
                f"{name!r} has more than {MOST:,} instants between these: take a shorter time, several times. The first "
                f"{MOST:,} end at {instants[-1].isoformat()}"
            )
        done = {"instants": len(instants), "enqueued": 0, "left_out": 0, "undecided": 0}
        step = over / len(instants) if over and instants else timedelta(0)
        for begin in range(0, len(instants), operations.BATCH):
            batch = instants[begin : begin + operations.BATCH]
            due = [now + (begin + number) * step for number in range(len(batch))]
            counts = await operations.backfill_schedule(db, name=name, instants=batch, run_at=due, reason=reason)
            for key, count in zip(("enqueued", "left_out", "undecided"), counts, strict=True):
                done[key] += count
        return {**done, "overlap": seen.overlap}

    with using(config_file, dsn, embedded=embedded) as config:
        done = ask(config, fill, name="schedule backfill")
    if as_json:
        print_json(done)
        return
    if dry_run:
        span = f", {moment(done['first'][0])} to {moment(done['last'][0])}" if done["instants"] else ""
        number = plural(done["instants"], "instant")
        if done["more"]:
            typer.echo(f"dry run: more than {number}; the first {done['instants']:,}{span}")
            typer.echo("no more than that at once: take a shorter time, several times", err=True)
        else:
            typer.echo(f"dry run: {number}{span}, those that have a fires row included")
        return
    typer.echo(f"{plural(done['enqueued'], 'job')} enqueued, {done['left_out']:,} left out: they have a fires row")
    if done["undecided"]:
        typer.echo(f"{done['undecided']:,} not decided yet: the daemons' (misfire)", err=True)
    if done["enqueued"] > 1 and done["overlap"] != "allow" and not over:
        typer.echo("note: they run beside each other, as far as there are slots: --spread thins them out", err=True)


_TEXTS = ("cron", "timezone", "queue", "delivery", "misfire", "overlap", "description", "owner")
_NUMBERS = ("priority", "max_attempts", "catch_up_limit")
_DURATIONS = (
    "every", "backoff_base", "backoff_cap", "retry_for", "timeout", "lease", "start_within", "on_time_within",
    "too_late_after", "jitter", "expect_success_within",
)  # fmt: skip
_INSTANTS = ("start_at", "end_at")
_DEFAULTED = tuple(
    sorted({*_TEXTS, *_NUMBERS, *_DURATIONS, *_INSTANTS, "meta", "payload", "dst_gap", "dst_fold"} - {"cron", "every"})
)


def _columns(given: dict[str, Any]) -> dict[str, Any]:
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
        columns["meta"] = json.loads(checked_json(given["meta"]))
    columns |= {f"dst_{name}": given[name] for name in ("gap", "fold") if given[name] is not None}
    if given["cron"] is not None:
        _check_rule(columns)
    elif given["timezone"] is not None:
        from rota.cron import zone

        zone(given["timezone"])
    return columns


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_rule(columns: dict[str, Any]) -> None:
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


def _payload(text: str | None) -> str | None:
    return None if text is None else checked_json(sys.stdin.read() if text == "-" else text)


async def _warnings(db: "Connection", made: "ScheduleDescription") -> list[str]:
    import asyncpg

    from rota.db import reports

    found = []
    try:
        nodes = await reports.list_nodes(db)
        known = await reports.list_handler_names(db)
        if why := reports.why_unclaimed(made.handler, made.queue or "default", nodes, known):
            found.append(why)
        if too_many := await crowded(db, made):
            found.append(too_many)
    except asyncpg.InsufficientPrivilegeError:
        pass  # a client may make schedules, and see no daemons
    return found


def _say_when(made: "ScheduleDescription", warnings: Sequence[str], *, as_json: bool) -> None:
    following = upcoming(made)
    if as_json:
        print_json(
            {
                "name": made.name,
                "schedule_id": made.schedule_id,
                "next_fire_at": following,
                "paused": made.paused,
                "warnings": list(warnings),
            }
        )
        return
    typer.echo(f"{printable(made.name)}: {_explained(made)}")
    if made.paused:
        typer.echo("it is paused")
    else:
        typer.echo(f"next: {relative(following, datetime.now(UTC)) or 'never, it has no more instants'}")
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _explained(made: "ScheduleDescription") -> str:
    from rota.cron import Cron

    if made.cron is None:
        return f"Every {age(made.every)}, counted from {moment(made.start_at or made.created_at)}."
    return Cron(made.cron, timezone=made.timezone).explain()


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
