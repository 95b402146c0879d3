"""What is installed from a wheel is whole: the SQL lies at the top of the tree, and a build could leave it behind."""

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

LOAD = """
import json, pathlib, rota.db.sql as loaded
print(json.dumps([loaded.__file__, dict(loaded.SQL), list(loaded.MIGRATIONS)]))
"""


def test_a_wheel_in_an_empty_environment_holds_every_query_and_migration(tmp_path: Path) -> None:
    """The checkout hides a wheel without SQL: the loader finds the folder beside src/."""
    wheel = build(tmp_path)
    python = empty_environment(tmp_path / "venv")
    subprocess.run([*installer(python), "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)

    said = subprocess.run([python, "-I", "-c", LOAD], cwd=tmp_path, capture_output=True, text=True, check=False)

    assert said.returncode == 0, said.stderr
    place, queries, migrations = json.loads(said.stdout)
    assert Path(place).is_relative_to(tmp_path), "loaded from the wheel, not from the checkout"
    assert queries == dict(SQL)
    assert migrations == list(MIGRATIONS)


def build(folder: Path) -> Path:
    """Build the wheel from a copy of what the build reads, with the installed backend: no network, no litter."""
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


def empty_environment(folder: Path) -> Path:
    """Make an environment in which only the dependencies of ours can be imported, from where they are installed.

    They come through a path file, read in after the environment's own folder, so that nothing is downloaded. The
    editable install of rota over there is a path file itself, which Python doesn't follow from here.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def installer(python: Path) -> list[str]:
    """The installer at hand, working on that environment: pip, else uv, which makes environments without pip."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", str(python)]
    subprocess.run([python, "-m", "ensurepip"], check=True, capture_output=True)
    return [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
