"""Open the database of a command: read the configuration, connect, and run the command's work on the connection."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import typer

from rota.commands.database_errors import explaining_errors, lock_timeout_error
from rota.commands.options import ConfigFile, Dsn, Embedded, replace_parameter
from rota.commands.printing import printable

if TYPE_CHECKING:
    from rota.app import App
    from rota.config import Config
    from rota.db.blockers import Blocker
    from rota.db.pool import Connection

T = TypeVar("T")


class Database(NamedTuple):
    """The values of --config, --dsn and --embedded."""

    config_file: Path | None
    dsn: str | None
    embedded: bool

    @contextmanager
    def configured(self, overrides: Mapping[str, Any] | None = None) -> Iterator["Config"]:
        """Yield a configuration that names a database. With --embedded its server runs until the block ends."""
        if not self.embedded:
            config = self.load_config(overrides)
            config.require_database()
            yield config
            return
        if self.dsn is not None:
            raise typer.BadParameter(
                "names another database than --embedded. Give only one of them", param_hint="--dsn"
            )
        from rota.embedded import EmbeddedPostgres, default_data_dir

        server = EmbeddedPostgres(data=default_data_dir())
        with server, server.kept(lambda line: typer.echo(f"rota: {printable(line)}", err=True)):
            # Override the direct URL too: a configured one would point to another server.
            urls = {"database.url": server.dsn, "database.direct_url": server.dsn}
            yield load_config(self.config_file, {**(overrides or {}), **urls})

    def load_config(self, overrides: Mapping[str, Any] | None = None) -> "Config":
        """Read the configuration, which need not name a database. Ignores --embedded."""
        return load_config(self.config_file, {"database.url": self.dsn, **(overrides or {})})

    def run(
        self, work: Callable[["Connection"], Awaitable[T]], *, name: str, overrides: Mapping[str, Any] | None = None
    ) -> T:
        """Run `work` on a connection to the database. `name` is the command, for the session's application_name."""
        with self.configured(overrides) as config:
            return asyncio.run(run_on_connection(config, work, name=name))


def takes_database(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --config, --dsn and --embedded in place of its parameter `database`."""
    parameters = [
        Parameter("config_file", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile),
        Parameter("dsn", Parameter.KEYWORD_ONLY, default=None, annotation=Dsn),
        Parameter("embedded", Parameter.KEYWORD_ONLY, default=False, annotation=Embedded),
    ]
    return replace_parameter(command, "database", parameters, lambda values: Database(**values), at_end=True)


def load_config(config_file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> "Config":
    """Read the configuration as a daemon does. `overrides` are values from the command line, by setting."""
    from rota.config import load

    return load(config_file, overrides)


def import_app(config: "Config") -> "App":
    """Import the configured app. Raises ConfigError if none is configured."""
    from rota.app import find_app
    from rota.errors import ConfigError

    if config.app is None:
        raise ConfigError(
            "no app is configured. Pass --app module:app, set ROTA_APP, or set app in rota.toml; to try rota without an app, "
            "run rota dev"
        )
    return find_app(config.app)


async def run_on_connection(config: "Config", work: Callable[["Connection"], Awaitable[T]], *, name: str) -> T:
    """Connect, check the schema's version, and run `work`. While it waits for a lock, the holder is printed to stderr."""
    from asyncpg import DataError, LockNotAvailableError, QueryCanceledError

    from rota.db.blockers import report_blockers
    from rota.db.connecting import close_connection
    from rota.db.migrate import read_installation
    from rota.db.pool import connect
    from rota.db.saturating import saturate
    from rota.db.sessions import ROUTE_OF_COMMANDS
    from rota.errors import RotaError

    url = config.database_url()
    with explaining_errors(url.dsn):
        conn = await connect(url, route=ROUTE_OF_COMMANDS, name=f"rota {name}")
        conn.add_log_listener(lambda _, notice: typer.echo(f"note: {printable(notice.message)}", err=True))
        blockers: dict[int, Blocker] = {}

        def on_blocked(current: Sequence["Blocker"]) -> None:
            for blocker in current:
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
            final_error = lock_timeout_error(url.dsn, list(blockers.values()))
        except DataError as error:
            if not (bad_values := await _describe_bad_values(conn)):
                raise
            final_error = RotaError(f"refused: {error.args[0]}. These stored values are out of range: {bad_values}")
        finally:
            await close_connection(conn)
    raise final_error  # outside the except block, as in explaining_errors()


async def _describe_bad_values(conn: "Connection") -> str:
    """Return the stored values that may have caused a value out of range. Empty if there are none or the query fails."""
    from contextlib import suppress

    import asyncpg

    from rota.db.server_reports import find_bad_values

    with suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
        bad_values = await find_bad_values(conn)
        return "; ".join(
            f"{printable(each.column_name)} of {printable(each.owner)} is {each.value}" for each in bad_values
        ) + (". Correct them with rota schedule set or rota job cancel" if bad_values else "")
    return ""


def run_explained(dsn: str, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Database errors are raised as RotaError, as in explaining_errors()."""
    with explaining_errors(dsn):
        return asyncio.run(work)
