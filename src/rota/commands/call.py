"""`rota call`: run one attempt of a handler in this process, without storing a job."""

import asyncio
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from rota.commands.database import Database, import_app, takes_database
from rota.commands.database_errors import explaining_errors
from rota.commands.enqueue import HandlerName, JobPayload, read_json
from rota.commands.options import App, AsJson
from rota.commands.printing import print_json, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rota.config import Config
    from rota.domain.outcome import Outcome


@takes_database
def call(
    database: Database, handler: HandlerName, payload: JobPayload = None, app: App = None, as_json: AsJson = False
) -> None:
    """Run a handler in this process, without a job or a retry.

    Exit code 1 if the handler fails. With a database, job.transaction() commits the handler's own changes; without one it raises.
    """
    from rota.builtin.configured import configured
    from rota.errors import NoDatabase
    from rota.inline import call_inline

    with _configured(database, app) as config:
        handlers = import_app(config).joined_by(configured(config.handlers))
        value = json.loads(read_json(payload) or "{}")
        try:
            dsn = config.require_database()
        except NoDatabase:
            dsn = None
        with explaining_errors(dsn or ""):
            outcome = asyncio.run(call_inline(handlers, handler, value, dsn=dsn))
    state, detail, failed = _describe(outcome)
    if as_json:
        print_json({"outcome": state, **({"error": detail} if failed else {"result": detail})})
    elif failed:
        typer.echo(f"{state}\n{printable(detail)}", err=True)
    elif detail is None:
        typer.echo(state)
    else:
        print_json(detail)
    raise typer.Exit(1 if failed else 0)


@contextmanager
def _configured(database: Database, app: str | None) -> "Iterator[Config]":
    """Yield the configuration. It need not name a database, except with --embedded."""
    if database.embedded:
        with database.configured({"app": app}) as config:
            yield config
    else:
        yield database.load_config({"app": app})


def _describe(outcome: "Outcome") -> tuple[str, Any, bool]:
    """Return a text for the outcome, its result or error, and whether it is a failure."""
    from rota.domain import outcome as outcomes

    match outcome:
        case outcomes.Succeeded():
            return "succeeded", outcome.value, False
        case outcomes.Committed():
            return "succeeded", None, False
        case outcomes.Cancelled():
            return "cancelled", outcome.reason, False
        case outcomes.Snoozed():
            return "snoozed", str(outcome.after or outcome.at), False
        case outcomes.Held():
            return "held", str(outcome.after or outcome.at), False
        case outcomes.Failed():
            state = (
                "failed: a job would become a dead letter" if outcome.permanent else "failed: a job would be retried"
            )
            return f"{state} ({outcome.kind})", outcome.text, True
        case outcomes.Undecodable():
            return f"payload is invalid: a job would become a dead letter ({outcome.kind})", outcome.text, True
        case outcomes.TimedOut():
            return "timed out: a job would be retried", f"after {outcome.timeout}", True
        case _:
            return "interrupted", type(outcome).__name__, True
