"""Buffered standard streams of a daemon: they lose no output and accept text only."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
from rota.observability import log_writer
log_writer.install()
import typer
print("printed")
typer.echo("echoed")
typer.echo("an error", err=True)
if os.fork() == 0:
    print("forked\\n", end="", flush=True)  # in one piece, even with PYTHONUNBUFFERED
    os._exit(0)
os.wait()
sys.exit(3)
"""


def test_all_output_written_before_the_process_exits_arrives() -> None:
    """typer detects text streams by writing bytes, so the stream must refuse them."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert sorted(done.stdout.split()) == ["echoed", "forked", "printed"]
    assert done.stderr == "an error\n"
