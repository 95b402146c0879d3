"""Handlers written in Python: `async def` on the loop, `def` in a thread, either in a process of its own."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from rota.errors import ConfigError, InvalidPayload
from rota.job import Job, SyncJob
from rota.signals import Cancel, Retry, Snooze

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable

    from rota.attempt import Attempt
    from rota.handlers import Call
    from rota.job import Environment

    Decode = Callable[[str], Any]

TERM_GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL for a process that has to stop."""


class ChildFailed(Exception):
    """What a handler raised in its own process."""

    def __init__(self, kind: str, text: str, *, permanent: bool) -> None:
        super().__init__(text)
        self.kind = kind
        self.permanent = permanent


def decoder(function: Callable[..., Any]) -> Decode:
    """Return what turns payload text into the type T of the handler's `job: Job[T]`; without one, into plain JSON values."""
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ConfigError(
            f"the annotations of handler {function.__qualname__} can't be resolved ({error}): "
            "import the payload's type at run time, not under TYPE_CHECKING"
        ) from error
    parameters = list(inspect.signature(function).parameters)
    hint = hints.get(parameters[0]) if parameters else None
    if get_origin(hint) is None or not get_args(hint) or get_args(hint)[0] is Any:
        return _plain
    adapter: TypeAdapter[Any] = TypeAdapter(get_args(hint)[0])

    def decode(text: str) -> Any:
        try:
            return adapter.validate_json(text)
        except ValidationError as error:
            # Its own text shows the input; places and rules are enough, and can be logged.
            faults = "; ".join(
                f"{'.'.join(map(str, f['loc'])) or '$'}: {f['type']}" for f in error.errors(include_input=False)[:10]
            )
            raise InvalidPayload(f"the payload is no {adapter}: {faults}") from None
        except Exception as error:  # noqa: BLE001  a type with a check of its own, which may raise anything
            raise InvalidPayload(f"the payload is no {adapter}: {type(error).__name__}") from None

    return decode


def _plain(text: str) -> Any:
    if text == "{}":
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"the payload doesn't decode: {type(error).__name__}") from None


def on_loop(function: Callable[[Job[Any]], Any], decode: Decode) -> Call:
    """Call an `async def` on the daemon's loop. An interruption is a CancelledError inside it."""

    async def call(attempt: Attempt, environment: Environment) -> Any:
        payload = decode(attempt.claim.payload)
        attempt.began = True
        return await function(Job(attempt, environment, payload))

    return call


def in_thread(function: Callable[[SyncJob[Any]], Any], decode: Decode) -> Call:
    """Call a plain `def` in a thread of its queue's pool. It can't be cut: it looks at `job.stop_requested` itself."""

    async def call(attempt: Attempt, environment: Environment) -> Any:
        payload = decode(attempt.claim.payload)
        loop = asyncio.get_running_loop()
        attempt.stop_flag = threading.Event()
        job = SyncJob(attempt, environment, payload, loop)
        # Without it, the task would be cancelled at an interruption, and a next attempt could begin while the thread still runs.
        attempt.on_interrupt = _leave_alone
        attempt.began = True
        result, error = await loop.run_in_executor(environment.threads(attempt.claim.queue), outcome_of, job)
        if error is not None:
            raise error
        return result

    def outcome_of(job: SyncJob[Any]) -> tuple[Any, BaseException | None]:
        # As values: a future can't carry StopIteration, so that a handler with a bare next() would never come to its end.
        try:
            return function(job), None
        except BaseException as error:  # noqa: BLE001  raised again on the loop
            return None, error

    return call


def _leave_alone() -> None:
    return


def in_process(name: str, decode: Decode) -> Call:
    """Call the handler in a process of its own, which is ended alone: TERM, a grace, KILL, to its whole group."""

    async def call(attempt: Attempt, environment: Environment) -> Any:
        decode(attempt.claim.payload)  # here, so that what doesn't decode is bad_payload as everywhere
        if environment.app_reference is None:
            raise ConfigError(
                "runs_in='process' needs an app that can be imported by name: start with --app module:app"
            )
        claim = attempt.claim
        facts = SyncJob(attempt, environment, None, asyncio.get_running_loop())
        order = {
            "app": environment.app_reference,
            "handler": name,
            "payload": claim.payload,
            "facts": {
                "job_id": facts.job_id,
                "handler": name,
                "queue": facts.queue,
                "attempt": facts.attempt,
                "fence_token": facts.fence_token,
                "scheduled_for": facts.scheduled_for.isoformat(),
                "idempotency_key": facts.idempotency_key,
                "schedule_id": facts.schedule_id,
                "checkpoint": facts.checkpoint,
                "meta": facts.meta,
            },
        }
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb", buffering=0) as answers:
            try:
                child = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "rota.handlers.child",
                    str(write_end),
                    stdin=asyncio.subprocess.PIPE,
                    pass_fds=(write_end,),
                    start_new_session=True,
                )
            finally:
                os.close(write_end)
            attempt.on_interrupt = lambda: _end(child)
            attempt.began = True
            if attempt.interruption is not None:
                _end(child)
            try:
                return await _converse(child, answers, order, Job(attempt, environment, None))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                await child.wait()

    return call


def _end(child: Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)

    def kill() -> None:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)

    asyncio.get_running_loop().call_later(TERM_GRACE, kill)


async def _converse(child: Process, answers: Any, order: dict[str, Any], job: Job[Any]) -> Any:
    reader = asyncio.StreamReader(limit=1 << 21)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), answers)
    assert child.stdin is not None  # noqa: S101  asked for above
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # a child that died at once is told of by its exit code
            child.stdin.write(json.dumps(order).encode() + b"\n")
            await child.stdin.drain()
        async for line in reader:
            answer = json.loads(line)
            match answer["is"]:
                case "checkpoint":
                    await _relay(child, job.save_checkpoint(answer["value"]))
                case "progress":
                    await _relay(child, job.report_progress(answer["done"], answer["note"]))
                case "returned":
                    return answer["result"]
                case _:
                    raise _raised(answer)
    finally:
        transport.close()
    code = await child.wait()
    raise ChildFailed(
        "ProcessDied", f"the handler's process ended with {_how(code)} before it said how it went", permanent=False
    )


async def _relay(child: Process, work: Any) -> None:
    assert child.stdin is not None  # noqa: S101
    fault = None
    try:
        await work
    except Exception as error:  # noqa: BLE001  whatever it is, the child's call raises it
        fault = f"{type(error).__name__}: {error}"
    child.stdin.write(json.dumps({"fault": fault}).encode() + b"\n")
    await child.stdin.drain()


def _raised(answer: dict[str, Any]) -> BaseException:
    match answer["is"]:
        case "snooze":
            return Snooze.of(answer)
        case "retry":
            return Retry.of(answer)
        case "cancel":
            return Cancel(answer["text"])
        case _:
            return ChildFailed(answer["kind"], answer["text"], permanent=answer["permanent"])


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
