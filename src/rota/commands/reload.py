"""Run a command in a process of its own, and a new one after each change of the source."""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

POLL_S = 0.5
WATCHED = {".py", ".toml"}


def run_anew_at_changes(command: Sequence[str]) -> None:
    """Run `command` until told to stop, by Ctrl-C or SIGTERM; what ends by itself waits for the next change."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    seen = modified(Path())
    process = subprocess.Popen(command)  # noqa: S603  our own command
    try:
        while True:
            time.sleep(POLL_S)
            now = modified(Path())
            if now != seen:
                changed = sorted(str(path) for path in now.keys() | seen.keys() if now.get(path) != seen.get(path))
                typer.echo(f"{', '.join(changed[:3])} changed: starting anew", err=True)
                seen = now
                _end(process)
                process = subprocess.Popen(command)  # noqa: S603  our own command
    except KeyboardInterrupt:
        _end(process)


def modified(folder: Path) -> dict[Path, int]:
    """Return when each source file below the folder was last changed; hidden folders and environments are left out."""
    found = {}
    for path in _sources(folder):
        try:
            found[path] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return found


def _sources(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix in WATCHED:
            yield path
        elif path.is_dir() and not path.is_symlink() and _may_hold_source(path):
            yield from _sources(path)


def _may_hold_source(folder: Path) -> bool:
    return (
        not folder.name.startswith((".", "__"))
        and folder.name != "node_modules"
        and not (folder / "pyvenv.cfg").exists()
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
    process.wait()
