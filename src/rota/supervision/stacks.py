"""Where threads and tasks are, as file, line and function: no values, which may be a payload's."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

from rota.supervision.tasks import OwnedTask

if TYPE_CHECKING:
    from types import FrameType

MAX_FRAMES = 12
"""Most frames of each stack: the innermost."""

MAX_TASKS = 200


def of_threads() -> dict[str, list[str]]:
    """Return the stack of every thread, innermost frame last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} {ident}": of_frame(frame)
        for ident, frame in sys._current_frames().items()  # noqa: SLF001
    }


def of_frame(frame: FrameType | None) -> list[str]:
    """Return the stack that leads to a frame, which comes last."""
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(_place(frame))
        frame = frame.f_back
    return found[::-1]


def of_tasks(loop: asyncio.AbstractEventLoop) -> dict[str, list[str]]:
    """Return where the tasks of a loop wait, by name; of many tasks, MAX_TASKS. May be called on any thread."""
    found: dict[str, list[str]] = {}
    for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())[:MAX_TASKS]:
        job = f" job {task.job_id}" if isinstance(task, OwnedTask) and task.job_id is not None else ""
        found[f"{task.get_name()}{job}"] = _waits_at(task.get_coro())
    return found


def _waits_at(work: Any) -> list[str]:
    found: list[str] = []
    while (frame := getattr(work, "cr_frame", None)) is not None and len(found) < MAX_FRAMES:
        found.append(_place(frame))
        work = work.cr_await
    return found


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
