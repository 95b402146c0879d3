"""What a daemon tells of the whole installation: due jobs that nobody would claim."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from factories import make_jobs, make_running_job
from rota.inline import Lent
from rota.services import gauges as module
from rota.services.gauges import Gauges
from rota.telemetry import Telemetry, make_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import Connection, Record

    from servers import Database

Told = list[tuple[str, "Mapping[str, Any]"]]


@pytest.fixture
def told() -> Told:
    """The events so far."""
    return []


@pytest.fixture
def gauges(conn: Connection[Record], told: Told) -> Gauges:
    """The service, on the test's connection."""
    telemetry = Telemetry(
        make_logger(level="error", format="json"),
        handlers=["send_receipt"],
        queues=["default"],
        watch=lambda name, fields: told.append((name, fields)),
    )
    return Gauges(cast("Any", Lent(conn)), telemetry)


def shown(gauges: Gauges, name: str) -> float | None:
    """What a scrape would show."""
    return gauges._telemetry.registry.get_sample_value(name)


async def alive(
    conn: Connection[Record], *, handlers: list[str], queues: list[str], state: str = "running", slots: str = "{}"
) -> None:
    """Register a daemon that was seen just now."""
    await conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, handlers, queues, slots, state) "
        "values (gen_random_uuid(), 'here', 1, '0', $1, $2, $4::text::jsonb, $3)",
        handlers,
        queues,
        state,
        slots,
    )


async def test_due_jobs_that_nobody_would_claim_are_counted_apart(conn: Connection[Record], gauges: Gauges) -> None:
    """A name that nobody has is a slip or a service that is down; a queue that nobody serves is a setting."""
    await alive(conn, handlers=["send_receipt"], queues=["default"])
    await alive(conn, handlers=["other"], queues=["mail", "*"])
    await make_jobs(conn, 1, handler="send_receipt")
    await make_jobs(conn, 2, handler="send_receipt", queue="mail")
    await make_jobs(conn, 3, handler="send_reciept")
    await make_jobs(conn, 4, handler="other", queue="whatever")
    await gauges.run_once()
    assert (shown(gauges, "rota_jobs_unclaimable"), shown(gauges, "rota_jobs_unserved")) == (3, 2)

    await conn.execute("update rota.nodes set state = 'draining' where handlers = '{send_receipt}'")
    await gauges.run_once()
    assert (shown(gauges, "rota_jobs_unclaimable"), shown(gauges, "rota_jobs_unserved")) == (3, 3)

    await conn.execute("truncate rota.jobs")
    await gauges.run_once()
    assert (shown(gauges, "rota_jobs_unclaimable"), shown(gauges, "rota_jobs_unserved")) == (0, 0)


async def test_due_jobs_of_a_queue_without_a_slot_are_unserved(conn: Connection[Record], gauges: Gauges) -> None:
    """It was taken out of what `*` stands for, here and maybe by mistake everywhere."""
    await alive(conn, handlers=["h"], queues=["mail", "*"], slots='{"mail": 0, "*": 5}')
    await make_jobs(conn, 2, handler="h", queue="mail")
    await make_jobs(conn, 1, handler="h", queue="other")
    await gauges.run_once()
    assert (shown(gauges, "rota_jobs_unclaimable"), shown(gauges, "rota_jobs_unserved")) == (0, 2)


async def test_a_row_that_says_running_and_not_since_when_is_counted_and_has_no_age(
    conn: Connection[Record], gauges: Gauges
) -> None:
    """Somebody with all rights wrote it; it must not cost the others their gauges."""
    await make_running_job(conn, queue="default", started_at=timedelta(hours=-2))
    await conn.execute("update rota.jobs set started_at = null")
    await gauges.run_once()
    assert gauges._telemetry.registry.get_sample_value("rota_jobs", {"queue": "default", "state": "running"}) == 1
    assert gauges._telemetry.registry.get_sample_value("rota_oldest_running_seconds", {"queue": "default"}) is None


async def test_what_slows_or_stops_a_queue_is_shown(
    conn: Connection[Record], database: Database, gauges: Gauges
) -> None:
    """Who wonders why nothing runs sees the pause, the attempt that never ends, and the transaction that holds dead rows."""
    await make_running_job(conn, queue="default", started_at=timedelta(hours=-2))
    await make_running_job(conn, queue="somebody's", started_at=timedelta(hours=-1))
    await make_running_job(conn, queue="anybody's", started_at=timedelta(hours=-3))
    await conn.execute(
        "select rota.pause_queue('*'), rota.pause_queue('somebody''s'), rota.pause_handler('send_receipt')"
    )
    async with database.connect() as other, other.transaction(isolation="repeatable_read"):
        await other.execute("select 1")
        await gauges.run_once()
    show = gauges._telemetry.registry.get_sample_value
    assert (show("rota_oldest_snapshot_seconds") or 0) > 0
    assert 7200 <= (show("rota_oldest_running_seconds", {"queue": "default"}) or 0) < 7300
    assert 10800 <= (show("rota_oldest_running_seconds", {"queue": "other"}) or 0) < 10900
    assert show("rota_jobs", {"queue": "other", "state": "running"}) == 2
    assert show("rota_dead_tuples", {"table": "jobs"}) is not None
    for kind, name in (("queue", "*"), ("queue", "other"), ("handler", "send_receipt")):
        assert show("rota_paused", {"kind": kind, "name": name}) == 1

    await conn.execute("select rota.resume_queue('*'), rota.resume_handler('send_receipt')")
    await gauges.run_once()
    assert show("rota_oldest_snapshot_seconds") == 0
    assert show("rota_paused", {"kind": "queue", "name": "*"}) is None


async def test_a_daemon_warns_of_jobs_that_nobody_would_claim_once_an_hour(
    conn: Connection[Record], gauges: Gauges, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who inserts by SQL sees no warning of the command's: the log names the slip, the name that was meant, and that nothing
    is lost. Not at the first look, because a fleet doesn't start all at once; and not at every look.
    """
    await alive(conn, handlers=["send_receipt"], queues=["default"])
    await make_jobs(conn, 3, handler="send_reciept")
    await make_jobs(conn, 1, handler="send_receipt", queue="mail")

    def warnings() -> Told:
        return [each for each in told if each[0] == "jobs.unclaimed"]

    await gauges.run_once()
    assert warnings() == []
    await gauges.run_once()
    await gauges.run_once()
    slip, lane = (fields for _, fields in warnings())
    assert (slip["handler"], slip["due"]) == ("send_reciept", 3)
    assert "did you mean 'send_receipt'" in slip["why"]
    assert "it waits, no attempt is used" in slip["why"]
    assert (lane["queue"], lane["due"]) == ("mail", 1)
    assert "no living daemon serves the queue 'mail'" in lane["why"]
    assert "it waits, no attempt is used" in lane["why"]

    monkeypatch.setattr(module, "TOLD_EVERY", 0.0)
    await gauges.run_once()
    assert len(warnings()) == 4
