"""A program that kills the sessions of a daemon's handlers after the daemon has ended, also after a SIGKILL.

It reads lines `+pid` and `-pid` that add and remove session leaders, and kills at the end of its input: only the daemon holds
the other end of that pipe. It imports nothing of rota, so it starts within milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

MAX_KILL_ROUNDS = 100
"""How often to search for processes left in the sessions: they may fork while they are being killed."""


def main() -> None:
    """Read until the daemon has ended, then kill the remaining sessions."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # it must outlive the daemon, and exits on its own
    leaders: set[int] = set()
    for line in sys.stdin:
        leader = int(line[1:])
        if line.startswith("+"):
            leaders.add(leader)
        else:
            leaders.discard(leader)
    for leader in leaders:
        with suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
    for _ in range(MAX_KILL_ROUNDS):
        members = [pid for pid in _processes() if _session_of(pid) in leaders] if leaders else []
        if not members:
            return
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes() -> list[int]:
    """Return the process ids of this machine; none on a system without /proc."""
    with suppress(OSError):
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return []


def _session_of(pid: int) -> int | None:
    """Return the session id of a process; None if it has ended."""
    with suppress(OSError, ValueError, IndexError):
        # The name, in parentheses, may contain spaces and parentheses.
        state, _, _, session = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:4]
        return None if state in {b"Z", b"X"} else int(session)
    return None


if __name__ == "__main__":
    main()
