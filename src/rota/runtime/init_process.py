"""The duties of PID 1 in a container: reap orphans and forward signals."""

from __future__ import annotations

import os
import signal
import sys


def fork_if_init() -> None:
    """If this process is PID 1, return in a child. The parent reaps orphans, forwards signals, and exits as the child does.

    A daemon that reaped orphans itself could take the exit status of a process for which one of its handlers waits.
    """
    if os.getpid() != 1 or sys.platform != "linux":
        return
    forwarded = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # before the fork, so that no signal is lost
    daemon = os.fork()
    if daemon == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    # At a terminal, Ctrl-C already reaches the daemon: it is in the same process group.
    is_terminal = os.isatty(0)
    status: int | None = None
    while status is None:
        number = signal.sigwait(forwarded)
        if number == signal.SIGCHLD:
            status = _reap(daemon)
        elif not (is_terminal and number == signal.SIGINT):
            os.kill(daemon, number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def _reap(daemon: int) -> int | None:
    """Reap all children that have ended; return the status of `daemon` if it is one of them."""
    pid = -1
    while pid:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == daemon:
            return status
    return None
