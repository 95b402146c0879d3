"""What a container's first process has to do besides: reap orphans, and pass signals on."""

from __future__ import annotations

import os
import signal
import sys


def leave_init_behind() -> None:
    """Return in a child if this process is PID 1, which then only reaps orphans, passes signals on, and ends as the child does.

    A daemon that reaped orphans itself could take the exit status of a process for which one of its handlers waits.
    """
    if os.getpid() != 1 or sys.platform != "linux":
        return
    passed_on = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # before the fork, so that none is lost
    daemon = os.fork()
    if daemon == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    # At a terminal, Ctrl-C reaches the daemon by itself: it is in the same process group.
    terminal = os.isatty(0)
    status: int | None = None
    while status is None:
        number = signal.sigwait(passed_on)
        if number == signal.SIGCHLD:
            status = _reap(daemon)
        elif not (terminal and number == signal.SIGINT):
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
