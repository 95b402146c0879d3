"""The event loop of a daemon's process. It is entered again if a handler breaks it, until the daemon has drained."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from rota.supervision.tasks import protected_task

if TYPE_CHECKING:
    from rota.daemon.daemon import Daemon

MAX_BREAKS = 100
"""After this many breaks of the loop by handlers, the process ends without a drain."""


def run_until_drained(daemon: Daemon) -> None:
    """Run the daemon, and drain it even if a handler stops the loop or raises SystemExit or KeyboardInterrupt in a callback.

    Nothing can be done about os._exit() and a crash of the interpreter: the jobs run again when their leases have expired.
    """
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        loop = runner.get_loop()
        task = protected_task(daemon.run(), loop=loop, on_cancel_refused=daemon.report_refused_cancel, name="daemon")
        breaks = 0
        while not task.done():
            try:
                loop.run_until_complete(task)
            except BaseException as error:
                breaks += 1
                if task.done() or breaks > MAX_BREAKS or not daemon.handle_broken_loop(error):
                    raise


def _new_loop() -> asyncio.AbstractEventLoop:
    if sys.platform == "win32":
        return asyncio.new_event_loop()
    import uvloop  # noqa: PLC0415  not available on Windows

    return uvloop.new_event_loop()
