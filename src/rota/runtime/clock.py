"""A monotonic clock for a node's own intervals. It keeps counting while the machine is suspended."""

from __future__ import annotations

import time

if hasattr(time, "CLOCK_BOOTTIME"):

    def boottime() -> float:
        """Return seconds since an arbitrary moment. Only differences are meaningful."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    boottime = time.monotonic
