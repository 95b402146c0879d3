"""Clocks that are wrong: libfaketime, where it is installed."""

from __future__ import annotations

from pathlib import Path

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
"""What to preload; None where it isn't installed."""
