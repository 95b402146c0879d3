"""Housekeeping: each task fails alone, and its failure stays recorded until it succeeds again."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from factories import make_attempts, make_ledger_rows
from rota.config import Retention
from rota.db import queries, server_reports
from rota.inline import SingleConnectionPool
from rota.observability.telemetry import Telemetry, make_logger
from rota.services.pruner import Pruner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import Connection, Record

LONG_AGO = timedelta(days=-500)

Events = list[tuple[str, "Mapping[str, Any]"]]


def make_pruner(conn: Connection[Record], events: Events, **retention: timedelta) -> Pruner:
    """The pruner service on the test's connection."""
    telemetry = Telemetry(
        make_logger(level="error", format="json"), watch=lambda name, fields: events.append((name, fields))
    )
    return Pruner(SingleConnectionPool(conn), telemetry, Retention(**retention))  # type: ignore[arg-type]


async def failing_tasks(conn: Connection[Record]) -> dict[str, str | None]:
    """Return task -> error of the housekeeping tasks that fail."""
    return {
        each.piece: each.error for each in await server_reports.list_housekeeping(conn, patience=timedelta(minutes=15))
    }


async def _make_partition(conn: Connection[Record], days_ago: int) -> str:
    """Create the ledger partition of a past day and return its name."""
    name: str = await conn.fetchval(
        "select 'job_runs_' || to_char((now() at time zone 'UTC')::date - $1::int, 'YYYYMMDD')", days_ago
    )
    await conn.execute(
        f"""
        do $$ declare day date := (now() at time zone 'UTC')::date - {days_ago}; begin
        execute format('create table rota.{name} partition of rota.job_runs for values from (%L) to (%L)',
            day || ' 00:00:00+00', day + 1 || ' 00:00:00+00'); end $$
        """
    )
    return name


async def test_a_view_on_an_old_partition_keeps_only_that_partition(conn: Connection[Record]) -> None:
    """Other partitions are dropped and created, history is pruned, and the error names the view."""
    events: Events = []
    viewed, other = await _make_partition(conn, 30), await _make_partition(conn, 29)
    await conn.execute(f"create view report as select * from rota.{viewed}")
    coming: str = await conn.fetchval(
        "select max(inhrelid::regclass::text) from pg_inherits "
        r"where inhparent = 'rota.job_runs'::regclass and inhrelid::regclass::text ~ '\d$'"
    )
    await conn.execute(f"drop table {coming}")
    await make_attempts(conn, 3, finished_at=LONG_AGO)
    service = make_pruner(conn, events)
    for _ in range(2):
        await service.run_once()
    assert await conn.fetchval("select to_regclass('rota.' || $1) is not null", viewed)
    assert await conn.fetchval("select to_regclass('rota.' || $1) is null", other)
    assert await conn.fetchval("select to_regclass($1) is not null", coming)
    assert not await conn.fetchval("select count(*) from rota.attempts")

    (piece,) = errors = await failing_tasks(conn)
    assert piece == "ledger_drop"
    assert f"{viewed}: cannot drop table" in str(errors[piece])
    assert "report depends on" in str(errors[piece])

    failed = [fields for name, fields in events if name == "housekeeping.failed"]
    assert [fields["piece"] for fields in failed] == ["ledger_drop"], "once, not at every turn"

    await conn.execute("drop view report")
    await service.run_once()
    assert await failing_tasks(conn) == {}
    assert await conn.fetchval("select to_regclass('rota.' || $1) is null", viewed)


@pytest.mark.parametrize("piece", ["attempts", "fires", "dead_letters", "guards", "audit", "lost_nodes"])
async def test_each_housekeeping_task_fails_alone(conn: Connection[Record], piece: str) -> None:
    """A trigger, a rule or a missing right on one table must not stop the others."""
    old = make_pruner(conn, [])
    await make_ledger_rows(conn, 1)
    await make_attempts(conn, 2, finished_at=LONG_AGO)
    await conn.execute("insert into rota.guards values ('a', 1, now() - interval '500 days')")
    await conn.execute(f"alter table rota.{piece} rename to elsewhere")
    try:
        await old.run_once()
        failed = set(await failing_tasks(conn))
        assert ("nodes" if piece == "lost_nodes" else piece) in failed
        assert len(failed) <= 2, "a dead letter's end in the ledger may need another table"
    finally:
        await conn.execute(f"alter table rota.elsewhere rename to {piece}")
    await old.run_once()
    assert await failing_tasks(conn) == {}
    assert not await conn.fetchval("select count(*) from rota.attempts")
    assert not await conn.fetchval("select count(*) from rota.guards")


async def test_an_unexpected_table_among_the_partitions_stops_no_other_drop(conn: Connection[Record]) -> None:
    """Its name looks like a day but is not one."""
    await conn.execute("create table rota.job_runs_20261399 (like rota.job_runs including all)")
    await conn.execute(
        "alter table rota.job_runs attach partition rota.job_runs_20261399 for values from ('2001-01-01') to ('2001-01-02')"
    )
    old = await _make_partition(conn, 30)
    await make_pruner(conn, []).run_once()
    assert set(await failing_tasks(conn)) == {"ledger_drop"}
    assert await conn.fetchval("select to_regclass('rota.' || $1) is null", old)


async def test_audit_rows_are_kept_for_their_retention_and_at_least_one_day(conn: Connection[Record]) -> None:
    """A daemon's login must not be able to remove today's audit rows through pruning."""
    await conn.execute(
        "insert into rota.audit (action, target, done_at) values ('pause', 'old', now() - interval '401 days'), "
        "('pause', 'kept', now() - interval '399 days'), ('pause', 'today', now())"
    )
    await make_pruner(conn, []).run_once()
    assert [row[0] for row in await conn.fetch("select target from rota.audit order by 1")] == ["kept", "today"]
    assert await queries.prune(conn, what="audit", keep=timedelta(0), limit=10) == 1
    assert [row[0] for row in await conn.fetch("select target from rota.audit")] == ["today"]
