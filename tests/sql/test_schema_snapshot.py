"""sql/schema.sql shows what the migrations make."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import schema_snapshot
from rota.db.sql import MIGRATIONS
from rota.embedded import find_bindir
from rota.errors import NoPostgres

if TYPE_CHECKING:
    from asyncpg import Connection, Record


def _embedded_is_18() -> bool:
    try:
        bindir = find_bindir()
    except NoPostgres:
        return False
    said = subprocess.run(
        [bindir / "postgres", "--version"], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    return " 18." in said


@pytest.mark.skipif(
    bool(os.environ.get("ROTA_TEST_PG_BIN")), reason="once is enough: it doesn't depend on the tests' server"
)
def test_the_picture_of_the_schema_is_true() -> None:
    """People read it to learn what there is; a stale one is worse than none. pg_dump of 18 wrote it, so 18 compares."""
    if not _embedded_is_18():
        pytest.skip("the embedded server isn't PostgreSQL 18")
    script = Path(schema_snapshot.__file__)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_the_names_of_constraints_are_whole_sentences(conn: Connection[Record]) -> None:
    """They are the messages that people get, and the server cuts a name after 63 bytes without a word."""
    migrations = "".join(MIGRATIONS.values())
    written = {*re.findall(r'constraint "([^"]+)"', migrations)} - {
        *re.findall(r'drop constraint "([^"]+)"', migrations)
    }
    there = {row["conname"] for row in await conn.fetch("select conname from pg_constraint")}
    assert written
    assert not written - there
