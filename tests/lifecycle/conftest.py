"""Daemons run under uvloop in production, and under plain asyncio where there is none: what starts and ends is tried on both."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvloop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

BOTH = {"test_supervision.py", "test_drain.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Choose the loops of a test by its file."""
    del config
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.path.name in BOTH:
        loops["asyncio"] = asyncio.new_event_loop
    return loops
