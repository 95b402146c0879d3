"""Pause and resume queues and handlers by name. All names of one command succeed, or none."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal

import typer

from rota.commands.printing import print_json, printable

if TYPE_CHECKING:
    from rota.commands.database import Database
    from rota.db.pool import Connection

Kind = Literal["queue", "handler"]


def pause(database: "Database", kind: Kind, names: Sequence[str], note: str | None, *, as_json: bool) -> None:
    """Pause queues or handlers: their jobs are not claimed. Running jobs continue."""
    from rota.db import operations

    operation = operations.pause_queue if kind == "queue" else operations.pause_handler
    changed = database.run(lambda db: _run_for_each(db, operation, names, note), name=f"{kind} pause")
    print_paused(kind, names, changed, as_json=as_json, addition="; running jobs continue")
    command = f"rota schedule pause --{'handler …' if kind == 'handler' else 'all'}"
    typer.echo(
        f"note: schedules still enqueue jobs, which will wait. To stop schedules too: {command}",
        err=as_json or "*" not in names,
    )


def resume(database: "Database", kind: Kind, names: Sequence[str], note: str | None, *, as_json: bool) -> None:
    """Resume queues or handlers: their jobs are claimed again from the next poll on."""
    from rota.db import node_reports, operations

    operation = operations.resume_queue if kind == "queue" else operations.resume_handler

    async def work(db: "Connection") -> "tuple[list[bool], list[str]]":
        changed = await _run_for_each(db, operation, names, note)
        return changed, [each.name for each in await node_reports.list_paused(db) if each.kind == "queue"]

    changed, still_paused = database.run(work, name=f"{kind} resume")
    print_resumed(kind, names, changed, as_json=as_json)
    if "*" in still_paused:
        typer.echo("note: all queues are still paused. To resume them: rota queue resume --all", err=True)
    elif "*" in names and still_paused:
        typer.echo(f"note: still paused by name: {printable(', '.join(still_paused))}", err=True)


async def _run_for_each(
    db: "Connection", operation: "Callable[..., Awaitable[bool]]", names: Sequence[str], note: str | None
) -> list[bool]:
    async with db.transaction():
        return [await operation(db, name=name, reason=note) for name in names]


def print_paused(
    kind: str, names: Sequence[str], changed: Sequence[bool], *, as_json: bool, addition: str = ""
) -> None:
    """Print each name, and whether it was paused before."""
    if as_json:
        print_json({"paused": names, "changed": sum(changed)})
        return
    for name, has_changed in zip(names, changed, strict=True):
        typer.echo(f"{_format_name(kind, name)} {'is' if has_changed else 'was already'} paused{addition}")


def print_resumed(kind: str, names: Sequence[str], changed: Sequence[bool], *, as_json: bool) -> None:
    """Print each name, and whether it was paused before."""
    if as_json:
        print_json({"resumed": names, "changed": sum(changed)})
        return
    for name, has_changed in zip(names, changed, strict=True):
        typer.echo(f"{_format_name(kind, name)} {'is resumed' if has_changed else 'was not paused'}")


def _format_name(kind: str, name: str) -> str:
    return "every queue" if kind == "queue" and name == "*" else f"{kind} {printable(name)}"
