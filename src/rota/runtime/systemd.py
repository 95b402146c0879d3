"""The little that systemd wants to hear of a `Type=notify` service, without a library."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def notify(state: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Send `READY=1`, `WATCHDOG=1` or `STOPPING=1`, with a line `STATUS=…` below if need be; False if nobody listens.

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
    except OSError:  # A service must not fall because its supervisor is busy or gone.
        return False
    return True


def watchdog_interval(environ: Mapping[str, str] = os.environ) -> timedelta | None:
    """Return how often to send `WATCHDOG=1`: half of what systemd allows; None if it watches no one, or another."""
    allowed = environ.get("WATCHDOG_USEC", "")
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    if not (allowed.isdecimal() and int(allowed)):
        return None
    return timedelta(microseconds=int(allowed)) / 2


class Watchdog:
    """Service: tell systemd that the main loop turns."""

    name = "watchdog"

    def __init__(self, interval: timedelta) -> None:
        self.interval: timedelta | None = interval

    async def run_once(self) -> None:
        """Feed it."""
        notify("WATCHDOG=1")
