"""What rota raises, and the exit code that each error ends a command with.

RotaError                     1  anything rota raises on purpose
├── ConfigError               2  a setting, an argument or the app's module is wrong
│   ├── NoDatabase            2  nobody said which database to use
│   ├── NoPostgres            2  no PostgreSQL binaries for an embedded server
│   └── AppNotFound           2  the app's module can't be imported, or holds no App
├── DatabaseUnusable          3  the server can't be reached, refuses us, or can't be written to
│   └── SchemaMismatch        3  the schema is missing, older or newer than this rota understands
├── AddressInUse              4  another process serves on the http port
├── DaemonFailed              1  a daemon had to give up; it has drained
├── InvalidPayload            1  a payload that can't be stored, or doesn't decode
├── Refused                   1  the database said no to a job or to what a job wrote; .sqlstate says why
├── InvalidCron               1  a cron expression that is refused (rota.cron)
└── StaleToken                1  this attempt's claim is no longer the current one

Stopped, which is no error, ends a command with 0.
"""

from __future__ import annotations


class RotaError(Exception):
    """Base of all that rota raises on purpose. The message says what to do."""

    exit_code = 1


class ConfigError(RotaError):
    """A setting, an argument or the app's module is wrong."""

    exit_code = 2


class NoDatabase(ConfigError):
    """Nobody said which database to use."""


class NoPostgres(ConfigError):
    """No PostgreSQL binaries were found for an embedded server."""


class AppNotFound(ConfigError):
    """The app's module can't be imported, or holds no App of that name."""


class DatabaseUnusable(RotaError):
    """The server can't be reached, refuses us, or can't be written to."""

    exit_code = 3


class SchemaMismatch(DatabaseUnusable):
    """The schema is missing, or of a version that this rota doesn't understand."""


class AddressInUse(RotaError):
    """Another process serves on the http port, and did not leave it within some seconds."""

    exit_code = 4


class DaemonFailed(RotaError):
    """A daemon had to give up, for a fault of its own or of a handler; it has drained first."""


class InvalidPayload(RotaError):
    """A payload that can't be stored, or that doesn't decode into the handler's type."""


class Refused(RotaError):
    """The database said no: RT003 … RT006, a CHECK whose name is the reason, a value out of range.

    The same class on every driver. The server's detail, which repeats the row, is left out.
    """

    def __init__(self, message: str, *, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class InvalidCron(RotaError):
    """A cron expression, a zone or a policy that is refused; the message names the reason."""


class StaleToken(RotaError):
    """This attempt's claim is no longer the current one: its lease was lost, and nothing it writes counts."""


class Stopped(BaseException):
    """An order to stop came before there was anything to drain. No error, and nothing that an app's import may catch."""
