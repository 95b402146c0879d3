"""Non-blocking standard output and standard error: a thread writes, and lines are dropped if the reader is too slow."""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Any

MAX_WAITING_CHARACTERS = 4_000_000
"""At most this many characters wait to be written to one stream."""

FLUSH_SECONDS = 2.0
"""How long the process waits at its end for unwritten text, for both streams together."""

PIECE_BYTES = 1 << 16


class LogWriter(io.TextIOBase):
    """Replaces a standard stream. `write` never blocks and may be called from any thread."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._fd: int = stream.fileno()
        self._waiting: deque[str] = deque()
        self._size = 0
        self._lock = threading.Lock()
        self._not_empty = threading.Condition(self._lock)
        self._empty = threading.Condition(self._lock)
        self._writing = False
        self.dropped = 0
        """Lines dropped because the reader is too slow, or gone."""
        threading.Thread(target=self._write_waiting, daemon=True, name=f"rota writes to {self._fd}").start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream."""
        return str(self._stream.encoding)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """The error handler for characters that the encoding lacks."""
        return "backslashreplace"

    @property
    def buffer(self) -> Any:
        """The underlying binary stream, which may block."""
        return self._stream.buffer

    def fileno(self) -> int:
        """Return the underlying file descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return bool(self._stream.isatty())

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, text: str, /) -> int:
        """Queue the text, or drop it if too much is waiting. Raises TypeError for bytes: libraries detect a text stream by that."""
        if not isinstance(text, str):
            raise TypeError(f"write() takes text, not {type(text).__name__}")
        with self._lock:
            if self._size + len(text) > MAX_WAITING_CHARACTERS:
                self.dropped += text.count("\n")
            else:
                self._waiting.append(text)
                self._size += len(text)
                self._not_empty.notify()
        return len(text)

    def finish(self, seconds: float) -> None:
        """Wait until everything is written, at most this many seconds."""
        with self._lock:
            self._empty.wait_for(lambda: not self._waiting and not self._writing, seconds)

    def _write_waiting(self) -> None:
        alive = True
        while alive:
            with self._lock:
                self._not_empty.wait_for(lambda: bool(self._waiting))
                text = "".join(self._waiting)
                self._waiting.clear()
                self._writing = True
            try:
                self._write_all(text.encode(self.encoding, "backslashreplace"))
            except (OSError, ValueError):
                # a full disk, or a closed pipe: drop these lines and try the next ones
                with self._lock:
                    self.dropped += text.count("\n")
            with self._lock:
                self._size -= len(text)
                self._writing = False
                alive = not sys.is_finalizing()
                if not self._waiting:
                    self._empty.notify_all()

    def _write_all(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data[:PIECE_BYTES]) :]
            except BlockingIOError:  # another process has set the shared pipe to non-blocking
                select.select([], [self._fd], [], 1)


_writers: list[LogWriter] = []


def install() -> None:
    """Replace standard output and standard error by LogWriters, for the rest of the process."""
    if _writers:
        return
    streams = (sys.stdout, sys.stderr)
    try:
        _writers.extend(LogWriter(stream) for stream in streams)
    except (AttributeError, OSError, ValueError):
        return  # no file descriptors: a test has replaced the streams
    for stream in streams:
        with suppress(OSError, ValueError):
            stream.flush()
    sys.stdout, sys.stderr = _writers
    atexit.register(finish)
    # A forked child has no writing thread.
    os.register_at_fork(after_in_child=lambda: _restore(streams))


def _restore(streams: tuple[Any, Any]) -> None:
    _writers.clear()
    sys.stdout, sys.stderr = streams


def finish() -> None:
    """Wait until everything logged and printed is written, at most FLUSH_SECONDS. Call it before os._exit()."""
    for writer in _writers:
        writer.finish(FLUSH_SECONDS / len(_writers))


def dropped() -> int:
    """Return how many lines of both streams were dropped since the start."""
    return sum(writer.dropped for writer in _writers)
