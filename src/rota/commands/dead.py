"""`rota dead`: list dead letters, redrive or discard them."""

from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, takes_database
from rota.commands.dead_change import discard, redrive
from rota.commands.dead_letters import Before, DeathReason, ErrorKind, letter_filter, print_groups
from rota.commands.job_details import print_job, read_job
from rota.commands.options import AsJson, Handler, JobId, Queue, ShowErrors, ShowPayload, count_option
from rota.commands.printing import MAX_LISTED, console, format_distance, print_json, table

if TYPE_CHECKING:
    from rota.db.reports import ListedDeadLetter

app = typer.Typer(name="dead", help="List dead letters, redrive or discard them.", no_args_is_help=True)


@app.command()
@takes_database
def summary(
    database: Database,
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    as_json: AsJson = False,
) -> None:
    """Count dead letters by handler, reason and type of error."""
    from rota.db.reports import summarise_dead_letters

    which = letter_filter(handler, queue, reason, error_kind, before)
    groups = database.run(lambda db: summarise_dead_letters(db, which=which, limit=MAX_LISTED), name="dead summary")
    if as_json:
        print_json(groups)
        return
    if not groups:
        typer.echo("no dead letters")
        return
    print_groups(groups)
    typer.echo(
        "to see one: rota dead show SAMPLE --errors · to run them again: rota dead redrive --handler … · "
        "to end them: rota dead discard … --note …",
        err=True,
    )


@app.command("list")
@takes_database
def list_(
    database: Database,
    handler: Handler = None,
    queue: Queue = None,
    reason: DeathReason = None,
    error_kind: ErrorKind = None,
    before: Before = None,
    limit: Annotated[int, count_option("Print at most this many dead letters.", most=10_000)] = 20,
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest job first."""
    from rota.db.reports import list_dead_letters

    which = letter_filter(handler, queue, reason, error_kind, before)
    letters = database.run(lambda db: list_dead_letters(db, which=which, limit=limit), name="dead list")
    if as_json:
        print_json(letters)
        return
    _print_letters(letters)
    if len(letters) == limit:
        typer.echo(f"these are the oldest {limit}. To see more: --limit, or rota dead summary", err=True)


@app.command()
@takes_database
def show(
    database: Database,
    job_id: JobId,
    payload: ShowPayload = False,
    errors: ShowErrors = False,
    as_json: AsJson = False,
) -> None:
    """Show a dead letter, its attempts, and why it is dead."""
    from rota.errors import RotaError

    details = database.run(lambda db: read_job(db, job_id, payload=payload, errors=errors), name="dead show")
    if details.job.state != "dead":
        raise RotaError(
            f"job {job_id} is not a dead letter, it is {details.job.state}. To see it: rota job show {job_id}"
        )
    print_job(details, errors=errors, as_json=as_json)


app.command()(redrive)
app.command()(discard)


def _print_letters(letters: "list[ListedDeadLetter]") -> None:
    rows = [
        (
            letter.job_id,
            letter.handler,
            letter.queue,
            letter.reason,
            letter.error_kind,
            f"{letter.attempt}/{letter.max_attempts}" if letter.max_attempts else letter.attempt,
            format_distance(letter.finished_at, letter.now),
        )
        for letter in letters
    ]
    console().print(table(None, "job#", "handler~", "queue~", "reason", "error~", "attempt#", "died#", rows=rows))
