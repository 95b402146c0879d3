"""Stacks of threads and tasks, as file, line and function. They hold no values, which could come from a payload."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

from rota.supervision.tasks import ProtectedTask

if TYPE_CHECKING:
    from types import FrameType

MAX_FRAMES = 12
"""Only this many innermost frames of each stack are returned."""

MAX_TASKS = 200


def thread_stacks() -> dict[str, list[str]]:
    """Return the stack of every thread, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} {ident}": frame_stack(frame)
        for ident, frame in sys._current_frames().items()  # noqa: SLF001
    }


def frame_stack(frame: FrameType | None) -> list[str]:
    """Return the stack that leads to a frame, innermost frame last."""
    stack: list[str] = []
    while frame is not None and len(stack) < MAX_FRAMES:
        stack.append(_format_frame(frame))
        frame = frame.f_back
    return stack[::-1]


def task_stacks(loop: asyncio.AbstractEventLoop) -> dict[str, list[str]]:
    """Return task name -> the stack at which it waits, for at most MAX_TASKS tasks of the loop. Callable from any thread."""
    stacks: dict[str, list[str]] = {}
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())[:MAX_TASKS]:
        job = f" job {task.job_id}" if isinstance(task, ProtectedTask) and task.job_id is not None else ""
        stacks[f"{task.get_name()}{job}"] = _coroutine_stack(task.get_coro())
    return stacks


def _coroutine_stack(coroutine: Any) -> list[str]:
    stack: list[str] = []
    while (frame := getattr(coroutine, "cr_frame", None)) is not None and len(stack) < MAX_FRAMES:
        stack.append(_format_frame(frame))
        coroutine = coroutine.cr_await
    return stack


def _format_frame(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
