"""End the sessions of handlers' processes with the daemon, also when the daemon is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, BinaryIO

from rota.handlers import session_keeper
from rota.runtime.forks import close_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Keeper:
    """Starts the process that runs session_keeper with the first session, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leaders: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: BinaryIO | None = None

    def add(self, leader: int) -> None:
        with self._lock, suppress(OSError):  # jobs run without a keeper too
            self._leaders.add(leader)
            if self._process is None or self._process.poll() is not None:
                self._start()
                self._write("".join(f"+{known}\n" for known in self._leaders))
            else:
                self._write(f"+{leader}\n")

    def remove(self, leader: int) -> None:
        with self._lock, suppress(OSError):
            self._leaders.discard(leader)
            self._write(f"-{leader}\n")

    def _start(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)  # a suspended keeper must not block the daemon
        self._pipe = os.fdopen(write_end, "wb", buffering=0)
        close_in_child(self._pipe, self._pipe)
        try:
            self._process = subprocess.Popen(  # noqa: S603  our own program
                [sys.executable, "-I", "-S", session_keeper.__file__],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def _write(self, lines: str) -> None:
        if self._pipe is not None:
            self._pipe.write(lines.encode())


_KEEPER = _Keeper()


@contextmanager
def ending_with_daemon(leader: int) -> Iterator[None]:
    """Have all processes of the session of `leader` killed if this process ends inside the block."""
    _KEEPER.add(leader)
    try:
        yield
    finally:
        _KEEPER.remove(leader)
