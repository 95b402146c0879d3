"""Which processes live in a data folder: what its server wrote down, and what the system says of that."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def pid_file(data: Path) -> list[str]:
    """Return the lines of `postmaster.pid`: the first is its server's pid, the fourth the port, the fifth the socket's folder."""
    with suppress(FileNotFoundError):
        return (data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def postmaster(data: Path) -> int | None:
    """Return the server that lives in this folder, whoever started it."""
    lines = pid_file(data)
    pid = int(lines[0]) if lines and lines[0].isdigit() else None
    return pid if pid and works_in(data, pid) else None


def works_in(data: Path, pid: int) -> bool:
    """Return whether this process is a server of this folder."""
    # Without this a pid from before a crash or a reboot, long since somebody else's, would count as our server.
    if sys.platform != "linux":
        return lives(pid)
    with suppress(OSError):
        return Path(f"/proc/{pid}/cwd").samefile(data)
    return False


def orphans(data: Path) -> list[int]:
    """Return what a server that was killed has left behind in this folder."""
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in processes if works_in(data, pid) and _command_of(pid) == "postgres"]


def lives(pid: int) -> bool:
    """Return whether there is such a process, whoever's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def parent_of(pid: int) -> int | None:
    """Return who has started it, or adopted it since; Linux only."""
    with suppress(OSError):
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    return None


def _command_of(pid: int) -> str | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return None
