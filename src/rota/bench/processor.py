"""Processor time of processes, read from /proc. Without /proc, every time is 0."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def process_cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far in seconds."""
    stat = _read_stat(pid)
    return _seconds(stat[11:13]) if stat else 0.0


def server_cpu_seconds(backend: int) -> float:
    """Return the processor time of a PostgreSQL server, given the pid of one of its backends.

    Includes backends that have ended: their parent counts them. Returns 0 if the backend is not a process of this machine.
    """
    stat = _read_stat(backend)
    if not stat:
        return 0.0
    parent = int(stat[1])
    total = 0.0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal() and (stat := _read_stat(int(process.name))):
            if int(process.name) == parent:
                total += _seconds(stat[11:15])
            elif int(stat[1]) == parent:
                total += _seconds(stat[11:13])
    return total


def _read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the third one on: state, parent, …; nothing if there is no such process."""
    with suppress(OSError):
        # Split after the second field: it is the program's name, which may contain spaces and brackets.
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return []


def _seconds(ticks: list[str]) -> float:
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
