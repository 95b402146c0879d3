"""The process of one attempt of a handler that runs in a process of its own. Started by `in_process`, by nobody else.

Reads one order from standard input, then the answers to what it asks, and the order to stop. Writes one line of JSON per answer
to the descriptor named in its arguments, so that whatever the handler prints goes where the daemon's output goes.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import queue
import signal
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from datetime import datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rota.app import find_app
from rota.db import blocking, drivers, server
from rota.db.connecting import close_connection, open_connection
from rota.domain.payload import encode, encode_result
from rota.domain.validation import check_progress, check_types
from rota.errors import Refused, StaleToken
from rota.handler_exceptions import Cancel, Retry, Snooze
from rota.handlers.failure import describe, why_again
from rota.handlers.job import KEEP, NO_DATABASE, completes_with, refuse_after_the_last, stale_token
from rota.handlers.python import is_async
from rota.observability import logs
from rota.runtime.shutdown import reset_signals_in_forks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from datetime import timedelta


class Line:
    """The line to the daemon: one question at a time, and the order to stop in between."""

    def __init__(self, orders: int, answers: Any) -> None:
        self._orders = orders
        self._unread = b""
        self._answers = answers
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.stop_reason: str | None = None

    def listen(self) -> None:
        """Read what the daemon says, for as long as it lives."""
        while line := self.read():
            said = json.loads(line)
            if "stop" in said:
                self.stop_reason = said["stop"]
                self.stop.set()
            else:
                self._replies.put(said)

    def read(self) -> bytes:
        """Read the next line; empty at the end."""
        # Not by a file object: a thread that waits in one holds its lock, which whoever forks inherits and never gets.
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            if not (piece := os.read(self._orders, 1 << 16)):
                return b""
            pieces.append(piece)
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return line

    def say(self, answer: dict[str, Any]) -> None:
        """Write one line to the daemon."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def ask(self, question: dict[str, Any]) -> None:
        """Have the daemon do something, and wait until it is done."""
        self.say(question)
        fault = self._replies.get()["fault"]
        if fault is None:
            return
        kind, _, text = fault.partition(": ")
        raise StaleToken(text) if kind == "StaleToken" else RuntimeError(fault)


class ChildFacts:
    """The facts of the attempt, with the names of `Job` and `SyncJob`."""

    job_id: int
    fence_token: int
    _node: str
    _idling: str | None
    checkpoint: Any

    def __init__(self, facts: dict[str, Any], payload: Any, line: Line, login: blocking.Login | None) -> None:
        self.__dict__.update(facts)
        self.scheduled_for = datetime.fromisoformat(facts["scheduled_for"])
        self.payload = payload
        self.state = None
        self._line = line
        self._login = login
        self._transaction_used = self._committed = False

    @property
    def stop_requested(self) -> bool:
        """True once this process was told to stop."""
        return self._line.stop.is_set()

    @property
    def stop_reason(self) -> str | None:
        """'cancel', 'drain', 'timeout', 'lease_lost', or None while nobody wants it to stop."""
        return self._line.stop_reason or ("drain" if self._line.stop.is_set() else None)

    def _begin(self, *, completes: bool) -> blocking.Login:
        if self._login is None:
            raise RuntimeError(NO_DATABASE)
        refuse_after_the_last(completes=completes, used=self._transaction_used, committed=self._committed)
        self._transaction_used = self._transaction_used or completes
        return self._login

    def _committing(self, *, committing: bool) -> None:
        self._line.ask({"is": "committing", "committing": committing})

    def _has_committed(self) -> None:
        self._committed = True
        self._line.ask({"is": "committed"})

    @property
    def _claim(self) -> tuple[UUID, int, int]:
        return UUID(self._node), self.job_id, self.fence_token

    def _translated(self, error: Refused, what: str) -> Exception:
        return self._stale(what) if error.sqlstate == drivers.STALE else error

    def _stale(self, what: str) -> StaleToken:
        self._line.say({"is": "stale", "what": what})
        return stale_token(self.job_id, self.fence_token, what)


class ChildSyncJob(ChildFacts):
    """The attempt, as a plain `def` sees it."""

    def save_checkpoint(self, value: Any, conn: Any = None) -> None:
        """Keep a JSON value for the next attempt; on `conn`, together with your own transaction."""
        text = encode(value, what="checkpoint")
        if conn is None:
            self._line.ask({"is": "checkpoint", "value": value})
        elif drivers.fetch_sync(conn, "save_checkpoint", *self._claim, text, caller="job.save_checkpoint") is None:
            raise self._stale("checkpoint")
        self.checkpoint = value

    def report_progress(self, done: float, note: str | None = None) -> None:
        """Show how far it has come."""
        check_progress(done, note)
        self._line.ask({"is": "progress", "done": done, "note": note})

    def wait_for_stop(self, timeout: timedelta) -> bool:
        """Sleep for `timeout`, or less when this attempt should end; return whether it should."""
        check_types(timeout=timeout)
        return self._line.stop.wait(timeout.total_seconds())

    @contextmanager
    def transaction(self, *, checkpoint: Any = KEEP) -> Iterator[Any]:
        """Run a transaction on a psycopg connection, in which the effect commits together with this job's completion, or with
        the checkpoint that is given.
        """
        completes = completes_with(checkpoint)
        conn = blocking.connect(self._begin(completes=completes))
        try:
            with conn.transaction():
                if self._idling is not None:
                    drivers.fetch_sync(conn, "limit_idling", self._idling, caller="job.transaction")
                yield conn
                if completes:
                    self._complete(conn, None)
                    self._committing(committing=True)
                else:
                    self.save_checkpoint(checkpoint, conn)
        except BaseException:
            self._committing(committing=False)
            raise
        finally:
            conn.close()
        if completes:
            self._has_committed()

    def complete(self, conn: Any, result: Any = None) -> None:
        """Settle this job as succeeded inside your open transaction."""
        self._complete(conn, None if result is None else encode(result, what="result"))
        self._line.say({"is": "completing"})

    def guard(self, conn: Any, resource: str) -> None:
        """Order effects on `resource` by fence token, in your open transaction."""
        try:
            drivers.fetch_sync(conn, "guard_resource", resource, self.fence_token, caller="job.guard")
        except Refused as error:
            raise self._translated(error, "guard") from None

    def _complete(self, conn: Any, result: str | None) -> None:
        try:
            drivers.fetch_sync(conn, "complete_job", self.job_id, self.fence_token, result, caller="job.complete")
        except Refused as error:
            raise self._translated(error, "complete") from None


class ChildJob(ChildFacts):
    """The attempt, as an `async def` sees it. What it asks of the daemon blocks this process's loop for a moment."""

    async def save_checkpoint(self, value: Any, conn: Any = None) -> None:
        """Keep a JSON value for the next attempt; on `conn`, together with your own transaction."""
        text = encode(value, what="checkpoint")
        if conn is None:
            self._line.ask({"is": "checkpoint", "value": value})
        elif await drivers.fetch(conn, "save_checkpoint", *self._claim, text, caller="job.save_checkpoint") is None:
            raise self._stale("checkpoint")
        self.checkpoint = value

    async def report_progress(self, done: float, note: str | None = None) -> None:
        """Show how far it has come."""
        check_progress(done, note)
        self._line.ask({"is": "progress", "done": done, "note": note})

    @asynccontextmanager
    async def transaction(self, *, checkpoint: Any = KEEP) -> AsyncIterator[Any]:
        """Run a transaction on an asyncpg connection, in which the effect commits together with this job's completion, or with
        the checkpoint that is given.
        """
        completes = completes_with(checkpoint)
        login = self._begin(completes=completes)
        conn = await open_connection(
            login.url,
            accept=lambda conn: server.check_server(conn, login.history),
            server_settings=dict(login.settings),
            statement_cache_size=0 if login.pooled else 100,
        )
        try:
            async with conn.transaction(isolation="read_committed"):
                if self._idling is not None:
                    await drivers.fetch(conn, "limit_idling", self._idling, caller="job.transaction")
                yield conn
                if completes:
                    await self._complete(conn, None)
                    self._committing(committing=True)
                else:
                    await self.save_checkpoint(checkpoint, conn)
        except BaseException:
            self._committing(committing=False)
            raise
        finally:
            await close_connection(conn)
        if completes:
            self._has_committed()

    async def complete(self, conn: Any, result: Any = None) -> None:
        """Settle this job as succeeded inside your open transaction."""
        await self._complete(conn, None if result is None else encode(result, what="result"))
        self._line.say({"is": "completing"})

    async def guard(self, conn: Any, resource: str) -> None:
        """Order effects on `resource` by fence token, in your open transaction."""
        try:
            await drivers.fetch(conn, "guard_resource", resource, self.fence_token, caller="job.guard")
        except Refused as error:
            raise self._translated(error, "guard") from None

    async def _complete(self, conn: Any, result: str | None) -> None:
        try:
            await drivers.fetch(conn, "complete_job", self.job_id, self.fence_token, result, caller="job.complete")
        except Refused as error:
            raise self._translated(error, "complete") from None


def main() -> None:
    """Run the one attempt that standard input describes, and say how it went."""
    # Without it, a daemon killed by -9 leaves this process running beside the job's next attempt.
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    orders = os.dup(0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123  a descriptor is what is wanted
        os.dup2(nothing.fileno(), 0)  # what the handler reads, or forks and closes, are not our orders
    line = Line(orders, os.fdopen(int(sys.argv[1]), "w", encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda *_: line.stop.set())
    reset_signals_in_forks()
    order = json.loads(line.read())
    threading.Thread(target=line.listen, daemon=True, name="rota orders").start()
    handler = find_app(order["app"]).handlers[order["handler"]]
    facts = order["facts"]
    logs.install(**order["log"])
    logs.redirect_uncaught_errors(_tell_stray)
    logs.flush_prints_by_line()
    logs.set_shared_context(facts["handler"], facts["queue"], facts["attempt"])
    logs.set_job_context(facts["job_id"], facts["schedule"])
    login = None if order["database"] is None else blocking.Login.from_json(order["database"])
    function, payload = handler.function, handler.codec.decode(order["payload"])
    claim = SimpleNamespace(payload=order["payload"])
    try:
        if is_async(function):
            result = asyncio.run(function(ChildJob(facts, payload, line, login)))
        else:
            result = function(ChildSyncJob(facts, payload, line, login))
        text = encode_result(result)
        line.say({"is": "returned", "result": None if text is None else json.loads(text)})
    except Snooze as wish:
        line.say({"is": "snooze", **wish.as_answer()})
    except Retry as wish:
        line.say({"is": "retry", "text": why_again(wish, claim), **wish.as_answer()})
    except Cancel as cancel:
        line.say({"is": "cancel", "text": cancel.reason})
    except BaseException as error:  # noqa: BLE001  also CancelledError and GeneratorExit: the handler raised it
        failed = describe(error, claim, handler.permanent)
        line.say({"is": "raised", "kind": failed.kind, "text": failed.text, "permanent": failed.permanent})


def _tell_stray(error: BaseException | None) -> None:
    logging.getLogger("rota").error("an error in something that the handler has left alone: %s", type(error).__name__)


if __name__ == "__main__":
    main()
