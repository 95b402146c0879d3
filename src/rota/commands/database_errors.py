"""Turn errors of the driver and the server into errors that explain what to do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rota.commands.printing import printable

if TYPE_CHECKING:
    from rota.db.blockers import Blocker
    from rota.errors import RotaError

LOCK_WAITERS_SQL = "select pid, pg_blocking_pids(pid), query from pg_stat_activity where wait_event_type = 'Lock'"


@contextmanager
def explaining_errors(dsn: str) -> Iterator[None]:
    """Raise database errors as a RotaError that says what to do. Other exceptions pass through."""
    from asyncpg import InterfaceError, InternalClientError, PostgresError

    try:
        yield
    except (PostgresError, InterfaceError, InternalClientError, OSError) as error:
        if (final_error := explain_error(error, dsn)) is None:
            raise
    else:
        return
    # Outside the except block: as the cause in a traceback, the driver's error could print rows.
    raise final_error


def explain_error(error: Exception, dsn: str) -> "RotaError | None":
    """Return the error for the user, or None if the error is a bug of rota.

    Only the server's message and hint are shown: its detail may contain a row with its payload.
    """
    import asyncpg

    from rota.config import mask_dsn
    from rota.db.connecting import NoServerFits
    from rota.db.salvage import LOST
    from rota.db.server import TO_THE_PRIMARY, WHY_READ_ONLY, unreachable_error
    from rota.errors import DatabaseUnusable, RotaError, SchemaMismatch

    where = mask_dsn(dsn)
    text = str(error) if isinstance(error, OSError) else str(error.args[0] if error.args else "")
    text = text or type(error).__name__
    hint = getattr(error, "hint", None)
    match error:
        case asyncpg.InvalidAuthorizationSpecificationError() | asyncpg.InvalidCatalogNameError():
            return DatabaseUnusable(
                f"{where} refuses the login: {text}. Check user, password and database name in the URL"
            )
        case NoServerFits() | asyncpg.ReadOnlySQLTransactionError():
            return DatabaseUnusable(f"{where} is read-only {WHY_READ_ONLY}: {TO_THE_PRIMARY} ({text})")
        case asyncpg.InsufficientPrivilegeError() if hint is None:
            return DatabaseUnusable(_missing_right_text(where, text))
        case asyncpg.CheckViolationError():
            return RotaError(f"refused: {error.constraint_name or text}")
        case (
            asyncpg.UndefinedTableError()
            | asyncpg.UndefinedColumnError()
            | asyncpg.UndefinedFunctionError()
            | asyncpg.InvalidSchemaNameError()
        ):
            return SchemaMismatch(
                f"the schema in {where} does not fit this version of rota: {text}. Run `rota migrate --check`"
            )
        case asyncpg.PostgresError() if hint or (error.sqlstate or "").startswith("RT"):
            return RotaError(f"{text}. {hint or ''}".strip())
        case asyncpg.DataError():
            return RotaError(f"refused: {text}")
        case asyncpg.ClientConfigurationError():
            return DatabaseUnusable(f"the database URL can't be used: {text}")
        case asyncpg.QueryCanceledError() | asyncpg.ObjectNotInPrerequisiteStateError() | asyncpg.PostgresSystemError():
            cure = ". Set it to 0: alter role … set statement_timeout = 0" if "statement timeout" in text else ""
            return DatabaseUnusable(f"{where} can't do that now: {text}{cure}")
        case _ if isinstance(error, LOST):
            return (
                DatabaseUnusable(_timeout_text(where))
                if isinstance(error, TimeoutError)
                else unreachable_error(where, text)
            )
        case asyncpg.PostgresError():
            return DatabaseUnusable(f"{where} can't do that: {text}")
        case _:
            return None


def lock_timeout_error(dsn: str, blockers: Sequence["Blocker"]) -> "RotaError":
    """Return the error for a command that waited too long for another session's lock."""
    from rota.config import mask_dsn
    from rota.errors import DatabaseUnusable

    causes = "; ".join(f"{printable(str(blocker))}: {blocker.cure}" for blocker in blockers)
    return DatabaseUnusable(f"{mask_dsn(dsn)} has not answered in time, because {causes}. Then run this again")


def _timeout_text(where: str) -> str:
    return (
        f"{where} has not answered in time: the network is interrupted, the server is overloaded, or another session holds a "
        f"lock. To see who waits for whom: {LOCK_WAITERS_SQL}"
    )


def _missing_right_text(where: str, text: str) -> str:
    if "row-level security" in text:
        return f"{where} hides rows from this login: {text}. Run rota check for the cure"
    return (
        f"{where} doesn't let this user do that: {text}. Grant a role to the user: rota_client may insert jobs, rota_operator "
        "may read everything, cancel and redrive, rota_daemon may run a daemon"
    )
