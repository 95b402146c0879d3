"""Add job_id, handler, queue, attempt and schedule to the log records that a handler writes.

An attempt only sets five context variables, which is cheap. structlog's `merge_contextvars` finds them by their names; it is part
of structlog's default configuration. Records of the standard library get them as attributes, for `%(job_id)s` and for formatters
that print all attributes. A root logger that the app has configured is not changed.
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
_CONTEXT_VARIABLES = {
    "job_id": _JOB_ID,
    "handler": _HANDLER,
    "queue": _QUEUE,
    "attempt": _ATTEMPT,
    "schedule": _SCHEDULE,
}

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_shared_context(handler: str, queue: str, attempt: int) -> None:
    """Add the values that many jobs share to all records of this context, and of the threads and tasks started in it."""
    _HANDLER.set(handler)
    _QUEUE.set(queue)
    _ATTEMPT.set(attempt)


def job_of_context() -> int | None:
    """Return the id of the job whose handler called this, or None outside of any handler."""
    job_id: int | None = _JOB_ID.get(None)
    return job_id


def handler_of_context() -> str | None:
    """Return the name of the handler that called this, or None outside of any handler."""
    handler: str | None = _HANDLER.get(None)
    return handler


def set_job_context(job_id: int, schedule: str | int | None) -> None:
    """Add the job's own values to all records of this context, and of the threads and tasks started in it."""
    _JOB_ID.set(job_id)
    if schedule is not None:
        _SCHEDULE.set(schedule)


class JobRecord(logging.LogRecord):
    """A record that keeps the context of its job and adds it to its attributes when it is formatted.

    Adding it earlier would break `log.info(…, extra={"queue": …})`: logging raises for names that a new record already has.
    """

    __slots__ = ("_job",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._job = {name: value for name, var in _CONTEXT_VARIABLES.items() if (value := var.get(None)) is not None}

    def getMessage(self) -> str:  # noqa: N802  the standard library's name
        """Return the message. Formatters call this first, so the job's attributes are added here."""
        for name, value in self._job.items():
            self.__dict__.setdefault(name, value)
        return super().getMessage()


def is_console(format: str) -> bool:  # noqa: A002
    """Return whether to log plain lines for a terminal instead of JSON."""
    return format == "console" or (format == "auto" and sys.stderr.isatty())


def install(*, level: str, format: str) -> logging.Handler | None:  # noqa: A002
    """Make the standard library's records carry their job. Give the root logger a handler if it has none, and return that."""
    if logging.getLogRecordFactory() is logging.LogRecord:
        logging.setLogRecordFactory(JobRecord)
    root = logging.getLogger()
    if root.handlers:
        return None
    console = is_console(format)
    render: Any = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    errors: list[Any] = [] if console else [structlog.processors.format_exc_info]
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
    if root.level == logging.WARNING:  # Python's default
        root.setLevel(LEVELS[level])
    return handler


def set_level(level: str) -> None:
    """Set the root logger's level, if install() gave it its handler."""
    root = logging.getLogger()
    if any(isinstance(handler.formatter, structlog.stdlib.ProcessorFormatter) for handler in root.handlers):
        root.setLevel(LEVELS[level])


def flush_prints_by_line() -> None:
    """Flush standard output after each line, also into a file or a pipe, where Python buffers 8 KiB."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def redirect_uncaught_errors(report: Callable[[BaseException | None], None]) -> None:
    """Pass errors that end a thread, or occur where nothing can be raised, to `report` instead of letting Python print them.

    Python would print the error's text, which may contain a payload.
    """

    def report_thread_error(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            report(args.exc_value)

    threading.excepthook = report_thread_error
    sys.unraisablehook = lambda unraisable: report(unraisable.exc_value)


@contextmanager
def installed(*, level: str, format: str) -> Iterator[None]:  # noqa: A002
    """Like install(), for one block: at its end the root logger's handler and level are restored."""
    level_before = logging.getLogger().level
    handler = install(level=level, format=format)
    try:
        yield
    finally:
        if handler is not None:
            logging.getLogger().removeHandler(handler)
            logging.getLogger().setLevel(level_before)
