"""Classify database errors, and write a batch of rows although some of them are bad.

An error is one of three kinds. *Transient*: the database is away, locked or being changed; the same statement works later.
*Row*: the server or the driver rejects a value of some row; the statement works without that row. *Fatal*: any other error,
which is a bug or a broken schema and affects every row.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, TypeVar

import asyncpg
from asyncpg.exceptions import InterfaceError, InternalClientError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Row = TypeVar("Row")
Result = TypeVar("Result")


class ChangeIgnored(Exception):
    """A statement locked a row but did not change it, because a trigger of the user dropped the change."""


class Fault(Enum):
    """The kind of an error."""

    TRANSIENT = "transient"
    ROW = "row"
    FATAL = "fatal"


TRANSIENT: tuple[type[Exception], ...] = (
    asyncpg.PostgresConnectionError,  # class 08
    asyncpg.TransactionRollbackError,  # class 40
    asyncpg.InsufficientResourcesError,  # class 53
    asyncpg.ObjectNotInPrerequisiteStateError,  # class 55: lock_timeout; a database that accepts no connections
    asyncpg.OperatorInterventionError,  # class 57
    asyncpg.PostgresSystemError,  # class 58
    asyncpg.ReadOnlySQLTransactionError,  # the former primary, after a fail-over
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InvalidAuthorizationSpecificationError,  # class 28: a password is being changed
    asyncpg.InvalidCatalogNameError,  # the database is being renamed or restored
    asyncpg.InvalidSchemaNameError,
    asyncpg.UndefinedTableError,
    asyncpg.InsufficientPrivilegeError,  # rights are being granted anew
    asyncpg.TargetServerAttributeNotMatched,  # a fail-over is under way: no server takes writes
    OSError,  # refused, reset, no such host, no such socket, timed out
)
"""The database is away, restarting, full, closed, locked or being restored, or it cancelled the statement.

At start, `server.probe` reports the cases in which a person has to act. Later, the daemon waits instead of exiting.
"""

LOST: tuple[type[Exception], ...] = (*TRANSIENT, InterfaceError, InternalClientError)
"""Errors that a lost connection may raise, for code that can't check whether the connection is closed."""

FATAL_SERVER_ERRORS = (
    asyncpg.SyntaxOrAccessError,  # class 42: a missing column or function
    asyncpg.FeatureNotSupportedError,
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.InvalidTransactionStateError,
)
"""Server errors that no row can cause. Any other server error may concern a row: its values, constraints, triggers, pages."""

ROW_CLIENT_ERRORS = (ValueError, ArithmeticError)
"""Errors of the driver or of Python for a value that Python can't represent, such as a timestamp after the year 9999."""


def fault_of(error: BaseException) -> Fault:
    """Classify an error.

    An InterfaceError counts as fatal. On a lost connection, `pool.connection` replaces it by a transient error.
    """
    if isinstance(error, TRANSIENT):
        return Fault.TRANSIENT
    if isinstance(error, asyncpg.PostgresError):
        return Fault.FATAL if isinstance(error, FATAL_SERVER_ERRORS) else Fault.ROW
    return Fault.ROW if isinstance(error, ROW_CLIENT_ERRORS) else Fault.FATAL


async def salvage(
    rows: Sequence[Row],
    write: Callable[[Sequence[Row]], Awaitable[Result]],
    put_aside: Callable[[Row, Exception], Awaitable[Result]],
) -> list[Result]:
    """Write all rows in one call. If a row is bad, split the batch in halves until the bad rows are isolated.

    A row that fails alone goes to `put_aside` with its error. Returns the results of all calls that succeeded, in the order of the
    rows. Transient and fatal errors propagate at once: rows written before stay written.
    """
    results: list[Result] = []
    batches = [rows] if rows else []
    while batches:
        batch = batches.pop()
        try:
            results.append(await write(batch))
            continue
        except (asyncpg.PostgresError, *ROW_CLIENT_ERRORS) as error:
            if fault_of(error) is not Fault.ROW:
                raise
            row_error = error
        if len(batch) == 1:
            results.append(await put_aside(batch[0], row_error))
        else:
            middle = len(batch) // 2
            batches += [batch[middle:], batch[:middle]]
    return results


async def salvage_selected(
    run: Callable[[Sequence[int] | None], Awaitable[Result]],
    find: Callable[[], Awaitable[Sequence[int]]],
    put_aside: Callable[[int, Exception], Awaitable[Result]],
) -> list[Result]:
    """Do the same as `salvage` for a statement that selects its rows itself.

    `run(None)` handles all rows. If one of them is bad, `find` lists their ids, and `run(ids)` handles batches of these.
    """
    try:
        return [await run(None)]
    except (asyncpg.PostgresError, *ROW_CLIENT_ERRORS) as error:
        if fault_of(error) is not Fault.ROW:
            raise
    return await salvage(await find(), run, put_aside)
