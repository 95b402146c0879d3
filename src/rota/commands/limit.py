"""`rota limit`: list, set, remove, hold and show limits."""

from datetime import datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.database import Database, takes_database
from rota.commands.limit_details import describe_use, format_job_ids, format_rule
from rota.commands.options import AsJson, Note, argument, option, parse_duration_option, parse_instant
from rota.commands.printing import (
    MAX_LISTED,
    console,
    fields_of,
    format_distance,
    format_instant,
    format_relative,
    plural,
    print_json,
    printable,
    table,
)

if TYPE_CHECKING:
    from rota.db.limit_queries import LimitState
    from rota.db.pool import Connection

app = typer.Typer(name="limit", help="List, set, remove, hold and show limits.", no_args_is_help=True)

Key = Annotated[str, argument("KEY", "A limit_key, handler:NAME or queue:NAME.")]
LimitKey = Annotated[str, argument("KEY", "A limit_key, a pattern that ends in *, handler:NAME or queue:NAME.")]

VALUES = ("max_running", "max_starts", "weight", "note")

PER_NEEDED = "give --max-starts and --per together"


@app.command("list")
@takes_database
def list_(database: Database, as_json: AsJson = False) -> None:
    """List limits and held keys.

    The table shows how many jobs run under each limit, and how many due jobs it applies to wait.
    """
    from rota.db.limit_queries import list_limits

    limits = database.run(lambda db: list_limits(db, limit=MAX_LISTED), name="limit list")
    if as_json:
        print_json(limits)
        return
    rows = [
        (
            each.key,
            format_rule(each) if each.is_limit else "held only",
            each.running,
            f"{'≥' if each.more and each.waiting else ''}{each.waiting:,}",
            f"held, ends {format_distance(each.held_until, each.now)}: {each.hold_reason or 'no reason given'}"
            if each.held_until
            else each.note or (f"declared by {each.declared_by}" if each.declared_by else ""),
        )
        for each in limits
    ]
    console().print(table(None, "key~", "limit~", "running#", "waiting#", "~", rows=rows))
    if limits and (unlisted := limits[0].total - len(limits)):
        console().print(f"… and {plural(unlisted, 'more limit')}")


@app.command("set")
@takes_database
def set_(
    database: Database,
    key: LimitKey,
    max_running: Annotated[
        int | None,
        typer.Option("--max-running", metavar="COUNT", min=0, help="Jobs that may run at once; 0 pauses the key."),
    ] = None,
    max_starts: Annotated[
        int | None,
        typer.Option("--max-starts", metavar="COUNT", min=1, max=100_000, help="Jobs that may start within --per."),
    ] = None,
    per: Annotated[str | None, option("--per", "DURATION", "Interval of --max-starts, as in 1m or 24h.")] = None,
    weight: Annotated[
        int | None,
        typer.Option("--weight", metavar="COUNT", min=1, max=1000, help="Jobs that start in one turn. [default: 1]"),
    ] = None,
    note: Annotated[str | None, option("--note", "TEXT", "Store this note with the limit.")] = None,
    default: Annotated[
        list[str] | None, option("--default", "VALUE", f"Remove this value: {', '.join(VALUES)}.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Insert a limit, or change some of its values.

    A pattern such as tenant:* gives each matching key its own allowance. Claims that begin after the change obey it; running jobs
    continue.
    """
    columns = _given_columns(max_running, max_starts, per, weight, note, default)

    async def work(db: "Connection") -> "tuple[bool, LimitState, LimitState, int, bool]":
        from rota.db import limit_queries

        (before,) = await limit_queries.describe_limits(db, keys=[key])
        inserted = await limit_queries.change_limit(db, key=key, columns=columns)
        (state,) = await limit_queries.describe_limits(db, keys=[key])
        return inserted, before, state, *(await limit_queries.count_limit_waiters(db, key=key))

    inserted, before, state, waiting, more = database.run(work, name="limit set")
    if as_json:
        print_json({"inserted": inserted, **_as_json(state, waiting, more)})
        return
    typer.echo(f"limit {printable(key)}: {format_rule(state)}")
    if inserted and before.applies is not None:
        replaced = f"limit {printable(before.applies)} ({format_rule(before)})"
        typer.echo(f"note: {replaced} no longer applies to this key, and none of its values do", err=True)
    if state.max_running is not None and state.running > state.max_running:
        surplus = state.running - state.max_running
        until = (
            "no other job starts" if not state.max_running else f"no other job starts until {surplus + 1:,} have ended"
        )
        typer.echo(f"note: {plural(state.running, 'running job')} of the key may finish; {until}", err=True)


@app.command()
@takes_database
def remove(database: Database, key: LimitKey, as_json: AsJson = False) -> None:
    """Remove a limit.

    If the key matches a pattern, the limit of the pattern applies again. Waiting jobs may start at once.
    """
    from rota.errors import RotaError

    async def work(db: "Connection") -> "LimitState":
        from rota.db import limit_queries

        if not await limit_queries.remove_limit(db, key):
            raise RotaError(await _unknown_text(db, key))
        (state,) = await limit_queries.describe_limits(db, keys=[key])
        return state

    state = database.run(work, name="limit remove")
    if as_json:
        print_json({"removed": key, "applies": state.applies})
        return
    typer.echo(f"limit {printable(key)} is removed")
    if state.applies is not None:
        typer.echo(f"note: limit {printable(state.applies)} applies to it now: {format_rule(state)}", err=True)


@app.command()
@takes_database
def hold(
    database: Database,
    key: Key,
    length: Annotated[str | None, option("--for", "DURATION", "Hold the key for this long, as in 30s or 1h.")] = None,
    until: Annotated[str | None, option("--until", "INSTANT", "Hold the key until this instant.")] = None,
    release: Annotated[bool, typer.Option("--release", help="End the hold now.")] = False,
    note: Note = None,
    as_json: AsJson = False,
) -> None:
    """Let no job of a key start for some time.

    Running jobs continue. Handlers do the same with `raise rota.Hold(after=…)`.
    """
    if sum((length is not None, until is not None, release)) != 1:
        raise typer.BadParameter("give one of --for, --until and --release", param_hint="--for")
    for_length, until_instant = parse_duration_option(length, "--for"), parse_instant(until, "--until")

    async def work(db: "Connection") -> "tuple[datetime | None, LimitState]":
        from rota.db import limit_queries

        end = await limit_queries.hold_limit(db, key=key, until=until_instant, length=for_length, reason=note)
        (state,) = await limit_queries.describe_limits(db, keys=[key])
        return end, state

    _, state = database.run(work, name="limit hold")
    if as_json:
        print_json({"key": key, "held_until": state.held_until, "running": state.running})
    elif state.held_until is None:
        typer.echo(f"limit {printable(key)} is not held")
    else:
        running = f"; {plural(state.running, 'running job')} continue" if state.running else ""
        typer.echo(f"limit {printable(key)} is held until {format_relative(state.held_until, state.now)}{running}")


@app.command()
@takes_database
def show(database: Database, key: Key, as_json: AsJson = False) -> None:
    """Show the limit that applies to a key, and what the key has used of it."""

    async def work(db: "Connection") -> "tuple[LimitState, int, bool]":
        from rota.db import limit_queries

        (state,) = await limit_queries.describe_limits(db, keys=[key])
        return state, *(await limit_queries.count_limit_waiters(db, key=key))

    state, waiting, more = database.run(work, name="limit show")
    if as_json:
        print_json(_as_json(state, waiting, more))
        return
    out = console()
    for label, text in _describe(state, waiting, more):
        if text:
            out.print(f"{label:<13}{printable(text)}", soft_wrap=True)


def _describe(state: "LimitState", waiting: int, more: bool) -> list[tuple[str, str]]:
    applies = "none applies: jobs of this key start at once, in turn with those of other keys"
    if state.applies is not None:
        applies = format_rule(state) + ("" if state.applies == state.key else f" (of {state.applies})")
    return [
        ("key", state.key),
        ("limit", applies),
        ("state", f"{'open' if state.is_open else 'closed'}: {describe_use(state)}"),
        ("running", format_job_ids(state.holders, state.running) if state.running else ""),
        ("waiting", f"more than {waiting:,} due jobs" if more else plural(waiting, "due job")),
        ("note", state.note or ""),
        ("declared by", state.declared_by or ""),
        ("changed", format_instant(state.changed_at)),
    ]


def _as_json(state: "LimitState", waiting: int, more: bool) -> dict[str, Any]:
    return {**fields_of(state), "open": state.is_open, "waiting": waiting, "more": more}


def _given_columns(
    max_running: int | None,
    max_starts: int | None,
    per: str | None,
    weight: int | None,
    note: str | None,
    default: list[str] | None,
) -> dict[str, Any]:
    """Return the columns to change as JSON values. Raises BadParameter."""
    from rota.domain.payload import interval_text

    length = parse_duration_option(per, "--per")
    if length is not None and not timedelta(seconds=1) <= length <= timedelta(days=31):
        raise typer.BadParameter(f"{per!r}: choose 1s to 31d", param_hint="--per")
    if (max_starts is None) is not (length is None):
        raise typer.BadParameter(PER_NEEDED, param_hint="--max-starts" if length is None else "--per")
    given: dict[str, Any] = {
        "max_running": max_running,
        "max_starts": max_starts,
        "per": length and interval_text(length),
        "weight": weight,
        "note": note,
    }
    columns = {column: value for column, value in given.items() if value is not None}
    for name in default or []:
        if name not in VALUES:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(VALUES)}", param_hint="--default")
        for column in (name, "per") if name == "max_starts" else (name,):
            columns.setdefault(column, None)
    if not columns:
        raise typer.BadParameter("give at least one value, such as --max-running", param_hint="KEY")
    return columns


async def _unknown_text(db: "Connection", key: str) -> str:
    from rota.db.limit_queries import list_limits

    limits = [each for each in await list_limits(db, limit=MAX_LISTED) if each.is_limit]
    close = get_close_matches(key, [each.key for each in limits], 1)
    hint = f"did you mean {close[0]!r}?" if close else "to list all limits: rota limit list"
    return f"there is no limit {key!r}: {hint}"
