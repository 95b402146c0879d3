"""The exceptions that rota raises, with the exit code of a command that ends with one.

RotaError                     1  anything rota raises on purpose
├── ConfigError               2  a setting, an argument or the app's module is wrong
│   ├── NoDatabase            2  no database URL was given
│   ├── NoPostgres            2  no PostgreSQL binaries for an embedded server
│   └── AppNotFound           2  the app's module can't be imported, or holds no App
├── DatabaseUnusable          3  the server can't be reached, refuses the login, or can't be written to
│   └── SchemaMismatch        3  the schema is missing, older or newer than this rota understands
├── AddressInUse              4  another process serves on the http port
├── DaemonFailed              1  a daemon gave up, after a drain
├── InvalidPayload            1  a payload can't be stored, or doesn't decode
├── Refused                   1  the database rejected a value; .sqlstate is its code
├── InvalidCron               1  a cron expression is invalid (rota.cron)
└── StaleToken                1  this attempt's claim is no longer the current one

Stopped is not an error: a command that ends with it exits with 0.
"""

from __future__ import annotations


class RotaError(Exception):
    """Base of all errors that rota raises on purpose. The message says what to do."""

    exit_code = 1


class ConfigError(RotaError):
    """A setting, an argument or the app's module is wrong."""

    exit_code = 2


class NoDatabase(ConfigError):
    """No database URL was given."""


class NoPostgres(ConfigError):
    """No PostgreSQL binaries were found for an embedded server."""


class AppNotFound(ConfigError):
    """The app's module can't be imported, or holds no App of that name."""


class DatabaseUnusable(RotaError):
    """The server can't be reached, refuses the login, or can't be written to."""

    exit_code = 3


class SchemaMismatch(DatabaseUnusable):
    """The schema is missing, or has a version that this rota doesn't understand."""


class AddressInUse(RotaError):
    """Another process serves on the http port, and did not free it within some seconds."""

    exit_code = 4


class DaemonFailed(RotaError):
    """A daemon gave up because of a bug in rota or in a handler. It has drained first."""


class InvalidPayload(RotaError):
    """A payload can't be stored, or doesn't decode into the handler's type."""


class Refused(RotaError):
    """The database rejected a value: RT003 to RT006, a CHECK constraint whose name is the reason, or a value out of range.

    The class is the same for every driver. The message omits the server's detail, which repeats the row.
    """

    def __init__(self, message: str, *, sqlstate: str) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate

    def __repr__(self) -> str:
        return f"Refused({str(self)!r}, sqlstate={self.sqlstate!r})"


class InvalidCron(RotaError):
    """A cron expression, a timezone or a policy is invalid. The message names the reason."""


class StaleToken(RotaError):
    """This attempt's claim is no longer the current one. Its lease was lost, and its writes are refused."""


class Stopped(BaseException):
    """The process was asked to stop before it had anything to drain. A BaseException, so that an app's import can't catch it."""
