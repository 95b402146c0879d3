"""Commands on rows that the owner wrote past the constraints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from command_line import Shell
from factories import without_check_constraints

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database

INSERT_BAD_ROWS = """
insert into rota.jobs (handler, retry_for, lease, run_at, scheduled_for, created_at) values
    ('h', '106751000 days -2562023976 hours', '178956970 years', '4000-01-01 BC', '20000-01-01', '290000-01-01');
insert into rota.jobs (handler, run_at, max_attempts, backoff_base, backoff_cap) values
    ('h', 'infinity', 2147483647, '-1 years', '178956970 years');
insert into rota.schedules (name, handler, every, expect_success_within, jitter, start_at) values
    ('silent', 'h', '1 h', '106751000 days -2562023976 hours', '178956970 years', '20000-01-01'),
    ('endless', 'h', '178956970 years', '178956970 years', '0', '4000-01-01 BC');
update rota.schedule_clocks set next_fire_at = '20000-01-01', last_success_at = '4000-01-01 BC';
"""


async def test_every_report_works_with_rows_that_cannot_be_computed_with(
    tmp_path: Path, database: Database, conn: Connection[Record]
) -> None:
    """Without this, one such row would hide all others from the operator."""
    rota = Shell(tmp_path, {"DATABASE_URL": database.dsn})
    async with without_check_constraints(conn, "rota.jobs", "rota.schedule_definitions", "rota.schedule_clocks"):
        await conn.execute(INSERT_BAD_ROWS)
    for command in (
        ["status"],
        ["queue", "list"],
        ["job", "list"],
        ["job", "show", "1"],
        ["why", "2", "--json"],
        ["schedule", "list"],
        ["schedule", "show", "silent", "--json"],
        ["why", "endless"],
    ):
        result = await rota(*command)
        assert result.code == 0, (command, result.err)
    checked = await rota("check")
    assert checked.code == 1, checked.err
    assert "Traceback" not in checked.err
