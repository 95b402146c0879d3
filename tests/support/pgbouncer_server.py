"""Run a PgBouncer in transaction mode in front of a server's Unix socket."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from network_faults import free_port
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


def find_pgbouncer() -> str | None:
    """Return the path of the binary. On Debian it is only on root's PATH."""
    return shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


@contextmanager
def pgbouncer(dsn: str, folder: Path) -> Iterator[str]:
    """Start PgBouncer with five rotating server connections; yield the DSN through it."""
    binary = find_pgbouncer()
    assert binary is not None
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    sockets, server_port, database = Path(query["host"][0]), query["port"][0], parts.path.lstrip("/")
    port = free_port()
    # PgBouncer refuses to run as root and must reach the server's socket, so it runs as the server's user.
    owner = sockets.stat()
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"""
        [databases]
        {database} = host={sockets} port={server_port} dbname={database} user=postgres
        [pgbouncer]
        listen_addr = 127.0.0.1
        listen_port = {port}
        unix_socket_dir =
        auth_type = any
        pool_mode = transaction
        default_pool_size = 5
        server_round_robin = 1
        max_client_conn = 200
        """.replace("\n        ", "\n")
    )
    os.chown(config, owner.st_uid, owner.st_gid)
    log = folder / "pgbouncer.log"
    root = os.geteuid() == 0
    handed = os.open(config, os.O_RDONLY)  # that user cannot read the folder
    try:
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                [binary, f"/dev/fd/{handed}"],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(handed,),
                cwd="/",
                user=owner.st_uid if root else None,
                group=owner.st_gid if root else None,
                extra_groups=[] if root else None,
            )
    finally:
        os.close(handed)
    try:

        def answers() -> bool:
            assert process.poll() is None, log.read_text()
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        until(answers, what="PgBouncer")
        yield f"postgresql://postgres@127.0.0.1:{port}/{database}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
