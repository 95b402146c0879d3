"""Handlers written in Python: `async def` on the loop, `def` in a thread, either in a process of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import socket
import sys
import threading
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

from rota.errors import ConfigError
from rota.handler_exceptions import Cancel, Hold, Retry, Snooze
from rota.handlers.local_port import attempt_and_environment
from rota.handlers.pipes import PIPES_GRACE, describe_exit, send, signal_group
from rota.handlers.sessions import ending_with_daemon
from rota.supervision.loop import run_both

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable

    from rota.handlers import Handler, Step
    from rota.handlers.attempt import Attempt
    from rota.handlers.job import Job, SyncJob
    from rota.handlers.local_port import Environment

TERM_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL for a process that has to stop."""


class ChildFailed(Exception):
    """The exception that a handler raised in its own process."""

    def __init__(self, kind: str, text: str, *, permanent: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.permanent = permanent


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call must be awaited: an `async def`, or an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def on_loop(handler: Handler) -> Step:
    """Call an `async def` on the daemon's loop. An interruption raises CancelledError inside it."""
    return handler.function


def in_thread(handler: Handler) -> Step:
    """Call a plain `def` in a thread of its queue's pool. It can't be interrupted: it must check `job.stop_requested`."""
    function = handler.function

    async def step(job: Job[Any]) -> Any:
        attempt, environment = attempt_and_environment(job)
        loop = asyncio.get_running_loop()
        attempt.stop_flag = threading.Event()
        if attempt.interruption is not None:
            attempt.stop_flag.set()
        # Not cancelling the task: the next attempt could start while the thread still runs.
        attempt.on_interrupt = _do_nothing
        try:
            call = partial(
                copy_context().run, outcome_of, environment.sync_job(attempt, environment, job.payload, loop)
            )
            result, error = await loop.run_in_executor(environment.threads(attempt.claim.queue), call)
        finally:
            attempt.on_interrupt = None
        if error is not None:
            raise error
        return result

    def outcome_of(job: SyncJob[Any]) -> tuple[Any, BaseException | None]:
        # As values: a future can't carry StopIteration, so a handler with a bare next() would never end.
        try:
            return function(job), None
        except BaseException as error:  # noqa: BLE001  raised again on the loop
            return None, error

    return step


def _do_nothing() -> None:
    return


def in_process(handler: Handler) -> Step:
    """Call the handler in its own process and process group. It is stopped by SIGTERM, then SIGKILL after TERM_GRACE seconds."""

    async def step(job: Job[Any]) -> Any:
        attempt, environment = attempt_and_environment(job)
        if environment.app_reference is None:
            raise ConfigError(
                f"handler {handler.name!r} runs in a process, which imports the app by name: start with --app module:app"
            )
        order = _child_order(environment, environment.app_reference, attempt, job)
        # Sockets, not a pipe: uvloop closes the descriptor of a pipe twice, and in between it may belong to another connection.
        answers, childs_end = socket.socketpair()
        with answers:
            with childs_end:
                child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "rota.child",
                    str(childs_end.fileno()),
                    stdin=asyncio.subprocess.PIPE,
                    pass_fds=(childs_end.fileno(),),
                    start_new_session=True,
                )
            with ending_with_daemon(child.pid):
                attempt.on_interrupt = lambda: _stop(child, attempt.stop_reason)
                if attempt.interruption is not None:
                    _stop(child, attempt.stop_reason)
                try:
                    return await _run_child(child, answers, order, job)
                finally:
                    attempt.on_interrupt = None
                    signal_group(child, signal.SIGKILL)
                    await child.wait()

    return step


def _child_order(environment: Environment, app_reference: str, attempt: Attempt, job: Job[Any]) -> dict[str, Any]:
    """Return what the process needs to build the claim and run the handler."""
    claim = attempt.claim
    return {
        "app": app_reference,
        "payload": attempt.payload,
        "log": environment.log,
        "database": environment.login and environment.login.to_json(),
        "node": str(environment.node),
        "lease": attempt.lease,
        "facts": {
            "job_id": claim.job_id,
            "handler": claim.handler,
            "queue": claim.queue,
            "priority": claim.priority,
            "attempt": claim.attempt,
            "fence_token": claim.fence_token,
            "run_at": job.scheduled_for.isoformat(),
            "started_at": claim.started_at.isoformat(),
            "schedule_id": claim.schedule_id,
            "schedule": claim.schedule,
            "lease": None if claim.lease is None else claim.lease.total_seconds(),
            "idempotency_key": job.idempotency_key,
            "checkpoint": attempt.checkpoint,
            "meta": claim.meta,
        },
    }


def _stop(child: Process, reason: str | None) -> None:
    if child.stdin is not None and not child.stdin.is_closing():
        child.stdin.write(json.dumps({"stop": reason}).encode() + b"\n")
    # Not to its group: a program that the handler runs would end, and the handler would take its work for done.
    with suppress(ProcessLookupError):
        child.terminate()

    def kill() -> None:
        if child.returncode is None:
            signal_group(child, signal.SIGKILL)

    asyncio.get_running_loop().call_later(TERM_GRACE, kill)


async def _run_child(child: Process, answers: socket.socket, order: dict[str, Any], job: Job[Any]) -> Any:
    reader, writer = await asyncio.open_connection(sock=answers, limit=1 << 21)
    try:
        result, _ = await run_both(_handle_answers(child, reader, order, job), _kill_forks(child, reader))
    finally:
        writer.close()
    return result


async def _kill_forks(child: Process, reader: asyncio.StreamReader) -> None:
    """After the process has ended, kill its forks, which hold the pipe open. Don't wait for processes outside of its group."""
    await child.wait()
    signal_group(child, signal.SIGKILL)
    asyncio.get_running_loop().call_later(PIPES_GRACE, reader.feed_eof)


async def _handle_answers(child: Process, reader: asyncio.StreamReader, order: dict[str, Any], job: Job[Any]) -> Any:
    assert child.stdin is not None  # noqa: S101  asked for above
    await send(child.stdin, json.dumps(order).encode() + b"\n")
    async for line in reader:
        answer = json.loads(line)
        match answer["is"]:
            case "checkpoint":
                await _relay(child, job.save_checkpoint(answer["value"]))
            case "progress":
                await _relay(child, job.report_progress(answer["done"], answer["note"]))
            case "stale":
                attempt, environment = attempt_and_environment(job)
                environment.stale_write(attempt, answer["what"])
            case "mark":
                setattr(attempt_and_environment(job)[0], answer["mark"], answer["value"])
                await _relay(child, _no_work())
            case "returned":
                signal_group(child, signal.SIGKILL)  # threads that the handler left running would keep it alive
                return answer["result"]
            case _:
                raise _exception_of(answer)
    code = await child.wait()
    raise ChildFailed(
        "ProcessDied",
        f"the handler's process ended with {describe_exit(code)} before it reported a result",
        permanent=False,
    )


async def _no_work() -> None:
    return


async def _relay(child: Process, work: Any) -> None:
    assert child.stdin is not None  # noqa: S101
    fault = None
    try:
        await work
    except Exception as error:  # noqa: BLE001  the child's call raises it
        fault = f"{type(error).__name__}: {error}"
    await send(child.stdin, json.dumps({"fault": fault}).encode() + b"\n")


def _exception_of(answer: dict[str, Any]) -> BaseException:
    match answer["is"]:
        case "snooze":
            return Snooze.of(answer)
        case "hold":
            return Hold.of(answer)
        case "retry":
            retry = Retry.of(answer)
            retry.__cause__ = ChildFailed("Retry", answer["text"], permanent=False)
            return retry
        case "cancel":
            return Cancel(answer["text"])
        case _:
            return ChildFailed(answer["kind"], answer["text"], permanent=answer["permanent"])
