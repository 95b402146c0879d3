"""rota.job_status: every job once, in the state that people ask about."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from factories import make_dead_letter, make_job, make_running_job, state_of

if TYPE_CHECKING:
    from asyncpg import Connection, Record


async def test_each_job_has_exactly_one_state(conn: Connection[Record]) -> None:
    """The nine words of the view are all there are, and each means what the glossary says."""
    jobs = {
        "future": (await make_job(conn, run_at=timedelta(hours=1))).job_id,
        "due": (await make_job(conn)).job_id,
        "retrying": (await make_job(conn, attempt=1, run_at=timedelta(hours=1))).job_id,
        "running": (await make_running_job(conn))[0],
        "dead": await make_dead_letter(conn),
        "discarded": await make_dead_letter(conn),
        "cancelled": (await make_job(conn)).job_id,
    }
    done, token = await make_running_job(conn)
    jobs["succeeded"] = done
    await conn.execute("select rota.complete($1, $2)", done, token)
    await conn.execute("select rota.discard($1)", jobs["discarded"])
    await conn.execute("select rota.cancel($1)", jobs["cancelled"])
    jobs["expired"] = 10**6
    await conn.execute(
        "insert into rota.job_runs (job_id, scheduled_for, finished_at, attempts, outcome, handler, queue) "
        "values ($1, now(), now(), 0, 'expired', 'h', 'q')",
        jobs["expired"],
    )
    assert {state: await state_of(conn, job) for state, job in jobs.items()} == {state: state for state in jobs}
    assert await conn.fetchval("select count(*) from rota.job_status") == len(jobs)
    again = (await make_job(conn, attempt=1)).job_id
    assert await state_of(conn, again) == "due", "a retry whose instant has come waits for a slot like any other"


async def test_the_view_shows_the_last_error_and_no_payload(conn: Connection[Record]) -> None:
    """People who may look at jobs may not therefore read what is in them."""
    job_id = (await make_job(conn, attempt=2, run_at=timedelta(hours=1))).job_id
    await conn.execute(
        "insert into rota.attempts (job_id, fence_token, attempt, outcome, error_kind) "
        "values ($1, 1, 1, 'failed', 'KeyError'), ($1, 2, 2, 'failed', 'ValueError')",
        job_id,
    )
    row = await conn.fetchrow("select * from rota.job_status where job_id = $1", job_id)
    assert row is not None
    assert row["last_error_kind"] == "ValueError"
    assert not {"payload", "checkpoint", "error", "last_error"} & set(row.keys())


async def test_a_lookup_by_job_id_uses_the_index_of_each_table(conn: Connection[Record]) -> None:
    """With ten million rows beside it, one job is found as fast."""
    await conn.execute(
        """
        insert into rota.jobs (handler) select 'h' from generate_series(1, 3000);
        insert into rota.job_runs (job_id, scheduled_for, finished_at, attempts, outcome, handler, queue)
        select 10000 + n, now(), now(), 1, 'succeeded', 'h', 'q' from generate_series(1, 3000) as n;
        insert into rota.dead_letters (job_id, run_at, scheduled_for, created_at, attempt, losses, releases, priority,
            exclusive, handler, queue, created_by, payload, reason)
        select 20000 + n, now(), now(), now(), 1, 0, 0, 5, false, 'h', 'q', 'me', '{}', 'poison'
        from generate_series(1, 3000) as n;
        analyze rota.jobs, rota.job_runs, rota.dead_letters;
        """
    )
    plan = json.loads(await conn.fetchval("explain (format json) select * from rota.job_status where job_id = 10001"))
    scans = [node for node in _nodes(plan[0]["Plan"]) if "Relation Name" in node]
    found = {node.get("Index Name") or node["Relation Name"] for node in scans}
    assert {"jobs_pkey", "dead_letters_pkey"} <= found
    assert any(str(name).startswith("job_runs") and "job_id_idx" in str(name) for name in found)
    large = await conn.fetch(
        "select relname from pg_class where relnamespace = 'rota'::regnamespace and reltuples > 100"
    )
    assert not {node["Relation Name"] for node in scans if node["Node Type"] == "Seq Scan"} & {row[0] for row in large}


def _nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(below for child in node.get("Plans", []) for below in _nodes(child))]
