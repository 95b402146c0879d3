"""`rota enqueue`: insert one job, and warn if no daemon would run it."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.commands.database import Database, takes_database
from rota.commands.options import (
    AsJson,
    At,
    Delay,
    argument,
    option,
    parse_duration_option,
    parse_instant,
)
from rota.commands.printing import print_json, printable

if TYPE_CHECKING:
    from rota.db.pool import Connection

HandlerName = Annotated[str, argument("HANDLER", "Name of the handler to run.")]
JobPayload = Annotated[str | None, argument("JSON", "Payload of the job. Use - to read it from standard input.")]


@takes_database
def enqueue(
    database: Database,
    handler: HandlerName,
    payload: JobPayload = None,
    queue: Annotated[str | None, option("--queue", "NAME", "Queue of the job. [default: the handler's]")] = None,
    at: At = None,
    delay: Delay = None,
    key: Annotated[str | None, option("--key", "TEXT", "Unique key among the handler's live jobs.")] = None,
    on_conflict: Annotated[
        str | None,
        option(
            "--on-conflict",
            "TEXT",
            "If a live job has the --key: keep, replace, queue_one or error.",
            show_default="keep",
        ),
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            "--priority", metavar="NUMBER", min=0, max=9, help="From 0 (first) to 9 (last).", show_default="5"
        ),
    ] = None,
    limit_key: Annotated[str | None, option("--limit-key", "TEXT", "Key of the job in rota limit.")] = None,
    as_json: AsJson = False,
) -> None:
    """Insert one job and print its id."""
    if at is not None and delay is not None:
        raise typer.BadParameter("give either --at or --in, not both of them", param_hint="--at")
    run_at, delay_time = parse_instant(at, "--at"), parse_duration_option(delay, "--in")
    text = read_json(payload)

    async def insert(db: "Connection") -> tuple[int, bool, str, str | None]:
        from rota.db import queries

        due = await queries.read_clock(db) + delay_time if delay_time is not None else run_at
        options = {
            "queue": queue,
            "run_at": due and due.isoformat(),
            "unique_key": key,
            "on_conflict": on_conflict,
            "priority": priority,
            "limit_key": limit_key,
        }
        job_id, created, outcome = await queries.enqueue_job(
            db, handler=handler, payload=text, options=json.dumps(options)
        )
        return job_id, created, outcome, await _find_warning(db, job_id)

    job_id, created, outcome, warning = database.run(insert, name="enqueue")
    if as_json:
        print_json({"job_id": job_id, "created": created, "outcome": outcome, "warning": warning})
        return
    typer.echo(job_id)
    if outcome == "replaced":
        typer.echo("the live job with this key now has the new payload", err=True)
    elif outcome == "queued":
        typer.echo("this job has the key and is running: the new payload runs after it", err=True)
    elif not created:
        why = (
            " and is running. --on-conflict replace changes only waiting jobs; queue_one runs after it"
            if on_conflict == "replace"
            else ""
        )
        typer.echo(f"nothing was inserted: this live job has the key{why}", err=True)
    if warning:
        typer.echo(f"warning: {printable(warning)}", err=True)


def read_json(text: str | None, option: str = "JSON") -> str | None:
    """Return the JSON text of an option, or standard input if the text is `-`. Raises the errors of checked_json()."""
    return None if text is None else checked_json(sys.stdin.read() if text == "-" else text, option)


def checked_json(text: str, option: str) -> str:
    """Return the text unchanged. Raises BadParameter or InvalidPayload if it is not JSON that can be stored.

    The errors do not contain the text. The server gets the original text, because Python would round some numbers.
    """
    from rota.domain.payload import encode
    from rota.errors import InvalidPayload

    what = "meta" if option == "--meta" else "payload"
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        fault = f"not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        raise typer.BadParameter(f"{fault}. A string needs its own quotes: '\"text\"'", param_hint=option) from None
    except ValueError:
        raise InvalidPayload(f"{what}: a number has more digits than a handler can read") from None
    except RecursionError:
        raise InvalidPayload(f"{what}: nests too deep") from None
    encode(value, what=what)
    return text


async def _find_warning(db: "Connection", job_id: int) -> str | None:
    """Return why no daemon would claim the job, or None."""
    import asyncpg

    from rota.db import node_reports, reports

    try:
        if (job := await reports.describe_job(db, job_id=job_id)) is None:
            return None
        return await node_reports.find_why_unclaimed(db, handler=job.handler, queue=job.queue)
    except asyncpg.InsufficientPrivilegeError:
        return None  # a member of rota_client may insert jobs but not see daemons
