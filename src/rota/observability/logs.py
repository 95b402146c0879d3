"""What log records written inside a handler carry: job_id, handler, queue, attempt, schedule.

An attempt sets five context variables, under the names that structlog's `merge_contextvars` looks for (its default configuration
has it), and nothing else: whoever logs pays. Records of the standard library get them as attributes, for `%(job_id)s` and for
formatters that print all attributes; a root logger that the app has configured is left alone.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import structlog
from structlog.contextvars import STRUCTLOG_KEY_PREFIX, merge_contextvars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_JOB_ID: ContextVar[Any] = ContextVar(STRUCTLOG_KEY_PREFIX + "job_id")
_HANDLER: ContextVar[Any] = ContextVar(STRUCTLOG_KEY_PREFIX + "handler")
_QUEUE: ContextVar[Any] = ContextVar(STRUCTLOG_KEY_PREFIX + "queue")
_ATTEMPT: ContextVar[Any] = ContextVar(STRUCTLOG_KEY_PREFIX + "attempt")
_SCHEDULE: ContextVar[Any] = ContextVar(STRUCTLOG_KEY_PREFIX + "schedule")
_ALL = {"job_id": _JOB_ID, "handler": _HANDLER, "queue": _QUEUE, "attempt": _ATTEMPT, "schedule": _SCHEDULE}

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def carry_alike(handler: str, queue: str, attempt: int) -> None:
    """Have every record of this context, and of the threads and tasks that come of it, carry what many jobs have in common."""
    _HANDLER.set(handler)
    _QUEUE.set(queue)
    _ATTEMPT.set(attempt)


def job_of_context() -> int | None:
    """Return the job in whose context the caller runs; None outside of any handler."""
    job_id: int | None = _JOB_ID.get(None)
    return job_id


def handler_of_context() -> str | None:
    """Return the handler in whose context the caller runs; None outside of any handler."""
    handler: str | None = _HANDLER.get(None)
    return handler


def carry(job_id: int, schedule: str | int | None) -> None:
    """Do the same with what is this job's alone."""
    _JOB_ID.set(job_id)
    if schedule is not None:
        _SCHEDULE.set(schedule)


class JobRecord(logging.LogRecord):
    """A record that knows in which job it was made, and has it among its attributes as soon as it is formatted.

    Not before: `log.info(…, extra={"queue": …})` raises for names that a new record has already.
    """

    __slots__ = ("_job",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._job = {name: value for name, var in _ALL.items() if (value := var.get(None)) is not None}

    def getMessage(self) -> str:  # noqa: N802  the standard library's name
        """Return the message, as every formatter asks for first."""
        for name, value in self._job.items():
            self.__dict__.setdefault(name, value)
        return super().getMessage()


def readable(format: str) -> bool:  # noqa: A002
    """Return whether lines are for a person at a terminal, and not JSON."""
    return format == "console" or (format == "auto" and sys.stderr.isatty())


def install(*, level: str, format: str) -> logging.Handler | None:  # noqa: A002
    """Have the standard library's records know their job; give the root logger a handler if it has none, and return that."""
    if logging.getLogRecordFactory() is logging.LogRecord:
        logging.setLogRecordFactory(JobRecord)
    root = logging.getLogger()
    if root.handlers:
        return None
    person = readable(format)
    render: Any = structlog.dev.ConsoleRenderer() if person else structlog.processors.JSONRenderer()
    errors: list[Any] = [] if person else [structlog.processors.format_exc_info]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                merge_contextvars,
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                *errors,
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root.addHandler(handler)
    if root.level == logging.WARNING:  # as Python leaves it
        root.setLevel(LEVELS[level])
    return handler


def set_level(level: str) -> None:
    """Have the root logger log from this level on, if its handler is ours."""
    root = logging.getLogger()
    if any(isinstance(each.formatter, structlog.stdlib.ProcessorFormatter) for each in root.handlers):
        root.setLevel(LEVELS[level])


def show_prints_at_once() -> None:
    """Have what is printed to a file or a pipe appear line by line, and not when 8 KiB have gathered or never."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def hide_stray_errors(tell: Callable[[BaseException | None], None]) -> None:
    """Have `tell` hear of errors that leave a thread or come up where nothing can be raised, instead of Python printing them.

    Python prints their text, and an error's text likes to be a payload's.
    """

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            tell(args.exc_value)

    threading.excepthook = of_thread
    sys.unraisablehook = lambda unraisable: tell(unraisable.exc_value)


@contextmanager
def installed(*, level: str, format: str) -> Iterator[None]:  # noqa: A002
    """Do the same; what the root logger was given is taken away at the end of the block."""
    before = logging.getLogger().level
    handler = install(level=level, format=format)
    try:
        yield
    finally:
        if handler is not None:
            logging.getLogger().removeHandler(handler)
            logging.getLogger().setLevel(before)
