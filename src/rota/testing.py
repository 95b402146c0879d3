"""Test handlers, and code that enqueues jobs.

There are three ways. A handler is a function: call it with a job of `make_job`::

    async def test_a_receipt_names_the_order() -> None:
        job = make_job(Receipt(order=7))
        await send_receipt(job)
        assert outbox == ["order 7"]

Or run it as a daemon would, without a database: the payload is decoded, middleware and the timeout apply, and an exception becomes
an outcome::

    async def test_an_unknown_order_is_given_up() -> None:
        outcome = await perform(app, "send_receipt", {"order": 404})
        assert isinstance(outcome, Failed) and outcome.permanent

Or let your code enqueue on a connection and run the due jobs there, in a transaction that is rolled back at the end. The fixture
gives any asyncpg connection to a database with rota's schema::

    @pytest.fixture
    async def conn():
        conn = await asyncpg.connect(os.environ["TEST_DATABASE_URL"])
        transaction = conn.transaction()
        await transaction.start()
        yield conn
        await transaction.rollback()
        await conn.close()

    async def test_an_order_sends_its_receipt(conn) -> None:
        await place_order(conn, 7)
        await assert_enqueued(conn, send_receipt, {"order": 7}, queue="mail")
        (ran,) = await drain(app, conn)
        assert isinstance(ran.outcome, Succeeded)
"""

from __future__ import annotations

import json
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

import asyncpg

from rota.app import App
from rota.client import encode_payload
from rota.client.columns import check_column
from rota.config.database_url import DatabaseUrl
from rota.db import drivers, queries
from rota.db.blocking import BlockingPool, Login
from rota.db.connecting import open_connection
from rota.db.migrate import read_installation
from rota.domain.job import Claim, NodeId, Suspects
from rota.domain.outcome import (
    Cancelled,
    Committed,
    Failed,
    Held,
    Interrupted,
    LeaseLost,
    Outcome,
    Snoozed,
    Succeeded,
    TimedOut,
    Undecodable,
)
from rota.domain.validation import check_handler_name, check_types
from rota.handlers.attempt import Attempt
from rota.handlers.local_port import Environment
from rota.inline import (
    GRACE,
    JOB_FACTS,
    InlineJob,
    InlineSyncJob,
    SingleConnectionPool,
    call_inline,
    find_handler,
    inline_environment,
    make_attempt,
)
from rota.lifecycle.executor import Executor
from rota.lifecycle.running import Running
from rota.lifecycle.settle import Settler
from rota.lifecycle.wake import Wake
from rota.observability.telemetry import Telemetry, make_logger
from rota.supervision.service_monitor import ServiceMonitor

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rota.client.columns import Columns
    from rota.db.drivers import AsyncConn, SyncConn
    from rota.handlers.handler_function import HandlerFunction

__all__ = [
    "Cancelled",
    "Committed",
    "Failed",
    "Held",
    "InlineJob",
    "InlineSyncJob",
    "Interrupted",
    "LeaseLost",
    "Outcome",
    "Ran",
    "Snoozed",
    "Succeeded",
    "TimedOut",
    "Undecodable",
    "assert_enqueued",
    "assert_enqueued_sync",
    "drain",
    "make_job",
    "make_sync_job",
    "perform",
]

P = TypeVar("P")

LEASE = timedelta(hours=1)

_ANY = object()

_ASYNCPG = (asyncpg.Connection, asyncpg.pool.PoolConnectionProxy)


def make_job(payload: P, *, handler: str = "test", conn: Any = None, state: Any = None, **facts: Any) -> InlineJob[P]:
    """Return a job to call an `async def` handler with. A plain `def` handler takes one of `make_sync_job`.

    The handler gets `payload` unchanged. `facts` set the job's properties: `job_id`, `attempt`, `fence_token`, `queue`,
    `scheduled_for`, `idempotency_key`, `schedule_id`, `schedule`, `checkpoint`, `meta`. `job.transaction()` yields `conn`, an
    asyncpg connection, with a transaction or a savepoint open. After the call, `progress`, `progress_note`, `guarded`,
    `completed`, `result` and `checkpoint` show what the handler did with the job. `job.stop("drain")` asks the handler to stop.
    Raises TypeError for a fact of the wrong type.
    """
    _check_facts(facts)
    if conn is not None and type(conn).__module__.partition(".")[0] == "psycopg":
        raise TypeError(
            "conn can't be a psycopg connection: write an asyncpg one, or use make_sync_job for a plain def"
        )
    return InlineJob(make_attempt("{}", handler=handler, **facts), inline_environment(conn=conn, state=state), payload)


def make_sync_job(
    payload: P, *, handler: str = "test", conn: Any = None, state: Any = None, **facts: Any
) -> InlineSyncJob[P]:
    """Return a job to call a plain `def` handler with. `conn` is a psycopg connection; otherwise it works like `make_job`."""
    _check_facts(facts)
    if isinstance(conn, _ASYNCPG):
        raise TypeError("conn can't be an asyncpg connection: write a psycopg one, or use make_job for an async def")
    return InlineSyncJob(
        make_attempt("{}", handler=handler, **facts), inline_environment(conn=conn, state=state), payload
    )


async def perform(app: App, name: str, payload: Any = None, *, conn: Any = None, **facts: Any) -> Outcome:
    """Run one attempt of a handler as a daemon would, without a database, and return its outcome.

    `payload` is the handler's own type or a JSON value. The app's lifespan is entered around it, unless `state=…` is given.

    ============= ============================================================ ====================================
    outcome       when                                                         attributes
    ============= ============================================================ ====================================
    `Succeeded`   the handler returned                                         `value`, the result
    `Committed`   it completed its own job: `job.transaction()`, `complete()`
    `Failed`      it raised an exception, `Permanent` or `Retry`               `kind`, `text`, `permanent`,
                                                                               `after`, `at`
    `Undecodable` the payload doesn't decode; the handler was not called       `kind`, `text`
    `TimedOut`    it ran longer than the handler's timeout                     `timeout`
    `Held`        it raised `Hold`, and the job has a limit_key                `after`, `at`
    `Snoozed`     it raised `Snooze`                                           `after`, `at`
    `Cancelled`   it raised `Cancel`                                           `reason`
    ============= ============================================================ ====================================

    Two more occur only in a daemon and after `job.stop()`: `Interrupted` (a drain) and `LeaseLost`.
    """
    _check_app(app)
    _check_facts(facts.keys() - {"state"})
    return await call_inline(app, name, payload, conn=conn, **facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One attempt that `drain` ran."""

    job_id: int
    handler: str
    attempt: int
    outcome: Outcome


async def drain(
    app: App, conn: asyncpg.Connection | str, *, at_once: bool = False, limit: int = 1000, state: Any = _ANY
) -> list[Ran]:
    """Run the app's due jobs one after the other until none is due, and return their attempts in order. Ignores limits.

    All statements run on `conn`, an asyncpg connection, in the transaction that is open there, so a rollback undoes everything.
    Jobs that the handlers enqueue run too. The database's time doesn't advance in a transaction, so retries don't become due;
    `at_once` makes every waiting job due. `conn` may also be a URL; only then can plain `def` handlers use `job.transaction()`.
    Raises AssertionError after `limit` attempts, because jobs seem to enqueue each other endlessly.
    """
    _check_app(app)
    check_types(at_once=at_once, limit=limit)
    async with AsyncExitStack() as stack:
        blocking = None
        if isinstance(conn, str):
            blocking = BlockingPool(Login(DatabaseUrl(conn), {}), 1)
            stack.callback(blocking.close)
            conn = await open_connection(conn)
            stack.push_async_callback(conn.close)
        elif not isinstance(conn, _ASYNCPG):
            raise TypeError(
                "drain takes an asyncpg connection or a URL: commit first, where the jobs are on another driver's"
            )
        if state is _ANY:
            state = None if app.lifespan is None else await stack.enter_async_context(app.lifespan())
        single_connection = cast("Any", SingleConnectionPool(conn))
        environment = Environment(
            node=NodeId(uuid.uuid4()),
            installation_id=(await read_installation(conn)).installation_id,
            pool=single_connection,
            handler_pool=single_connection,
            blocking=blocking,
            app_reference=None,
            state=state,
        )
        return await _DrainingDaemon(app, conn, environment).run(at_once=at_once, limit=limit)


class _DrainingDaemon:
    """A daemon with one slot and one connection that ends when no job is due."""

    def __init__(self, app: App, conn: Any, environment: Environment) -> None:
        self._app = app
        self._conn = conn
        self._node = environment.node
        self._handlers = {name: find_handler(app, name) for name in app.handlers}
        self._running = Running({"*": 1}, Wake(), grace=GRACE)
        self._settler = Settler(
            environment.pool,
            self._running,
            Telemetry(make_logger(level="error", format="json"), handlers=self._handlers),
            monitor=ServiceMonitor(),
            node=self._node,
            random=lambda: 1.0,
            alert=None,
            on_end=lambda _schedule_id, _succeeded: None,  # only daemons keep the statistics of schedules
        )
        self._executor = Executor(
            self._handlers, environment, settle=self._record, abandon=self._settler.abandon, grace=GRACE
        )
        self._ran: list[Ran] = []

    async def run(self, *, at_once: bool, limit: int) -> list[Ran]:
        """Run the due jobs, and the jobs that become due meanwhile."""
        await queries.register_handlers(
            self._conn,
            app=self._app.name,
            release=self._app.release,
            handlers=[handler.row for handler in self._handlers.values()],
        )
        await queries.raise_fence_tokens(self._conn)
        while claim := await self._claim(at_once=at_once):
            if len(self._ran) >= limit:
                raise AssertionError(
                    f"{limit} attempts, and jobs are still due: the last was of {self._ran[-1].handler!r}"
                )
            await self._run_attempt(
                Attempt(claim, lease=LEASE.total_seconds(), claim_sent_at=0.0, suspect=Suspects.NONE)
            )
        return self._ran

    async def _claim(self, *, at_once: bool) -> Claim | None:
        if at_once:
            await queries.make_jobs_due(self._conn, handlers=list(self._handlers))
        return await queries.claim_job_without_limits(
            self._conn, node=self._node, handlers=list(self._handlers), lease=LEASE
        )

    async def _run_attempt(self, attempt: Attempt) -> None:
        self._running.add([attempt], self._executor.start)
        await self._executor.finish()
        await self._settler.run_once()

    def _record(self, attempt: Attempt, outcome: Outcome) -> None:
        claim = attempt.claim
        self._ran.append(Ran(job_id=claim.job_id, handler=claim.handler, attempt=claim.attempt, outcome=outcome))
        self._settler.add(attempt, outcome)


async def assert_enqueued(
    conn: AsyncConn,
    handler: str | HandlerFunction[Any, Any, Any],
    payload: Any = _ANY,
    *,
    count: int | None = None,
    **columns: Unpack[Columns],
) -> list[int]:
    """Assert that live jobs of the handler exist, as `conn` sees them, and return their job_ids.

    The jobs' payload must contain `payload`: further keys of a dict don't matter. `meta` must be contained too, other `columns`
    must be equal. `count` is the number of such jobs, 0 for none; without it, at least one is needed.
    """
    row = await drivers.fetch(conn, "find_enqueued", _handler_name(handler), caller="assert_enqueued")
    return _matching_jobs(row, _handler_name(handler), payload, count, columns)


def assert_enqueued_sync(
    conn: SyncConn,
    handler: str | HandlerFunction[Any, Any, Any],
    payload: Any = _ANY,
    *,
    count: int | None = None,
    **columns: Unpack[Columns],
) -> list[int]:
    """Assert the same as `assert_enqueued`, on a blocking connection."""
    row = drivers.fetch_sync(conn, "find_enqueued", _handler_name(handler), caller="assert_enqueued_sync")
    return _matching_jobs(row, _handler_name(handler), payload, count, columns)


def _check_app(app: object) -> None:
    if not isinstance(app, App):
        raise TypeError(f"app can't be a {type(app).__name__}: write a rota.App")


def _check_facts(facts: Iterable[str]) -> None:
    for name in facts:
        if name not in JOB_FACTS:
            close = get_close_matches(name, JOB_FACTS, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(JOB_FACTS))}"
            raise TypeError(f"a job has no fact {name!r}: {hint}")


def _handler_name(handler: str | HandlerFunction[Any, Any, Any]) -> str:
    name = getattr(handler, "name", handler)
    check_handler_name(name)
    return str(name)


def _matching_jobs(row: Any, handler: str, payload: Any, count: int | None, columns: Mapping[str, Any]) -> list[int]:
    check_types(count=count)
    for name, value in columns.items():
        check_column(name)
        check_types(**{name: value})
    wanted = {name: _as_json(value) for name, value in columns.items() if value is not None and name != "on_conflict"}
    if payload is not _ANY:
        wanted["payload"] = json.loads(encode_payload(payload))
    jobs = json.loads(row[0])
    matching_ids = [
        job["job_id"] for job in jobs if all(_is_match(name, job[name], value) for name, value in wanted.items())
    ]
    if len(matching_ids) == count or (count is None and matching_ids):
        return matching_ids
    how_many = "at least one" if count is None else count
    job_lines = "\n".join(f"  { ({name: job[name] for name in ('payload', *wanted)}) }" for job in jobs)
    raise AssertionError(
        f"{len(matching_ids)} live jobs of {handler!r} have {wanted or 'anything'}, wanted {how_many}; "
        + (f"there are:\n{job_lines}" if jobs else "there is none of that handler at all")
    )


def _as_json(value: Any) -> Any:
    match value:
        case datetime():
            return value.astimezone(UTC)
        case timedelta():
            return value.total_seconds()
        case _:
            return value


def _is_match(name: str, actual: Any, wanted: Any) -> bool:
    if isinstance(wanted, datetime):
        return actual is not None and datetime.fromisoformat(actual) == wanted
    if name in {"payload", "meta"}:
        return _is_contained(actual, wanted)
    return bool(actual == wanted)


def _is_contained(actual: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict) and isinstance(actual, dict):
        return all(key in actual and _is_contained(actual[key], value) for key, value in wanted.items())
    return bool(actual == wanted)
