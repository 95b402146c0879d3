"""Run a command in a child process, and restart it whenever a source file changes."""

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

POLL_SECONDS = 0.5
SOURCE_SUFFIXES = {".py", ".toml"}


def run_and_restart(command: Sequence[str]) -> None:
    """Run `command` until SIGINT or SIGTERM. If it exits by itself, it is started again after the next change."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    before = modification_times(Path())
    process = subprocess.Popen(command)  # noqa: S603  our own command
    try:
        while True:
            time.sleep(POLL_SECONDS)
            now = modification_times(Path())
            if now != before:
                changed = sorted(str(path) for path in now.keys() | before.keys() if now.get(path) != before.get(path))
                typer.echo(f"{', '.join(changed[:3])} changed: restarting", err=True)
                before = now
                _terminate(process)
                process = subprocess.Popen(command)  # noqa: S603  our own command
    except KeyboardInterrupt:
        _terminate(process)


def modification_times(folder: Path) -> dict[Path, int]:
    """Return the modification time in ns of each source file below the folder. Skips hidden folders and virtual environments."""
    times = {}
    for path in _source_files(folder):
        try:
            times[path] = path.stat().st_mtime_ns
        except FileNotFoundError:
            continue
    return times


def _source_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix in SOURCE_SUFFIXES:
            yield path
        elif path.is_dir() and not path.is_symlink() and _may_hold_source(path):
            yield from _source_files(path)


def _may_hold_source(folder: Path) -> bool:
    return (
        not folder.name.startswith((".", "__"))
        and folder.name != "node_modules"
        and not (folder / "pyvenv.cfg").exists()
    )


def _terminate(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
    process.wait()
