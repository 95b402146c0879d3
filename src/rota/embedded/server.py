"""The embedded server: initialise a data folder, start, attach, stop, and recover after a crash.

It is meant for `rota demo`, `rota dev` and a single node: the server ends with the process that started it. It listens only on a
Unix socket in a folder that only its user may enter, so it needs no passwords.

Two files lie beside the data folder. `<data>.lock` is locked while a process starts or stops the server, and contains the pids of
the owner and the server. `<data>.log` is the server's log since its last start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from rota.embedded.places import (
    SOCKET_PATH_BYTES,
    find_bindir,
    make_parents,
    runtime_folder,
    server_user,
    version_of,
)
from rota.embedded.processes import is_alive, orphans, parent_of, pid_file, postmaster, runs_in_folder
from rota.errors import ConfigError, DatabaseUnusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

NOT_DURABLE = MappingProxyType(
    {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "rota.disposable": "on"}
)
"""Settings without durability. `rota.disposable` marks the server, so that `rota check` does not report them."""

RESERVED_SETTINGS = frozenset(
    {"data_directory", "listen_addresses", "port", "unix_socket_directories", "unix_socket_permissions"}
)
POLL_SECONDS = 0.005
KEEPER_SECONDS = 0.2
"""How often an attached process checks that the server it uses still runs."""

# Drops root, asks the kernel for a signal when the parent ends, then execs the server and so keeps its pid.
# It is a program of its own because code between fork and exec (preexec_fn) may deadlock in a process with threads.
# The order matters. Imports come first: the other user may not reach root's interpreter. prctl comes after setuid, which clears
# the death signal. getppid comes last: a parent that ended before prctl sends no signal.
EXEC_SERVER = """
import ctypes, os, signal, sys
parent, uid, gid, *argv = sys.argv[1:]
if int(uid) >= 0:
    os.setgroups([]), os.setgid(int(gid)), os.setuid(int(uid))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGINT), 0, 0, 0)
if os.getppid() != int(parent):
    sys.exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
os.execv(argv[0], argv)
"""


class EmbeddedPostgres:
    """One server for one data folder. It stops when the process that started it ends, even by SIGKILL.

    If another living process already runs the server of this folder, start() attaches to it and stop() only detaches. Within
    kept(), this process starts the server again when that process ends. Call start() in the main thread: the kernel ends the
    server with the *thread* that started it.

    bindir: the folder of binaries; None: find_bindir() finds it.  sync: False gives up durability for speed (tests).
    settings: server settings.  patience: how long a start may take, recovery from a crash included.
    """

    def __init__(
        self,
        *,
        data: Path,
        settings: Mapping[str, str] = MappingProxyType({}),
        sync: bool = True,
        bindir: Path | None = None,
        port: int = 5432,
        patience: timedelta = timedelta(seconds=60),
    ) -> None:
        if reserved := sorted(RESERVED_SETTINGS & settings.keys()):
            raise ConfigError(f"an embedded server has no TCP and a socket of its own: don't set {', '.join(reserved)}")
        self.data = Path(os.path.abspath(data))  # noqa: PTH100 - links stay unresolved, as in the server
        self.port = port
        self.attached = False
        # Terse: the DETAIL of an error about a row would contain the whole row, payload included.
        self._settings = {"log_error_verbosity": "terse", **({} if sync else NOT_DURABLE), **settings}
        self._sync = sync
        self._patience = patience.total_seconds()
        self._user = server_user(self.data)
        self.bin = find_bindir(explicit=bindir, user=self._user)
        self._sockets: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._attached_pid: int | None = None
        self._keeper: threading.Thread | None = None
        self._keeping = threading.Lock()

    @property
    def dsn(self) -> str:
        """The URL of the database `postgres`, for libpq and asyncpg."""
        return self.dsn_for("postgres")

    def dsn_for(self, database: str) -> str:
        """Return the URL of a database. It always contains the port, so that a PGPORT has no effect."""
        host = quote(str(self._socket_folder()))
        return f"postgresql://postgres@/{quote(database, safe='')}?host={host}&port={self.port}"

    @property
    def pid(self) -> int | None:
        """The pid of the server, or None if it does not run."""
        if self._process is not None:
            return self._process.pid if self._process.poll() is None else None
        return self._attached_pid if self._attached_pid and runs_in_folder(self.data, self._attached_pid) else None

    def start(self) -> Self:
        """Return when the server accepts connections. Attach to it if another living process owns it.

        Raises DatabaseUnusable, with the end of the server's log, if it doesn't come up.
        """
        if self.pid is not None:
            return self
        if threading.current_thread() not in {threading.main_thread(), self._keeper}:
            raise RuntimeError("start the embedded PostgreSQL from the main thread: it would end with this one")
        try:
            make_parents(self.data, readable=self._user is not None)
            with self._lock() as record:
                if (pid := postmaster(self.data)) and self._is_owner_alive(pid, record):
                    self._attach(pid)
                    return self
                if pid:
                    self._wait_until_ended(pid)
                self._clean_up_after_crash()
                self._initialise(record)
                self._launch()
                _rewrite(record, f"{os.getpid()} {self.pid}\n")
        except OSError as error:
            raise DatabaseUnusable(
                f"can't use {self.data} for the embedded PostgreSQL: {error}. "
                f"Choose a folder that you may write to, with ROTA_DATA_DIR"
            ) from error
        return self

    def stop(self) -> None:
        """Stop the server if this process started it. Open transactions are rolled back."""
        if self._process is None:
            self.attached, self._attached_pid = False, None
            return
        with ExitStack() as stack:
            with suppress(
                OSError, DatabaseUnusable
            ):  # the lock only keeps other processes from attaching to an ending server
                stack.enter_context(self._lock())
            self._end()
            if self._sockets not in {None, self.data}:
                with suppress(OSError):
                    self._socket_folder().rmdir()

    def restart(self) -> Self:
        """Stop the server if it still runs, and start it again."""
        if self.attached:
            raise DatabaseUnusable(f"the PostgreSQL in {self.data} belongs to another process: restart it there")
        self.stop()
        return self.start()

    @contextmanager
    def kept(self, report: Callable[[str], None]) -> Iterator[None]:
        """Inside the block, start an attached server again when the process that owns it ends. Connections break in between.

        A thread starts it and lives until the block ends, because the kernel ends the server with that thread. `report` is called
        with a message for people about each change.
        """
        if not self.attached:
            yield
            return
        ending = threading.Event()
        self._keeper = threading.Thread(
            target=self._keep, args=(ending, report), name="embedded PostgreSQL", daemon=True
        )
        self._keeper.start()
        try:
            yield
        finally:
            with self._keeping:
                ending.set()
                self.stop()  # before the thread ends, which would end the server without waiting for it
            self._keeper.join()

    def _keep(self, ending: threading.Event, report: Callable[[str], None]) -> None:
        failure = None
        while not ending.wait(KEEPER_SECONDS):
            with self._keeping:
                if ending.is_set() or not self.attached or self.pid is not None:
                    continue
                old_dsn = self.dsn
                try:
                    self.start()
                except DatabaseUnusable as error:
                    if str(error) != failure:
                        failure = str(error)
                        report(f"the PostgreSQL in {self.data} has ended, and can't be started: {error}")
                    continue
            failure = None
            new_owner = "another process started it again" if self.attached else "this process runs it now"
            report(f"the PostgreSQL in {self.data} ended with the process that had started it: {new_owner}")
            if self.dsn != old_dsn:
                report(f"its address is {self.dsn} now: restart this command to use it")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # One process at a time

    @contextmanager
    def _lock(self) -> Iterator[int]:
        lock = os.open(self._beside("lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + self._patience
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    raise DatabaseUnusable(
                        f"another process has been starting or stopping the server in {self.data} all the time"
                    )
                time.sleep(POLL_SECONDS)
            yield lock
        finally:
            os.close(lock)

    def _is_owner_alive(self, pid: int, record: int) -> bool:
        words = os.pread(record, 64, 0).decode(errors="replace").split()
        if len(words) != 2 or words[1] != str(pid):
            return True  # started by another program, such as pg_ctl
        # An orphaned server has another parent and is about to shut down: do not attach to it.
        return parent_of(pid) == int(words[0]) if sys.platform == "linux" else is_alive(int(words[0]))

    def _attach(self, pid: int) -> None:
        def is_ready() -> bool:
            return len(lines := pid_file(self.data)) >= 8 and lines[7].strip() in {"ready", "standby"}

        if not _wait_until(self._patience, is_ready):
            raise DatabaseUnusable(
                f"the PostgreSQL in {self.data} (pid {pid}) isn't getting ready. {self._end_of_log()}"
            )
        lines = pid_file(self.data)
        if not lines[4]:
            raise DatabaseUnusable(
                f"the PostgreSQL in {self.data} (pid {pid}) has no Unix socket: set DATABASE_URL to reach it"
            )
        self.port, self._sockets = int(lines[3]), Path(lines[4])
        self._attached_pid, self.attached = pid, True

    def _wait_until_ended(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)
        if not _wait_until(self._patience, lambda: not runs_in_folder(self.data, pid)):
            raise DatabaseUnusable(
                f"the PostgreSQL in {self.data} (pid {pid}) has lost its owner and doesn't end: end it first"
            )

    def _clean_up_after_crash(self) -> None:
        lines = pid_file(self.data)
        if not lines or sys.platform != "linux":
            return
        # The children of a killed server keep its shared memory for a moment. A new server would refuse to start.
        if not _wait_until(1, lambda: not orphans(self.data)):
            for pid in orphans(self.data):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _wait_until(5, lambda: not orphans(self.data))
        # The pid in the file may now belong to another process. The server would refuse to start because of it.
        if lines[0].isdigit() and is_alive(int(lines[0])):
            (self.data / "postmaster.pid").unlink(missing_ok=True)

    # From an empty folder to a server that takes connections

    def _initialise(self, record: int) -> None:
        if os.pread(record, 64, 0) == b"initdb\n":  # the previous initdb was killed before it was done
            for entry in self.data.iterdir() if self.data.exists() else ():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if self._is_initialised():
            return
        self.data.mkdir(mode=0o700, exist_ok=True)
        if self._user is not None:
            os.chown(self.data, self._user.uid, self._user.gid)
        self.data.chmod(0o700)
        _rewrite(record, "initdb\n")
        options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8", "--no-instructions"]
        with self._folder_argument() as folder:
            options += ["-D", folder, *([] if self._sync else ["--no-sync"])]
            self._process = self._spawn("initdb", options, keep=folder)
            try:
                code = self._process.wait(timeout=self._patience)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                self._end()
        if code != 0:
            raise DatabaseUnusable(f"initdb couldn't make a database in {self.data}. {self._end_of_log()}")
        _rewrite(record, "")

    def _is_initialised(self) -> bool:
        if not self.data.exists() or not any(self.data.iterdir()):
            return False
        version = self.data / "PG_VERSION"
        if not version.exists():
            raise DatabaseUnusable(
                f"{self.data} isn't empty and holds no PostgreSQL database: choose another folder (ROTA_DATA_DIR)"
            )
        data_version = version.read_text(encoding="ascii").strip()
        binary_version = version_of(self.bin, self._user).split(".")[0]
        if data_version != binary_version:
            raise DatabaseUnusable(
                f"{self.data} was made by PostgreSQL {data_version}, and {self.bin} is {binary_version}: set ROTA_PG_BIN to "
                f"binaries of {data_version}, or ROTA_DATA_DIR to another folder (pg_dump from the old server moves the data)"
            )
        return True

    def _launch(self) -> None:
        self._sockets = None
        sockets = self._socket_folder()
        settings = {
            **self._settings,
            "listen_addresses": "",
            "port": str(self.port),
            "unix_socket_directories": str(sockets),
            "unix_socket_permissions": "0700",
        }
        with ExitStack() as undo:
            folder = undo.enter_context(self._folder_argument())
            flags = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            server = self._process = self._spawn("postgres", ["-D", folder, *flags], keep=folder)
            undo.callback(self._end)

            def is_ready_or_ended() -> bool:
                # Compare the pid, too: a file left by a crash may also contain "ready".
                lines = pid_file(self.data)
                ready = len(lines) >= 8 and lines[0] == str(server.pid) and lines[7].strip() == "ready"
                return ready or server.poll() is not None

            if not _wait_until(self._patience, is_ready_or_ended) or server.poll() is not None:
                raise DatabaseUnusable(f"the embedded PostgreSQL in {self.data} didn't start. {self._end_of_log()}")
            undo.pop_all()
        self.attached = False

    def _spawn(self, program: str, arguments: list[str], *, keep: str) -> subprocess.Popen[bytes]:
        uid, gid = (self._user.uid, self._user.gid) if self._user else (-1, -1)
        log = os.open(self._beside("log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            return subprocess.Popen(  # noqa: S603 - a list of arguments, no shell
                [
                    *(sys.executable, "-I", "-S", "-c", EXEC_SERVER),
                    *(str(os.getpid()), str(uid), str(gid), str(self.bin / program), *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"},
                cwd="/",
                start_new_session=True,  # Ctrl-C must not reach the server: it must outlive the drain
                pass_fds=[int(keep.rpartition("/")[2])] if keep.startswith("/proc/self/fd/") else (),
            )
        finally:
            os.close(log)

    @contextmanager
    def _folder_argument(self) -> Iterator[str]:
        """Yield a path of the data folder that the server can open: an open descriptor's, if its user can't reach the folder."""
        if self._is_reachable:
            yield str(self.data)
            return
        if sys.platform != "linux":
            raise DatabaseUnusable(
                f"the server's user can't reach {self.data}: choose another folder with ROTA_DATA_DIR"
            )
        folder = os.open(self.data, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}"
        finally:
            os.close(folder)

    def _end(self) -> None:
        # Reap the process before a new one starts: a zombie still has its pid, so the data folder counts as in use.
        if (process := self._process) is None:
            return
        for number, patience in ((signal.SIGINT, self._patience), (signal.SIGQUIT, 10.0), (signal.SIGKILL, None)):
            process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience)
                break
        self._process = None

    # Folders and the log

    @property
    def _is_reachable(self) -> bool:
        return self._user is None or self._user.can_reach(self.data)

    def _socket_folder(self) -> Path:
        if self._sockets is None:
            too_long = len(os.fsencode(self.data / f".s.PGSQL.{self.port}")) > SOCKET_PATH_BYTES
            splits = "," in str(self.data)  # the server reads a list of folders, and clients a list of hosts
            unfit = too_long or splits or not self._is_reachable
            self._sockets = runtime_folder(self.data, self._user) if unfit else self.data
        return self._sockets

    def _beside(self, ending: str) -> Path:
        parent = self.data.parent if os.access(self.data.parent, os.W_OK) else runtime_folder(self.data, None)
        return parent / f"{self.data.name}.{ending}"

    def _end_of_log(self) -> str:
        log = self._beside("log")
        with suppress(OSError):
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
            return f"The end of {log}:\n" + "\n".join(f"  {line}" for line in lines)
        return f"{log} can't be read."


def _rewrite(record: int, text: str) -> None:
    os.ftruncate(record, 0)
    os.pwrite(record, text.encode(), 0)


def _wait_until(seconds: float, condition: Callable[[], bool]) -> bool:
    """Poll the condition; return whether it became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
