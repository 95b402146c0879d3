"""`rota call`: one attempt of a handler here and now, of which nothing is stored."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.enqueue import given_json
from rota.commands.options import App, AsJson, ConfigFile, Dsn, Embedded
from rota.commands.session import configure, explaining, find_named_app, using
from rota.commands.show import print_json, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rota.config import Config
    from rota.domain.outcome import Outcome


def call(
    handler: Annotated[str, typer.Argument(metavar="HANDLER", show_default=False, help="The handler's name.")],
    payload: Annotated[
        str | None, typer.Argument(metavar="JSON", help="Its payload; - reads it from the input.", show_default=False)
    ] = None,
    app: App = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Call a handler here and now: no job, no retry, nothing about it is stored. Exit code 1 if it fails.

    job.transaction() commits the handler's own effect where a database is named, and raises where none is.
    """
    import asyncio
    import json

    from rota.builtin.configured import configured
    from rota.inline import call_inline

    with _configuration(config_file, dsn, app, embedded=embedded) as config:
        found = find_named_app(config).joined_by(configured(config.handlers))
        text = given_json(payload) or "{}"
        url = _database(config)
        with explaining(url or ""):
            outcome = asyncio.run(call_inline(found, handler, json.loads(text), dsn=url))
    became, said, failed = _told(outcome)
    if as_json:
        print_json({"outcome": became, **({"error": said} if failed else {"result": said})})
    elif failed:
        typer.echo(f"{became}\n{printable(said)}", err=True)
    elif said is None:
        typer.echo(became)
    else:
        print_json(said)
    raise typer.Exit(1 if failed else 0)


@contextmanager
def _configuration(config_file: Path | None, dsn: str | None, app: str | None, *, embedded: bool) -> "Iterator[Config]":
    """Yield it, with a database or without."""
    if embedded:
        with using(config_file, dsn, embedded=True, overrides={"app": app}) as config:
            yield config
    else:
        yield configure(config_file, dsn, {"app": app})


def _database(config: "Config") -> str | None:
    from rota.errors import NoDatabase

    try:
        return config.require_database()
    except NoDatabase:
        return None


def _told(outcome: "Outcome") -> tuple[str, Any, bool]:
    """Return what became of it, what there is to say, and whether that is a failure."""
    from rota.domain import outcome as became

    match outcome:
        case became.Succeeded():
            return "succeeded", outcome.value, False
        case became.Committed():
            return "succeeded", None, False
        case became.Cancelled():
            return "cancelled", outcome.reason, False
        case became.Snoozed():
            return "snoozed", str(outcome.after or outcome.at), False
        case became.Failed():
            how = "failed for good: a dead letter at once" if outcome.permanent else "failed: it would be tried again"
            return f"{how} ({outcome.kind})", outcome.text, True
        case became.Undecodable():
            return f"its payload doesn't decode: a dead letter at once ({outcome.kind})", outcome.text, True
        case became.TimedOut():
            return "timed out: it would be tried again", f"after {outcome.timeout}", True
        case _:
            return "interrupted", type(outcome).__name__, True
