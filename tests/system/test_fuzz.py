"""The fuzzer for some seconds; `make fuzz` runs it for longer."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "support" / "fuzz.py"


@pytest.mark.timeout(180)
async def test_hostile_clients_harm_only_their_own_jobs() -> None:
    """Nothing that a client may insert stops a daemon, delays other jobs, or breaks a command."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(FUZZ), "--seed", "9", "--minutes", "0.08"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    result, _ = await asyncio.wait_for(process.communicate(), 170)

    assert process.returncode == 0, result.decode(errors="replace")[-6000:]
    assert b"canary: " in result
