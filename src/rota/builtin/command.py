"""Run commands of the configuration as jobs, with the payload on their standard input."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rota.domain.job import instant
from rota.domain.payload import storable_text
from rota.handler_exceptions import Permanent
from rota.handlers.job import Job  # noqa: TC001  the codec reads the annotations at run time
from rota.handlers.local_port import attempt_and_environment
from rota.handlers.pipes import PIPES_GRACE, describe_exit, send, signal_group
from rota.handlers.sessions import ending_with_daemon

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import Callable, Coroutine

    from rota.config import Command

MAX_OUTPUT_BYTES = 4000
"""The most bytes kept of a command's output (in the result) and of its errors (in the failure)."""

_PASSED_VARIABLES = ("PATH", "HOME", "LANG", "TZ")

# Die with the daemon: after a SIGKILL, the command would run beside the job's next attempt. The setting survives exec.
_DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "try: os.execvp(sys.argv[2], sys.argv[2:])\n"
    "except OSError as error: sys.exit(f'{sys.argv[2]}: {error.strerror}' if not error.filename else str(error))\n"
)


class CommandFailed(Exception):
    """The command ended with a nonzero exit code, or by a signal."""


def run_command(settings: Command) -> Callable[[Job[Any]], Coroutine[Any, Any, dict[str, Any]]]:
    """Return the handler of one command. It stops the command's process group by SIGTERM, a grace period, and SIGKILL."""

    async def command(job: Job[Any]) -> dict[str, Any]:
        attempt, _ = attempt_and_environment(job)
        process = await asyncio.create_subprocess_exec(
            *_argv(settings.argv),
            cwd=settings.cwd,
            env=_environment(settings, job),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        with ending_with_daemon(process.pid):
            try:
                output, errors, code = await _exchange(process, attempt.payload.encode())
            except asyncio.CancelledError:
                signal_group(process, signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(settings.grace.total_seconds()):
                        await process.wait()
                raise
            finally:
                # Kill the rest of its group, too: the next attempt must not run beside it.
                signal_group(process, signal.SIGKILL)
                await process.wait()
        if code:
            error_text = storable_text(errors.decode("utf-8", "backslashreplace"), MAX_OUTPUT_BYTES).strip()
            failure = f"{settings.argv[0]} ended with {describe_exit(code)}" + (f": {error_text}" if error_text else "")
            raise Permanent(failure) if code in settings.permanent else CommandFailed(failure)
        return {"exit_code": 0, "output": storable_text(output.decode("utf-8", "backslashreplace"), MAX_OUTPUT_BYTES)}

    return command


async def _exchange(process: Process, payload: bytes) -> tuple[bytes, bytes, int]:
    assert process.stdin is not None  # noqa: S101  asked for above
    assert process.stdout is not None  # noqa: S101
    assert process.stderr is not None  # noqa: S101
    output, errors = bytearray(), bytearray()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_feed(process.stdin, payload)),
            group.create_task(_read_tail(process.stdout, output)),
            group.create_task(_read_tail(process.stderr, errors)),
        ]
        code = await process.wait()
        # Kill the rest of its group. Processes that left the group may hold the pipes open: don't wait for them.
        signal_group(process, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(PIPES_GRACE):
                for task in tasks:
                    await task
        for task in tasks:
            task.cancel()
    return bytes(output), bytes(errors), code


async def _feed(stdin: asyncio.StreamWriter, payload: bytes) -> None:
    await send(stdin, payload)  # the command need not read it
    # Not wait_closed(): when it is cancelled, Python up to 3.11 raises InvalidStateError in the loop as the pipe closes.
    stdin.close()


async def _read_tail(stream: asyncio.StreamReader, tail: bytearray) -> None:
    """Read to the end, and keep the last MAX_OUTPUT_BYTES."""
    while chunk := await stream.read(1 << 16):
        tail += chunk
        del tail[:-MAX_OUTPUT_BYTES]


def _argv(argv: list[str]) -> list[str]:
    if sys.platform != "linux":
        return argv
    return [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *argv]


def _environment(settings: Command, job: Job[Any]) -> dict[str, str]:
    passed = {name: os.environ[name] for name in (*_PASSED_VARIABLES, *settings.pass_env) if name in os.environ}
    return (
        passed
        | settings.env
        | {
            "ROTA_JOB_ID": str(job.job_id),
            "ROTA_ATTEMPT": str(job.attempt),
            "ROTA_FENCE_TOKEN": str(job.fence_token),
            "ROTA_IDEMPOTENCY_KEY": job.idempotency_key,
            "ROTA_SCHEDULED_FOR": instant(job.scheduled_for),
        }
    )
