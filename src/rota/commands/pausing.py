"""What `rota queue` and `rota handler` have in common: pause and resume by name, all that were named or none.

`rota schedule` does it in its own way, and says the same of it.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Literal

import typer

from rota.commands.session import ask
from rota.commands.show import print_json, printable

if TYPE_CHECKING:
    from rota.config import Config
    from rota.db.pool import Connection

Kind = Literal["queue", "handler"]


def pause(config: "Config", kind: Kind, names: Sequence[str], reason: str | None, *, as_json: bool) -> None:
    """Keep their jobs from being claimed; what runs, runs on."""
    from rota.db import operations

    act = operations.pause_queue if kind == "queue" else operations.pause_handler
    changed = ask(config, lambda db: _each(db, act, names, reason), name=f"{kind} pause")
    say_paused(kind, names, changed, as_json=as_json, besides=": what runs, runs on")
    cure = f"rota schedule pause --{'handler …' if kind == 'handler' else 'all'}"
    typer.echo(
        f"note: schedules go on enqueueing jobs, which wait. To stop them, too: {cure}", err=as_json or "*" not in names
    )


def resume(config: "Config", kind: Kind, names: Sequence[str], reason: str | None, *, as_json: bool) -> None:
    """Let their jobs be claimed again, within a poll."""
    from rota.db import node_reports, operations

    act = operations.resume_queue if kind == "queue" else operations.resume_handler

    async def resumed(db: "Connection") -> "tuple[list[bool], list[str]]":
        changed = await _each(db, act, names, reason)
        return changed, [each.name for each in await node_reports.list_paused(db) if each.kind == "queue"]

    changed, still = ask(config, resumed, name=f"{kind} resume")
    say_resumed(kind, names, changed, as_json=as_json)
    if "*" in still:
        typer.echo("note: all queues are still paused: rota queue resume --all", err=True)
    elif "*" in names and still:
        typer.echo(f"note: still paused by name: {printable(', '.join(still))}", err=True)


async def _each(
    db: "Connection",
    act: "Callable[..., Awaitable[bool]]",
    names: Sequence[str],
    reason: str | None,
) -> list[bool]:
    async with db.transaction():
        return [await act(db, name=name, reason=reason) for name in names]


def say_paused(kind: str, names: Sequence[str], changed: Sequence[bool], *, as_json: bool, besides: str = "") -> None:
    """Say of each whether that is new."""
    if as_json:
        print_json({"paused": names, "changed": sum(changed)})
        return
    for name, new in zip(names, changed, strict=True):
        typer.echo(f"{_called(kind, name)} is paused{'' if new else ', as before'}{besides}")


def say_resumed(kind: str, names: Sequence[str], changed: Sequence[bool], *, as_json: bool) -> None:
    """Say of each whether it was paused."""
    if as_json:
        print_json({"resumed": names, "changed": sum(changed)})
        return
    for name, new in zip(names, changed, strict=True):
        typer.echo(f"{_called(kind, name)} {'goes on' if new else 'was not paused'}")


def _called(kind: str, name: str) -> str:
    return "every queue" if kind == "queue" and name == "*" else f"{kind} {printable(name)}"
