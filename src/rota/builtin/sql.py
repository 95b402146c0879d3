"""Run SQL statements of the configuration as jobs, each with its own login.

SET ROLE would be no sandbox, because the called code can RESET it. So the statement runs on a connection that has logged in as a
role whose only right in schema rota is to call `rota.complete`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import asyncpg

from rota.config.database_url import DatabaseUrl
from rota.db.connecting import close_connection, open_connection
from rota.db.sessions import KEEPALIVES, format_milliseconds
from rota.handler_exceptions import Permanent
from rota.handlers.job import Job  # noqa: TC001  the codec reads the annotations at run time
from rota.handlers.local_port import attempt_and_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from rota.config import Statement


def execute_statement(settings: Statement) -> Callable[[Job[Any]], Coroutine[Any, Any, Any]]:
    """Return the handler of one statement. It commits with the job's completion unless `transaction` is off."""

    async def sql(job: Job[Any]) -> dict[str, Any] | None:
        attempt, _ = attempt_and_environment(job)
        conn = await open_connection(
            DatabaseUrl(settings.url.get_secret_value()),
            server_settings={
                "application_name": f"rota job {job.job_id}",
                "idle_in_transaction_session_timeout": format_milliseconds(timedelta(seconds=attempt.lease)),
                **KEEPALIVES,
            },
        )
        try:
            if not settings.transaction:
                return await _execute(conn, settings.statement, attempt.payload)
            # No rollback on errors: closing the connection rolls back, and is limited in time even over a cut link.
            transaction = conn.transaction(isolation="read_committed")
            await transaction.start()
            result = await _execute(conn, settings.statement, attempt.payload)
            await job.complete(conn, result)
            await transaction.commit()
            attempt.committed = True
            return result
        except asyncpg.DataError as error:  # class 22: the same values always fail
            raise Permanent(f"{type(error).__name__} ({error.sqlstate})") from None
        finally:
            await close_connection(conn)

    return sql


async def _execute(conn: asyncpg.Connection, statement: str, payload: str) -> dict[str, Any]:
    prepared = await conn.prepare(statement)
    await prepared.fetch(*[payload][: len(prepared.get_parameters())])
    return {"status": prepared.get_statusmsg()}
