"""The systemd notification protocol of a `Type=notify` service, without a library."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send `READY=1`, `WATCHDOG=1` or `STOPPING=1`, optionally with a line `STATUS=…` below. False if systemd does not listen.

    Never blocks, never raises.
    """
    address = environ.get("NOTIFY_SOCKET", "")
    if not address:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.send(state.encode())
    except OSError:  # the daemon must go on while systemd is busy or gone
        return False
    return True


def watchdog_interval(environ: Mapping[str, str] = os.environ) -> timedelta | None:
    """Return how often to send `WATCHDOG=1`: half of what systemd allows. None if systemd does not watch this process."""
    allowed = environ.get("WATCHDOG_USEC", "")
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (allowed.isdecimal() and int(allowed)):
        return None
    return timedelta(microseconds=int(allowed)) / 2


class Watchdog:
    """Service: report to systemd that the main loop runs."""

    name = "watchdog"

    def __init__(self, interval: timedelta) -> None:
        self.interval: timedelta | None = interval

    async def run_once(self) -> None:
        """Send one report."""
        notify("WATCHDOG=1")
