"""`rota run` and `rota dev`: a daemon, with a database that is there, or with one that is brought along."""

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

from rota.commands.migrate import migrate_database
from rota.commands.options import App, ConfigFile, Dsn, Embedded
from rota.commands.reload import run_anew_at_changes
from rota.commands.session import configure, explaining, find_named_app, using
from rota.commands.show import printable
from rota.errors import Stopped

if TYPE_CHECKING:
    from rota.app import App as RotaApp
    from rota.config import Config


def run(
    app: App = None,
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Stop when nothing is due and nothing runs.")
    ] = False,
) -> None:
    """Run jobs: one daemon, of which there may be any number.

    SIGTERM or SIGINT drains; once more interrupts what still runs. SIGQUIT interrupts at once, and leaves handlers half a second.
    SIGHUP reads the log level and the database's URL again, where files hold them. SIGUSR1 logs where all threads and tasks
    are. SIGUSR2 and SIGALRM are ignored.

    Exit codes: 0 stopped as told, 1 failed, 2 configuration, 3 database or schema, 4 the http port is in use, 5 a handler did
    not stop and was left behind.
    """
    _prepare_process()
    with using(config_file, dsn, embedded=embedded, overrides={"app": app}) as config:
        found = find_named_app(config)
        if embedded:
            migrate_database(config)
        _run_daemon(config, found, config_file, until_idle=until_idle)


def dev(
    app: App = None,
    config_file: ConfigFile = None,
    reload: Annotated[
        bool, typer.Option("--reload", help="Start anew when a source file below this folder changes.")
    ] = False,
) -> None:
    """Try rota: a PostgreSQL of its own, the schema, and one daemon with your handlers and three to play with.

    The traceback of each failed attempt is shown, with the payload's values masked. `rota run` logs only the error's kind.
    """
    _prepare_process()
    configured = configure(config_file, overrides={"app": app})
    overrides = {"app": app, "http.port": 0 if configured.source("http.port") == "default" else None}
    with using(config_file, None, embedded=True, overrides=overrides) as config:
        if reload:
            again = ("--config", str(config_file)) if config_file else ()
            run_anew_at_changes([sys.executable, "-m", "rota", "dev", *(("--app", app) if app else ()), *again])
            return
        found = _with_builtins(config.app)
        migrate_database(config)
        typer.echo(_welcome(config, found.name), err=True)
        _run_daemon(config, found, config_file, show_errors=True)


def _prepare_process() -> None:
    """Leave at an order to stop that comes before there is anything to drain; show what handlers print when they print it."""
    from rota.observability import log_writer
    from rota.observability.logs import flush_prints_by_line
    from rota.runtime.init_process import fork_if_init

    fork_if_init()

    def leave(*_: object) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, leave)
    if sys.platform != "win32":
        signal.signal(signal.SIGQUIT, leave)
        # Until the daemon takes them. Not SIG_IGN, which processes that handlers start would inherit.
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, lambda *_: None)
    flush_prints_by_line()
    log_writer.install()
    with suppress(OSError, ValueError, AttributeError):  # no descriptor beneath standard error
        faulthandler.enable()  # the stacks of all threads, without values, if an extension of a handler crashes the process


def _with_builtins(reference: str | None) -> "RotaApp":
    from rota.app import find_app
    from rota.builtin import samples as first_look

    if reference is None:
        return first_look.app
    app = find_app(reference)
    app.include(first_look.app)
    return app


def _spare_the_collector() -> None:
    """Keep what was imported out of garbage collections: going through it again and again costs a fifth of a small job."""
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

    _spare_the_collector()
    daemon = Daemon(
        config,
        app,
        app_reference=config.app,
        until_idle=until_idle,
        read_log_level=lambda: configure(config_file).log.level,
        show_errors=show_errors,
    )
    redirect_uncaught_errors(lambda error: daemon.telemetry.stray_error({"exception": error}))
    with explaining(config.require_database()):
        try:
            run_until_drained(daemon)
        except (ExceptionGroup, SystemExit) as error:
            # A bug of ours, what a person has to see to, or sys.exit() in a task that a handler has started, which must not pass
            # for a stop. Handlers in threads would keep the process alive, with leases that nobody extends any more.
            told: BaseException | None = error.subgroup(RotaError) if isinstance(error, ExceptionGroup) else None
            while isinstance(told, BaseExceptionGroup):
                told = told.exceptions[0]
            try:
                if isinstance(told, RotaError):
                    typer.echo(f"rota: {printable(told)}", err=True)
                else:
                    traceback.print_exc()
            finally:
                log_writer.finish()
                os._exit(told.exit_code if isinstance(told, RotaError) else 1)


def _welcome(config: "Config", name: str) -> str:
    from rota.embedded import default_data_dir, find_bindir

    psql = "psql" if shutil.which("psql") else str(find_bindir() / "psql")
    whose = f"the app {name} ({config.app}) and the built-ins" if config.app else "the built-ins"
    return f"""
rota dev runs {whose} rota.echo, rota.sleep and rota.fail.
Ctrl-C ends it; what is stored stays in {default_data_dir()}
The server ends with the last `rota dev` on that folder.

  look inside    {psql} '{config.require_database()}'
  a first job    insert into rota.jobs (handler, payload) values ('rota.echo', '{{"hello": "world"}}');
  or from here   rota enqueue rota.sleep '{{"seconds": 5}}' --embedded
  and then       rota status --embedded
"""  # noqa: S608  to be typed by a person
