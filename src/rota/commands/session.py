"""A command's database: where it is, a connection to it, and what the user is told when it can't be used."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from rota.commands.show import printable

if TYPE_CHECKING:
    from rota.app import App
    from rota.config import Config
    from rota.db.blockers import Blocker
    from rota.db.pool import Connection
    from rota.embedded import EmbeddedPostgres
    from rota.errors import RotaError

T = TypeVar("T")

WHO_WAITS = "select pid, pg_blocking_pids(pid), query from pg_stat_activity where wait_event_type = 'Lock'"


def configure(
    config_file: Path | None = None, dsn: str | None = None, overrides: Mapping[str, Any] | None = None
) -> "Config":
    """Read the configuration as the daemon would, with what the command line says on top."""
    from rota.config import load

    return load(config_file, {"database.url": dsn, **(overrides or {})})


def find_named_app(config: "Config") -> "App":
    """Import the app that is named. Raises ConfigError where none is."""
    from rota.app import find_app
    from rota.errors import ConfigError

    if config.app is None:
        raise ConfigError(
            "no app: pass --app module:app, or set ROTA_APP, or app in rota.toml. To see rota run without one: rota dev"
        )
    return find_app(config.app)


def embedded_server() -> "EmbeddedPostgres":
    """The PostgreSQL of `rota dev`, not yet started: enter it."""
    from rota.embedded import EmbeddedPostgres, default_data_dir

    return EmbeddedPostgres(data=default_data_dir())


@contextmanager
def using(
    config_file: Path | None, dsn: str | None, *, embedded: bool, overrides: Mapping[str, Any] | None = None
) -> Iterator["Config"]:
    """Yield the configuration, which names a database: the one of the options, or the embedded one, running."""
    if not embedded:
        config = configure(config_file, dsn, overrides)
        config.require_database()
        yield config
        return
    if dsn is not None:
        raise typer.BadParameter("names another database than --embedded: choose one", param_hint="--dsn")
    with embedded_server() as server, server.kept(lambda line: typer.echo(f"rota: {printable(line)}", err=True)):
        # The direct URL, too: a configured one would lead to another server.
        yield configure(config_file, server.dsn, {**(overrides or {}), "database.direct_url": server.dsn})


def ask(config: "Config", work: Callable[["Connection"], Awaitable[T]], *, name: str) -> T:
    """Run `work` on a connection to a database whose schema fits."""
    return asyncio.run(asked(config, work, name=name))


async def asked(config: "Config", work: Callable[["Connection"], Awaitable[T]], *, name: str) -> T:
    """Do the same where a loop runs already."""
    from asyncpg import DataError, LockNotAvailableError, QueryCanceledError

    from rota.db.blockers import report_blockers
    from rota.db.connecting import close_connection
    from rota.db.migrate import read_installation
    from rota.db.pool import connect
    from rota.db.saturating import saturate
    from rota.db.sessions import ROUTE_OF_COMMANDS
    from rota.errors import RotaError

    url = config.database_url()
    with explaining(url.dsn):
        conn = await connect(url, route=ROUTE_OF_COMMANDS, name=f"rota {name}")
        conn.add_log_listener(lambda _, said: typer.echo(f"note: {printable(said.message)}", err=True))
        blockers: dict[int, Blocker] = {}

        def on_blocked(found: Sequence["Blocker"]) -> None:
            for blocker in found:
                if blocker.pid not in blockers:
                    typer.echo(f"note: waiting: {printable(str(blocker))}", err=True)
                blockers[blocker.pid] = blocker

        try:
            async with report_blockers(url, conn, on_blocked=on_blocked):
                await read_installation(conn)
                await saturate(conn)
                return await work(conn)
        except (TimeoutError, LockNotAvailableError, QueryCanceledError):
            if not blockers:
                raise
            refusal = blocked(url.dsn, list(blockers.values()))
        except DataError as error:
            if not (bad := await _bad_values(conn)):
                raise
            refusal = RotaError(f"refused: {error.args[0]}. Stored values can't be computed with: {bad}")
        finally:
            await close_connection(conn)
    # Outside of the handler, as in explaining().
    raise refusal


async def _bad_values(conn: "Connection") -> str:
    """Name the rows and columns that may have caused a value out of range; empty if there are none, or it can't be asked."""
    from contextlib import suppress

    import asyncpg

    from rota.db.server_reports import find_bad_values

    with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        found = await find_bad_values(conn)
        return "; ".join(
            f"{printable(each.column_name)} of {printable(each.owner)} is {each.value}" for each in found
        ) + (". Correct them with rota schedule set or rota job cancel" if found else "")
    return ""


def blocked(dsn: str, blockers: Sequence["Blocker"]) -> "RotaError":
    """Return the error for a command that another session's lock kept waiting for too long."""
    from rota.config import mask_dsn
    from rota.errors import DatabaseUnusable

    named = "; ".join(f"{printable(str(blocker))}: {blocker.cure}" for blocker in blockers)
    return DatabaseUnusable(f"{mask_dsn(dsn)} has not answered in time, because {named}. Then run this again")


def finish(dsn: str, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end; what the server or the way to it refuses leaves as an error that says what to do."""
    with explaining(dsn):
        return asyncio.run(work)


@contextmanager
def explaining(dsn: str) -> Iterator[None]:
    """Turn what the server or the way to it refuses into an error that says what to do."""
    from asyncpg import InterfaceError, InternalClientError, PostgresError

    try:
        yield
    except (PostgresError, InterfaceError, InternalClientError, OSError) as error:
        if (refusal := explained(error, dsn)) is None:
            raise
    else:
        return
    # Outside of the handler: the driver's error may show rows, and would stand in the traceback as the cause of this one.
    raise refusal


def explained(error: Exception, dsn: str) -> "RotaError | None":
    """Return what to tell the user of an error on the way to the server or of the server; None for a fault of ours.

    Of the server's report only the message and the hint are shown: its detail may hold a row, payload and all.
    """
    import asyncpg

    from rota.config import mask_dsn
    from rota.db.connecting import NoServerFits
    from rota.db.salvage import LOST
    from rota.db.server import TO_THE_PRIMARY, WHY_READ_ONLY, unreachable_error
    from rota.errors import DatabaseUnusable, RotaError, SchemaMismatch

    where = mask_dsn(dsn)
    said = str(error) if isinstance(error, OSError) else str(error.args[0] if error.args else "")
    said = said or type(error).__name__
    hint = getattr(error, "hint", None)
    match error:
        case asyncpg.InvalidAuthorizationSpecificationError() | asyncpg.InvalidCatalogNameError():
            return DatabaseUnusable(f"{where} refuses us: {said}. Check user, password and database name in the URL")
        case NoServerFits() | asyncpg.ReadOnlySQLTransactionError():
            return DatabaseUnusable(f"{where} is read-only {WHY_READ_ONLY}: {TO_THE_PRIMARY} ({said})")
        case asyncpg.InsufficientPrivilegeError() if hint is None:
            return DatabaseUnusable(_not_allowed(where, said))
        case asyncpg.CheckViolationError():
            return RotaError(f"refused: {error.constraint_name or said}")
        case (
            asyncpg.UndefinedTableError()
            | asyncpg.UndefinedColumnError()
            | asyncpg.UndefinedFunctionError()
            | asyncpg.InvalidSchemaNameError()
        ):
            return SchemaMismatch(
                f"the schema in {where} isn't the one of this rota: {said}. Run `rota migrate --check`"
            )
        case asyncpg.PostgresError() if hint or (error.sqlstate or "").startswith("RT"):
            return RotaError(f"{said}. {hint or ''}".strip())
        case asyncpg.DataError():
            return RotaError(f"refused: {said}")
        case asyncpg.ClientConfigurationError():
            return DatabaseUnusable(f"the database URL can't be used: {said}")
        case asyncpg.QueryCanceledError() | asyncpg.ObjectNotInPrerequisiteStateError() | asyncpg.PostgresSystemError():
            return DatabaseUnusable(f"{where} can't do that now: {said}")
        case _ if isinstance(error, LOST):
            return (
                DatabaseUnusable(_unanswered(where))
                if isinstance(error, TimeoutError)
                else unreachable_error(where, said)
            )
        case asyncpg.PostgresError():
            return DatabaseUnusable(f"{where} can't do that: {said}")
        case _:
            return None


def _unanswered(where: str) -> str:
    return (
        f"{where} has not answered in time: the way to it is cut, it has too much to do, or somebody holds a lock that we wait "
        f"for. Who waits for whom: {WHO_WAITS}"
    )


def _not_allowed(where: str, said: str) -> str:
    if "row-level security" in said:
        return f"{where} hides rows from this login: {said}. Run rota check for the cure"
    return (
        f"{where} doesn't let this user do that: {said}. Members of rota_client may write the public columns of "
        "rota.jobs; to look at everything, and to cancel, redrive and the like, it takes rota_operator, and for a daemon "
        "rota_daemon: grant the role to this user, or connect as one that has it"
    )
