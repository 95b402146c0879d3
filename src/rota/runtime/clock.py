"""The clock for a node's own intervals: it goes on while the machine sleeps, and nobody sets it."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def boottime() -> float:
        """Return seconds since some fixed moment; only differences mean anything."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    boottime = time.monotonic
