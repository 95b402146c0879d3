"""rota.pause_queue, resume_queue, pause_handler, resume_handler: a pause survives restarts and says who and why."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import pytest

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database

BOTH = pytest.mark.parametrize(("noun", "table"), [("queue", "queues"), ("handler", "handlers")])


@BOTH
async def test_pause_and_resume_say_whether_anything_has_changed(
    conn: Connection[Record], noun: str, table: str
) -> None:
    """Said twice, the first reason stays and the second call is told; each change is one row of audit."""
    me = await conn.fetchval("select session_user::text")
    pause, resume = f"select rota.pause_{noun}('mail', $1)", f"select rota.resume_{noun}('mail', 'repaired')"
    assert await conn.fetchval(resume) is False
    assert await conn.fetchval(pause, "broken") is True
    assert await conn.fetchval(pause, "broken") is False
    assert await conn.fetchval(pause, None) is False
    row = await conn.fetchrow(f"select paused, pause_reason, paused_by, paused_at is not null from rota.{table}")
    assert row is not None
    assert tuple(row) == (True, "broken", me, True)
    assert await conn.fetchval(resume) is True
    assert await conn.fetchval(resume) is False
    row = await conn.fetchrow(f"select paused, pause_reason, paused_by, paused_at from rota.{table}")
    assert row is not None
    assert tuple(row) == (False, None, None, None)
    audit = await conn.fetch("select action, target, reason from rota.audit order by audit_id")
    assert [tuple(entry) for entry in audit] == [
        ("pause", f"{noun} mail", "broken"),
        ("resume", f"{noun} mail", "repaired"),
    ]


@BOTH
async def test_resume_wakes_the_dispatchers(
    conn: Connection[Record], database: Database, noun: str, table: str
) -> None:
    """What has waited for the end of the pause doesn't wait for the next poll as well."""
    await conn.execute(f"insert into rota.{table} ({noun}, paused) values ('mail', true)")
    heard: asyncio.Queue[object] = asyncio.Queue()
    async with database.connect() as listener:
        await listener.add_listener("rota_wake", lambda *_: heard.put_nowait("woken"))
        await conn.execute(f"select rota.resume_{noun}('mail')")
        assert await asyncio.wait_for(heard.get(), 10) == "woken"


async def test_a_name_that_nobody_knows_is_paused_with_a_notice(conn: Connection[Record]) -> None:
    """A typing error in the middle of an outage should be seen; a pause set before the first start is legal."""
    heard: list[str] = []
    conn.add_log_listener(lambda _, message: heard.append(str(message.message)))
    await conn.execute("insert into rota.handlers (handler, queue, seen_at) values ('known', 'lane', now())")
    for statement in (
        "select rota.pause_handler('known')",
        "select rota.pause_queue('lane')",
        "select rota.pause_queue('*')",
        "select rota.pause_queue('default')",
    ):
        await conn.execute(statement)
    await asyncio.sleep(0)  # log listeners are called on the next turn of the loop
    assert heard == []
    await conn.execute("select rota.pause_handler('knwon')")
    await conn.execute("select rota.pause_queue('laen')")
    await asyncio.sleep(0)
    assert [("knwon" in heard[0]), ("laen" in heard[1])] == [True, True]
    assert await conn.fetchval("select paused from rota.handlers where handler = 'knwon'") is True


@pytest.mark.parametrize("name", ["", None, "a\nb"])
@BOTH
async def test_a_malformed_name_is_refused(conn: Connection[Record], noun: str, table: str, name: str | None) -> None:
    """With a sentence, not with the text of a violated constraint."""
    with pytest.raises(asyncpg.PostgresError) as refused:
        await conn.execute(f"select rota.pause_{noun}($1)", name)
    assert refused.value.sqlstate == "RT006"
    assert await conn.fetchval(f"select count(*) from rota.{table}") == 0
