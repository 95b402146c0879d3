"""The standard streams of a daemon: what is written by any library arrives, and bytes are refused as a text stream does."""

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


def test_everything_that_is_written_before_the_end_of_the_process_arrives() -> None:
    """typer tells text from bytes by trying: a stream that took both would lose what it echoes."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 3
    assert sorted(done.stdout.split()) == ["echoed", "forked", "printed"]
    assert done.stderr == "an error\n"
