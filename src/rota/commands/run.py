"""`rota run` starts a daemon on a database. `rota dev` starts one with its own embedded PostgreSQL."""

import faulthandler
import os
import shutil
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rota.commands.database import Database, import_app, load_config, takes_database
from rota.commands.database_errors import explaining_errors
from rota.commands.migrate import migrate_database
from rota.commands.options import App, ConfigFile
from rota.commands.printing import printable
from rota.commands.restart_on_change import run_and_restart
from rota.errors import Stopped

if TYPE_CHECKING:
    from rota.app import App as RotaApp
    from rota.config import Config


@takes_database
def run(
    database: Database,
    app: App = None,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="Stop as soon as no job is due or running.")] = False,
) -> None:
    """Run a daemon, which claims jobs and runs their handlers.

    Start as many daemons as you need, on any machine.

    SIGTERM and SIGINT drain: running jobs may finish. A second one interrupts them. SIGQUIT interrupts at once and gives handlers
    half a second. SIGHUP reloads the log level and the database URL from their files. SIGUSR1 logs the stack of every thread and
    task. SIGUSR2 and SIGALRM are ignored.

    Exit codes: 0 stopped on request, 1 failure, 2 configuration, 3 database or schema, 4 the HTTP port is in use, 5 a handler did
    not stop and was abandoned.
    """
    _prepare_process()
    with database.configured({"app": app}) as config:
        imported_app = import_app(config)
        if database.embedded:
            migrate_database(config)
        _run_daemon(config, imported_app, database.config_file, until_idle=until_idle)


def dev(
    app: App = None,
    config_file: ConfigFile = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a source file in this folder changes.")
    ] = False,
) -> None:
    """Start PostgreSQL and a daemon on this machine, to try rota.

    The daemon has your handlers and three samples. It prints the traceback of each failed attempt, with the payload's values
    masked. `rota run` logs only the type of the error.
    """
    _prepare_process()
    has_default_port = load_config(config_file, {"app": app}).source("http.port") == "default"
    overrides = {"app": app, "http.port": 0 if has_default_port else None}
    with Database(config_file, None, embedded=True).configured(overrides) as config:
        if reload:
            options = [*(("--app", app) if app else ()), *(("--config", str(config_file)) if config_file else ())]
            run_and_restart([sys.executable, "-m", "rota", "dev", *options])
            return
        imported_app = _import_with_samples(config.app)
        migrate_database(config)
        typer.echo(_welcome(config, imported_app.name), err=True)
        _run_daemon(config, imported_app, config_file, show_errors=True)


def _prepare_process() -> None:
    """Install signal handlers for the time until the daemon installs its own, and flush the output of handlers by line."""
    from rota.observability import log_writer
    from rota.observability.logs import flush_prints_by_line
    from rota.runtime.init_process import fork_if_init

    fork_if_init()

    def stop(*_: object) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    if sys.platform != "win32":
        signal.signal(signal.SIGQUIT, stop)
        # Not SIG_IGN, which processes that handlers start would inherit.
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda *_: None)
    flush_prints_by_line()
    log_writer.install()
    with suppress(OSError, ValueError, AttributeError):  # standard error has no file descriptor
        faulthandler.enable()  # print the stacks of all threads if a C extension crashes the process


def _import_with_samples(reference: str | None) -> "RotaApp":
    from rota.app import find_app
    from rota.builtin import samples

    if reference is None:
        return samples.app
    app = find_app(reference)
    app.include(samples.app)
    return app


def _tune_garbage_collector() -> None:
    """Exclude imported modules from garbage collection. It would cost a fifth of a small job's time."""
    import gc

    gc.collect()
    gc.freeze()
    gc.set_threshold(25_000, 20, 20)


def _run_daemon(
    config: "Config", app: "RotaApp", config_file: Path | None, *, until_idle: bool = False, show_errors: bool = False
) -> None:
    from rota.daemon.daemon import Daemon
    from rota.daemon.main_loop import run_until_drained
    from rota.errors import RotaError
    from rota.observability import log_writer
    from rota.observability.logs import redirect_uncaught_errors

    _tune_garbage_collector()
    daemon = Daemon(
        config,
        app,
        app_reference=config.app,
        until_idle=until_idle,
        read_log_level=lambda: load_config(config_file).log.level,
        show_errors=show_errors,
    )
    redirect_uncaught_errors(lambda error: daemon.telemetry.stray_error({"exception": error}))
    with explaining_errors(config.require_database()):
        try:
            run_until_drained(daemon)
        except (ExceptionGroup, SystemExit) as error:
            # SystemExit comes from a handler's task that called sys.exit(), which is a failure.
            # os._exit: otherwise handlers in threads would keep the process alive although their leases are no longer extended.
            cause: BaseException | None = error.subgroup(RotaError) if isinstance(error, ExceptionGroup) else None
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            try:
                if isinstance(cause, RotaError):
                    typer.echo(f"rota: {printable(cause)}", err=True)
                else:
                    traceback.print_exc()
            finally:
                log_writer.finish()
                os._exit(cause.exit_code if isinstance(cause, RotaError) else 1)


def _welcome(config: "Config", name: str) -> str:
    from rota.embedded import default_data_dir, find_bindir

    psql = "psql" if shutil.which("psql") else str(find_bindir() / "psql")
    handlers = f"the app {name} ({config.app}) and the samples" if config.app else "the samples"
    return f"""
rota dev runs {handlers} rota.echo, rota.sleep and rota.fail.
Press Ctrl-C to stop it. The data stays in {default_data_dir()}
The server stops with the last `rota dev` on that folder.

  open psql         {psql} '{config.require_database()}'
  insert a job      insert into rota.jobs (handler, payload) values ('rota.echo', '{{"hello": "world"}}');
  enqueue a job     rota enqueue rota.sleep '{{"seconds": 5}}' --embedded
  see what happens  rota status --embedded
"""  # noqa: S608  printed, not executed
