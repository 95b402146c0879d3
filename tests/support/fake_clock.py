"""Run processes with a wrong clock by libfaketime, if it is installed."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from servers import DurableServer

_PLACES = (
    "/usr/lib/x86_64-linux-gnu/faketime",
    "/usr/lib/aarch64-linux-gnu/faketime",
    "/usr/lib/faketime",
    "/usr/local/lib/faketime",
)

LIBFAKETIME = next(
    (found for place in _PLACES if (found := Path(place) / "libfaketimeMT.so.1").exists()),
    None,
)
"""Path of the library for LD_PRELOAD; None if it is not installed."""


def clock_environment(clock: Path) -> dict[str, str]:
    """Return the environment that shifts a process's clock by the offset in the file, such as `-40m` or `+400`."""
    return {"LD_PRELOAD": str(LIBFAKETIME), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1"}


@contextmanager
def server_with_fake_clock(server: DurableServer) -> Iterator[tuple[str, Path]]:
    """Restart the server with a clock forty minutes behind.

    Yield a function that connects to its migrated database, and the clock file; writing `+0` to it corrects the clock.
    """
    server.stop()
    data = server.postgres.data
    clock = data.parent / "clock"
    clock.write_text("-40m\n")
    owner = data.stat()
    root = os.geteuid() == 0
    log = clock.with_suffix(".log")
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [server.postgres.bin / "postgres", "-D", data, "-k", data, "-c", "listen_addresses="],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env={"LC_ALL": "C", **clock_environment(clock)},
            cwd="/",
            user=owner.st_uid if root else None,
            group=owner.st_gid if root else None,
            extra_groups=[] if root else None,
        )
    try:

        def accepts_connections() -> bool:
            assert process.poll() is None, log.read_text()
            return "ready to accept connections" in log.read_text()

        until(accepts_connections, within=30, what="the skewed server")
        yield f"postgresql://postgres@/rota?host={data}&port=5432", clock
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
