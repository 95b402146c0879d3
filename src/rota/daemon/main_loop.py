"""The main loop of a daemon's process, which turns until the daemon has drained, whatever a handler does to it."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from rota.supervision.tasks import ProtectedTask

if TYPE_CHECKING:
    from rota.daemon.daemon import Daemon

MAX_BREAKS = 100
"""How often the main loop is entered again after code of a handler has broken it, until the process ends without a drain."""


def run_to_the_end(daemon: Daemon) -> None:
    """Run the daemon. It drains also when a handler stops the loop, or raises SystemExit or KeyboardInterrupt in a callback.

    os._exit() and a crash of the interpreter can't be held: the jobs then run again when their leases have expired.
    """
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        loop = runner.get_loop()
        work = ProtectedTask(daemon.run(), loop=loop, on_cancel_refused=daemon.report_refused_cancel, name="daemon")
        breaks = 0
        while not work.done():
            try:
                loop.run_until_complete(work)
            except BaseException as error:
                breaks += 1
                if work.done() or breaks > MAX_BREAKS or not daemon.loop_broken(error):
                    raise


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415  there is none on Windows

    return uvloop.new_event_loop()
