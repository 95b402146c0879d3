"""Decide what an error says about a batch of rows, and save the batch from one bad row.

Every error is one of three kinds. *Transient*: the database is away, locked or being changed; the same statement works later.
*Row*: the server or the driver refuses a value of some row; the statement works without that row. *Fatal*: anything else, which
is a bug or a broken schema, and fails for every row alike.
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


class Fault(Enum):
    """What an error says about the statement that raised it."""

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

At start, `pool.probe` reports the cases in which a person has to act. Later, waiting is better than a daemon that exits.
"""

LOST: tuple[type[Exception], ...] = (*TRANSIENT, InterfaceError, InternalClientError)
"""Errors that a lost connection may raise where the connection can no longer be asked."""

FATAL_SERVER_ERRORS = (
    asyncpg.SyntaxOrAccessError,  # class 42: a missing column or function
    asyncpg.FeatureNotSupportedError,
    asyncpg.InvalidSQLStatementNameError,
    asyncpg.InvalidTransactionStateError,
)
"""Errors of the server that no row can cause. All others may be about a row: bad values, constraints, triggers, bad pages."""

ROW_CLIENT_ERRORS = (ValueError, ArithmeticError)
"""Errors of the driver or of Python for a value that one of them can't represent, such as a timestamp after year 9999."""


def fault_of(error: BaseException) -> Fault:
    """Classify an error.

    An InterfaceError counts as fatal: on a lost connection, `pool.connection` replaces it by a transient error.
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
    """Write all rows in one call; around a bad row, write the others in ever smaller batches.

    Returns the results of the calls that succeeded, in the order of the rows. A row that fails alone goes to `put_aside` with its
    error. Transient and fatal errors propagate at once: what was written by then stays written.
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
            refusal = error
        if len(batch) == 1:
            results.append(await put_aside(batch[0], refusal))
        else:
            middle = len(batch) // 2
            batches += [batch[middle:], batch[:middle]]
    return results


async def salvage_selected(
    run: Callable[[Sequence[int] | None], Awaitable[Result]],
    find: Callable[[], Awaitable[Sequence[int]]],
    put_aside: Callable[[int, Exception], Awaitable[Result]],
) -> list[Result]:
    """Do the same for a statement that selects its rows itself.

    `run(None)` takes all of them. Only if one is bad, `find` lists their ids, and `run(ids)` takes these.
    """
    try:
        return [await run(None)]
    except (asyncpg.PostgresError, *ROW_CLIENT_ERRORS) as error:
        if fault_of(error) is not Fault.ROW:
            raise
    return await salvage(await find(), run, put_aside)
