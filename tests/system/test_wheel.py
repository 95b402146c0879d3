"""A wheel contains the SQL files, although they are outside of src/."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from rota.db.sql import MIGRATIONS, SQL

ROOT = Path(__file__).resolve().parent.parent.parent

LOAD_ALL_SQL = """
import json, pathlib, rota.db.sql as loaded
print(json.dumps([loaded.__file__, dict(loaded.SQL), list(loaded.MIGRATIONS)]))
"""


def test_a_wheel_in_an_empty_environment_contains_every_query_and_migration(tmp_path: Path) -> None:
    """In a checkout, the loader would find the folder beside src/."""
    wheel = build_wheel(tmp_path)
    python = make_empty_environment(tmp_path / "venv")
    subprocess.run([*find_installer(python), "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)

    result = subprocess.run(
        [python, "-I", "-c", LOAD_ALL_SQL], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert result.returncode == 0, result.stderr

    place, queries, migrations = json.loads(result.stdout)
    assert Path(place).is_relative_to(tmp_path), "loaded from the wheel, not from the checkout"
    assert queries == dict(SQL)
    assert migrations == list(MIGRATIONS)


def build_wheel(folder: Path) -> Path:
    """Build the wheel offline from a copy of the sources, with the installed backend."""
    source = folder / "source"
    source.mkdir()
    for name in ("src", "sql"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(source)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def make_empty_environment(folder: Path) -> Path:
    """Create an environment with only the dependencies of rota, from where they are installed.

    A .pth file adds them, so nothing is downloaded. Python does not follow .pth files that it finds there, so the editable
    installation of rota is not visible.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def find_installer(python: Path) -> list[str]:
    """Return the command that installs into the environment: pip, or uv."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", str(python)]
    subprocess.run([python, "-m", "ensurepip"], check=True, capture_output=True)
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
