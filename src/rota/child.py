"""The process that runs one attempt of a handler with runs_in="process". Only `in_process` starts it.

From standard input it reads the attempt to run, then the daemon's replies to its requests, and an order to stop. It writes JSON
lines to the descriptor given as its argument, because standard output belongs to the handler.
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
from contextlib import asynccontextmanager, closing
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rota.app import find_app
from rota.db import blocking, server
from rota.db.connecting import close_connection, open_connection
from rota.domain.job import Claim, NodeId, Suspects
from rota.domain.payload import encode_result
from rota.errors import StaleToken
from rota.handler_exceptions import Cancel, Hold, Retry, Snooze
from rota.handlers.attempt import STOP_OUTCOMES, Attempt
from rota.handlers.database_port import NO_DATABASE, AsyncpgSession, DatabasePort, PsycopgSession, fetch_blocking
from rota.handlers.failure import failure_of, retry_error_text
from rota.handlers.job import Job, Mark, SyncJob
from rota.handlers.python import is_async
from rota.observability import logs
from rota.runtime.clock import boottime
from rota.runtime.shutdown import reset_signals_in_forks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rota.domain.outcome import Outcome, StopReason


class DaemonPipe:
    """The connection to the daemon. The process sends one request at a time; an order to stop may arrive at any time."""

    def __init__(self, orders: int, answers: Any) -> None:
        self._orders = orders
        self._unread = b""
        self._answers = answers
        self._replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._attempt: Attempt | None = None
        self._interruption: Outcome | None = None
        self._stop_flag = threading.Event()

    def attach(self, attempt: Attempt) -> None:
        """Let orders to stop, also an earlier one, interrupt this attempt; read orders from now on."""
        self._attempt = attempt
        attempt.stop_flag = self._stop_flag
        attempt.interruption = self._interruption
        threading.Thread(target=self._listen, daemon=True, name="rota orders").start()

    def interrupt(self, reason: StopReason | None) -> None:
        """Order the handler to stop. SIGTERM carries no reason: it counts as a drain unless the daemon gives a reason."""
        if reason is not None or self._interruption is None:
            self._interruption = STOP_OUTCOMES[reason or "drain"]
            if self._attempt is not None:
                self._attempt.interruption = self._interruption
        self._stop_flag.set()

    def _listen(self) -> None:
        while line := self.read():
            message = json.loads(line)
            if "stop" in message:
                self.interrupt(message["stop"])
            else:
                self._replies.put(message)

    def read(self) -> bytes:
        """Read the next line; empty at the end."""
        # os.read, not a file object: a thread that waits in a file object holds its lock, and a forked process inherits it locked.
        pieces = [self._unread]
        while b"\n" not in pieces[-1]:
            if not (piece := os.read(self._orders, 1 << 16)):
                return b""
            pieces.append(piece)
        line, _, self._unread = b"".join(pieces).partition(b"\n")
        return line

    def send(self, answer: dict[str, Any]) -> None:
        """Write one line to the daemon."""
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def send_and_wait(self, request: dict[str, Any]) -> None:
        """Send a request to the daemon, and wait for its answer. Raises the error that the daemon reports."""
        self.send(request)
        fault = self._replies.get()["fault"]
        if fault is None:
            return
        kind, _, text = fault.partition(": ")
        raise StaleToken(text) if kind == "StaleToken" else RuntimeError(fault)


class PipePort(DatabasePort):
    """The port of an `async def` handler in this process. Its requests to the daemon block the loop for a moment."""

    installation_id = ""  # the claim carries its idempotency key
    state = None

    def __init__(self, pipe: DaemonPipe, login: blocking.Login | None, node: NodeId) -> None:
        self._pipe = pipe
        self._login = login
        self.node = node

    def _require_login(self) -> blocking.Login:
        if self._login is None:
            raise RuntimeError(NO_DATABASE)
        return self._login

    @asynccontextmanager
    async def transaction(self, attempt: Attempt, *, completes: bool) -> AsyncIterator[Any]:
        """Run a transaction on an asyncpg connection of its own."""
        login = self._require_login()
        conn = await open_connection(
            login.url,
            accept=lambda conn: server.check_server(conn, login.history),
            server_settings=dict(login.settings),
            statement_cache_size=0 if login.pooled else 100,
        )
        try:
            async with self.run_transaction(AsyncpgSession(conn), attempt, completes=completes):
                yield conn
        finally:
            await close_connection(conn)

    async def save_checkpoint(self, attempt: Attempt, text: str, conn: Any) -> None:
        """Write the checkpoint on `conn`, or have the daemon write it. Raises StaleToken if the lease was lost."""
        if conn is None:
            self._pipe.send_and_wait({"is": "checkpoint", "value": json.loads(text)})
        else:
            await super().save_checkpoint(attempt, text, conn)

    async def report_progress(self, attempt: Attempt, done: float, note: str | None) -> None:
        """Have the daemon write the progress. Raises StaleToken if the lease was lost."""
        del attempt
        self._pipe.send_and_wait({"is": "progress", "done": done, "note": note})

    def stale_token(self, attempt: Attempt, what: str) -> StaleToken:
        """Have the daemon count the refused write, and return its error."""
        self._pipe.send({"is": "stale", "what": what})
        return super().stale_token(attempt, what)

    async def mark(self, attempt: Attempt, mark: Mark, *, value: bool = True) -> None:
        """Set or remove a mark of the attempt, first in the daemon, whose heartbeat reads the marks."""
        self._pipe.send_and_wait({"is": "mark", "mark": mark, "value": value})
        await super().mark(attempt, mark, value=value)

    async def was_committed(self, attempt: Attempt) -> bool:
        """Return False: the daemon's settlement is fenced, and asks the ledger."""
        del attempt
        return False


class BlockingPipePort(PipePort):
    """The port of a plain `def` handler in this process."""

    fetch = staticmethod(fetch_blocking)

    @asynccontextmanager
    async def transaction(self, attempt: Attempt, *, completes: bool) -> AsyncIterator[Any]:
        """Run a transaction on a psycopg connection of its own."""
        with closing(blocking.connect(self._require_login())) as conn:
            async with self.run_transaction(PsycopgSession(conn), attempt, completes=completes):
                yield conn


def _attempt(order: dict[str, Any]) -> Attempt:
    """Return the attempt that the daemon's order describes."""
    facts = dict(order["facts"])
    for name in ("run_at", "started_at"):
        facts[name] = datetime.fromisoformat(facts[name])
    if facts["lease"] is not None:
        facts["lease"] = timedelta(seconds=facts["lease"])
    claim = Claim(**facts, payload=order["payload"], timeout=None)
    return Attempt(claim, lease=order["lease"], claim_sent_at=boottime(), suspect=Suspects.NONE)


def main() -> None:
    """Run the attempt that standard input describes, and report its result."""
    # Die with the daemon: after a SIGKILL of the daemon, this process would run beside the job's next attempt.
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    orders = os.dup(0)
    with open(os.devnull, "rb") as dev_null:  # noqa: PTH123  a descriptor is needed
        os.dup2(dev_null.fileno(), 0)  # the handler and its forks must not read or close our orders
    pipe = DaemonPipe(orders, os.fdopen(int(sys.argv[1]), "w", encoding="utf-8"))
    signal.signal(signal.SIGTERM, lambda *_: pipe.interrupt(None))
    reset_signals_in_forks()
    order = json.loads(pipe.read())
    attempt = _attempt(order)
    pipe.attach(attempt)
    claim = attempt.claim
    handler = find_app(order["app"]).handlers[claim.handler]
    logs.install(**order["log"])
    logs.redirect_uncaught_errors(_log_stray_error)
    logs.flush_prints_by_line()
    logs.set_shared_context(claim.handler, claim.queue, claim.attempt)
    logs.set_job_context(claim.job_id, claim.schedule)
    login = None if order["database"] is None else blocking.Login.from_json(order["database"])
    node = NodeId(UUID(order["node"]))
    function, payload = handler.function, handler.codec.decode(attempt.payload)
    try:
        if is_async(function):
            result = asyncio.run(function(Job(attempt, PipePort(pipe, login, node), payload)))
        else:
            result = function(SyncJob(attempt, BlockingPipePort(pipe, login, node), payload))
        text = encode_result(result)
        pipe.send({"is": "returned", "result": None if text is None else json.loads(text)})
    except Snooze as snooze:
        pipe.send({"is": "snooze", **snooze.as_answer()})
    except Hold as hold:
        pipe.send({"is": "hold", **hold.as_answer()})
    except Retry as retry:
        pipe.send({"is": "retry", "text": retry_error_text(retry, attempt), **retry.as_answer()})
    except Cancel as cancel:
        pipe.send({"is": "cancel", "text": cancel.reason})
    except BaseException as error:  # noqa: BLE001  a handler may also raise CancelledError
        failed = failure_of(error, attempt, handler.permanent)
        pipe.send({"is": "raised", "kind": failed.kind, "text": failed.text, "permanent": failed.permanent})


def _log_stray_error(error: BaseException | None) -> None:
    logging.getLogger("rota").error(
        "an error in a task or thread that the handler left running: %s", type(error).__name__
    )


if __name__ == "__main__":
    main()
