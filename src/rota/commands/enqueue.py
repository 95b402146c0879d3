"""`rota enqueue`: insert one job, and say so if nobody would run it."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded, duration, instant
from rota.commands.session import ask, using
from rota.commands.show import print_json, printable

if TYPE_CHECKING:
    from rota.db.pool import Connection


def enqueue(
    handler: Annotated[str, typer.Argument(metavar="HANDLER", help="What is to run.", show_default=False)],
    payload: Annotated[
        str | None, typer.Argument(metavar="JSON", help="Its payload; - reads it from the input.", show_default=False)
    ] = None,
    queue: Annotated[str | None, typer.Option("--queue", help="Instead of the handler's.", show_default=False)] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="INSTANT", help="When, with its zone: 2026-03-01T09:00:00Z.", show_default=False),
    ] = None,
    delay: Annotated[
        str | None, typer.Option("--in", metavar="DURATION", help="How long from now: 30s, 1h30m.", show_default=False)
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="Unique among the handler's live jobs.", show_default=False)
    ] = None,
    on_conflict: Annotated[
        str | None,
        typer.Option("--on-conflict", help="With --key: keep, replace or error.", show_default="keep"),
    ] = None,
    priority: Annotated[
        int | None, typer.Option("--priority", min=0, max=9, help="0 first, 9 last.", show_default="5")
    ] = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Insert one job and print its number."""
    if at is not None and delay is not None:
        raise typer.BadParameter("say either --at or --in", param_hint="--at")
    run_at, later = instant(at, "--at"), duration(delay, "--in")
    text = given_json(payload)

    async def insert(db: "Connection") -> tuple[int, bool, str, str | None]:
        from rota.db import queries

        due = await queries.read_clock(db) + later if later is not None else run_at
        options = {
            "queue": queue,
            "run_at": due and due.isoformat(),
            "unique_key": key,
            "on_conflict": on_conflict,
            "priority": priority,
        }
        job_id, created, outcome = await queries.enqueue_job(
            db, handler=handler, payload=text, options=json.dumps(options)
        )
        return job_id, created, outcome, await _warning(db, job_id)

    with using(config_file, dsn, embedded=embedded) as config:
        job_id, created, outcome, warning = ask(config, insert, name="enqueue")
    if as_json:
        print_json({"job_id": job_id, "created": created, "outcome": outcome, "warning": warning})
        return
    typer.echo(job_id)
    if outcome == "replaced":
        typer.echo("replaced: this job now has the new payload", err=True)
    elif not created:
        why = ", and is running: --on-conflict replace changes a job that waits" if on_conflict == "replace" else ""
        typer.echo(f"nothing was inserted: this live job has the key{why}", err=True)
    if warning:
        typer.echo(f"warning: {printable(warning)}", err=True)


def given_json(text: str | None, option: str = "JSON") -> str | None:
    """Return what an option was given, if it is JSON; - reads it from the input."""
    return None if text is None else checked_json(sys.stdin.read() if text == "-" else text, option)


def checked_json(text: str, option: str) -> str:
    """Return the text if it is JSON that can be stored, else say where it isn't. The text itself is never shown.

    It goes to the server as it was written: JSON knows numbers that Python rounds.
    """
    from rota.domain.payload import encode
    from rota.errors import InvalidPayload

    what = "meta" if option == "--meta" else "payload"
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        fault = f"this is no JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise typer.BadParameter(f"{fault}. A text needs quotes of its own: '\"text\"'", param_hint=option) from None
    except ValueError:
        raise InvalidPayload(f"{what}: a number has more digits than a handler can read") from None
    except RecursionError:
        raise InvalidPayload(f"{what}: nests too deep") from None
    encode(value, what=what)
    return text


async def _warning(db: "Connection", job_id: int) -> str | None:
    import asyncpg

    from rota.db import node_reports, reports

    try:
        if (job := await reports.describe_job(db, job_id=job_id)) is None:
            return None
        return await node_reports.find_why_unclaimed(db, handler=job.handler, queue=job.queue)
    except asyncpg.InsufficientPrivilegeError:
        return None  # a client may insert, and see no daemons
