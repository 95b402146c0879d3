"""Find the processes of a data folder's server, from its `postmaster.pid` and from /proc."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path


def pid_file(data: Path) -> list[str]:
    """Return the lines of `postmaster.pid`: line 1 is the server's pid, line 4 its port, line 5 the socket's folder."""
    with suppress(FileNotFoundError):
        return (data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def postmaster(data: Path) -> int | None:
    """Return the pid of the server that runs in this folder, whichever process started it; None if there is none."""
    lines = pid_file(data)
    pid = int(lines[0]) if lines and lines[0].isdigit() else None
    return pid if pid and runs_in_folder(data, pid) else None


def runs_in_folder(data: Path, pid: int) -> bool:
    """Return whether this process is a server of this folder."""
    # After a crash or a reboot, the pid in the file may belong to an unrelated process.
    if sys.platform != "linux":
        return is_alive(pid)
    with suppress(OSError):
        return Path(f"/proc/{pid}/cwd").samefile(data)
    return False


def orphans(data: Path) -> list[int]:
    """Return the pids of processes that a killed server has left in this folder."""
    processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in processes if runs_in_folder(data, pid) and _command_of(pid) == "postgres"]


def is_alive(pid: int) -> bool:
    """Return whether a process with this pid exists, of any user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def parent_of(pid: int) -> int | None:
    """Return the pid of the parent, which is another one after the starting process has ended. None outside Linux."""
    with suppress(OSError):
        return int(
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1]
        )
    return None


def _command_of(pid: int) -> str | None:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return None
