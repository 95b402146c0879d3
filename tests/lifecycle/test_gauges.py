"""Gauges that each daemon reports for the whole installation."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client import generate_latest

from factories import make_handler, make_jobs, make_running_job
from rota.db import reports
from rota.inline import SingleConnectionPool
from rota.lifecycle.running import Running
from rota.lifecycle.wake import Wake
from rota.observability.telemetry import Telemetry, make_logger
from rota.services import gauges as module
from rota.services.gauges import Gauges, LocalGauges
from rota.supervision.service_monitor import ServiceMonitor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import Connection, Record

    from servers import Database

Events = list[tuple[str, "Mapping[str, Any]"]]


@pytest.fixture
def events() -> Events:
    """The events logged so far, as (name, fields)."""
    return []


@pytest.fixture
def gauges(conn: Connection[Record], events: Events) -> Gauges:
    """The gauges service on the test's connection."""
    telemetry = Telemetry(
        make_logger(level="error", format="json"),
        handlers=["send_receipt"],
        queues=["default"],
        watch=lambda name, fields: events.append((name, fields)),
    )
    return Gauges(cast("Any", SingleConnectionPool(conn)), telemetry)


def metric_value(gauges: Gauges, name: str) -> float | None:
    """The current value of a metric without labels."""
    return gauges._telemetry.registry.get_sample_value(name)


async def register_daemon(
    conn: Connection[Record], *, handlers: list[str], queues: list[str], state: str = "running", slots: str = "{}"
) -> None:
    """Insert the row of a daemon that was seen just now."""
    await conn.execute(
        "insert into rota.nodes (node_id, host, pid, rota_version, handlers, queues, slots, state) "
        "values (gen_random_uuid(), 'here', 1, '0', $1, $2, $4::text::jsonb, $3)",
        handlers,
        queues,
        state,
        slots,
    )


async def test_due_jobs_without_a_handler_and_without_a_serving_queue_are_counted_separately(
    conn: Connection[Record], gauges: Gauges
) -> None:
    await register_daemon(conn, handlers=["send_receipt"], queues=["default"])
    await register_daemon(conn, handlers=["other"], queues=["mail", "*"])
    await make_jobs(conn, 1, handler="send_receipt")
    await make_jobs(conn, 2, handler="send_receipt", queue="mail")
    await make_jobs(conn, 3, handler="send_reciept")
    await make_jobs(conn, 4, handler="other", queue="whatever")
    await gauges.run_once()
    assert (metric_value(gauges, "rota_jobs_unclaimable"), metric_value(gauges, "rota_jobs_unserved")) == (3, 2)

    await conn.execute("update rota.nodes set state = 'draining' where handlers = '{send_receipt}'")
    await gauges.run_once()
    assert (metric_value(gauges, "rota_jobs_unclaimable"), metric_value(gauges, "rota_jobs_unserved")) == (3, 3)

    await conn.execute("truncate rota.jobs")
    await gauges.run_once()
    assert (metric_value(gauges, "rota_jobs_unclaimable"), metric_value(gauges, "rota_jobs_unserved")) == (0, 0)


async def test_due_jobs_of_a_queue_with_zero_slots_are_unserved(conn: Connection[Record], gauges: Gauges) -> None:
    """A queue that is listed with zero slots is not covered by `*`."""
    await register_daemon(conn, handlers=["h"], queues=["mail", "*"], slots='{"mail": 0, "*": 5}')
    await make_jobs(conn, 2, handler="h", queue="mail")
    await make_jobs(conn, 1, handler="h", queue="other")
    await gauges.run_once()
    assert (metric_value(gauges, "rota_jobs_unclaimable"), metric_value(gauges, "rota_jobs_unserved")) == (0, 2)


async def test_a_running_row_without_started_at_is_counted_and_has_no_age(
    conn: Connection[Record], gauges: Gauges
) -> None:
    """The owner of the tables can write such a row; the other gauges must still work."""
    await make_running_job(conn, queue="default", started_at=timedelta(hours=-2))
    await conn.execute("update rota.jobs set started_at = null")
    await gauges.run_once()
    assert gauges._telemetry.registry.get_sample_value("rota_jobs", {"queue": "default", "state": "running"}) == 1
    assert gauges._telemetry.registry.get_sample_value("rota_oldest_running_seconds", {"queue": "default"}) is None


async def test_pauses_long_attempts_and_old_snapshots_are_reported(
    conn: Connection[Record], database: Database, gauges: Gauges
) -> None:
    await make_running_job(conn, queue="default", started_at=timedelta(hours=-2))
    await make_running_job(conn, queue="invented's", started_at=timedelta(hours=-1))
    await make_running_job(conn, queue="another's", started_at=timedelta(hours=-3))
    await conn.execute(
        "select rota.pause_queue('*'), rota.pause_queue('invented''s'), rota.pause_handler('send_receipt')"
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


async def test_a_daemon_warns_once_an_hour_of_jobs_that_no_daemon_claims(
    conn: Connection[Record], gauges: Gauges, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the handler, a similar registered name, and the consequence.

    The first sample does not warn, because the daemons of a fleet do not start at the same moment.
    """
    await register_daemon(conn, handlers=["send_receipt"], queues=["default"])
    await make_jobs(conn, 3, handler="send_reciept")
    await make_jobs(conn, 1, handler="send_receipt", queue="mail")

    def logged_warnings() -> Events:
        return [each for each in events if each[0] == "jobs.unclaimed"]

    await gauges.run_once()
    assert logged_warnings() == []

    await gauges.run_once()
    await gauges.run_once()
    misspelt, unserved = (fields for _, fields in logged_warnings())
    assert (misspelt["handler"], misspelt["due"]) == ("send_reciept", 3)
    assert "did you mean 'send_receipt'" in misspelt["why"]
    assert "it waits, no attempt is used" in misspelt["why"]
    assert (unserved["queue"], unserved["due"]) == ("mail", 1)
    assert "no living daemon serves the queue 'mail'" in unserved["why"]
    assert "it waits, no attempt is used" in unserved["why"]

    monkeypatch.setattr(module, "WARN_AGAIN_SECONDS", 0.0)
    await gauges.run_once()
    assert len(logged_warnings()) == 4


async def test_ages_and_unclaimable_jobs_are_exact_for_any_number_of_jobs(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the counts per state may become lower bounds."""
    monkeypatch.setattr(module, "MAX_COUNTED_JOBS", 400)
    await register_daemon(conn, handlers=["send_receipt"], queues=["default"])
    await make_jobs(conn, 500, handler="send_receipt", run_at=timedelta(days=365))
    for priority in (0, 7):
        await make_jobs(conn, 1, handler="send_receipt", run_at=timedelta(minutes=-priority - 1), priority=priority)
    await make_jobs(conn, 20, handler="slip", run_at=timedelta(hours=-1))
    await make_running_job(conn, started_at=timedelta(hours=-2), lease=timedelta(seconds=-1))
    await conn.execute("update rota.jobs set created_at = run_at where run_at < now()")
    await gauges.run_once()
    show = gauges._telemetry.registry.get_sample_value
    ages = [show("rota_oldest_due_seconds", {"queue": "default", "priority": each}) for each in ("0", "5", "7")]

    assert ages == [pytest.approx(expected, abs=5) for expected in (60, 3600, 480)]
    assert show("rota_oldest_running_seconds", {"queue": "default"}) == pytest.approx(7200, abs=5)
    assert (metric_value(gauges, "rota_jobs_unclaimable"), metric_value(gauges, "rota_leases_expired")) == (20, 1)
    assert metric_value(gauges, "rota_jobs_capped") == 1
    assert 10 <= (show("rota_jobs", {"queue": "default", "state": "future"}) or 0) <= 500


async def test_a_row_inserted_with_a_past_run_at_does_not_hide_an_older_job(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lag counts from the later of run_at and created_at, also if the first index entry is a back-dated row."""
    monkeypatch.setattr(module, "MAX_COUNTED_JOBS", 2)
    await make_jobs(conn, 3, run_at=timedelta(days=-3))
    old, *_ = await make_jobs(conn, 1, run_at=timedelta(hours=-1))
    await conn.execute("update rota.jobs set created_at = run_at where job_id = $1", old.job_id)
    await gauges.run_once()
    show = gauges._telemetry.registry.get_sample_value
    assert show("rota_oldest_due_seconds", {"queue": "default", "priority": "5"}) == pytest.approx(3600, abs=5)


async def test_invented_names_do_not_hide_the_jobs_of_registered_queues(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is bounded, so it begins with the queues and handlers that daemons have registered."""
    monkeypatch.setattr(module, "MAX_COUNTED_JOBS", 10)
    monkeypatch.setattr(module, "MAX_SEARCHED_LANES", 5)
    await register_daemon(conn, handlers=["send_receipt"], queues=["zone"])
    await make_handler(conn, "send_receipt")
    await conn.execute(
        "insert into rota.jobs (handler, queue) select 'a' || n, 'a' || n from generate_series(1, 300) as n"
    )
    await make_jobs(conn, 4, handler="send_receipt", queue="zone", run_at=timedelta(hours=-1))
    await make_jobs(conn, 2, handler="send_receipt", queue="default")
    await conn.execute("update rota.jobs set created_at = run_at where run_at < now()")
    await gauges.run_once()

    assert gauges._telemetry.registry.get_sample_value(
        "rota_oldest_due_seconds", {"queue": "other", "priority": "5"}
    ) == (pytest.approx(3600, abs=5))
    assert metric_value(gauges, "rota_jobs_unserved") == 2
    assert (metric_value(gauges, "rota_jobs_unclaimable") or 0) >= 5


async def test_rows_with_extreme_instants_do_not_break_the_gauges(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored rows, and rows written by the owner, may contain any instant."""
    for constraint in await conn.fetch(
        "select conname from pg_constraint where conrelid = 'rota.jobs'::regclass and contype = 'c'"
    ):
        await conn.execute(f'alter table rota.jobs drop constraint "{constraint[0]}"')
    await make_jobs(conn, 2)
    await make_running_job(conn)
    await conn.execute("alter table rota.jobs disable trigger user")
    for instant in ("-infinity", "infinity", "4713-01-01 BC", "294276-12-31"):
        await conn.execute(
            "update rota.jobs set run_at = $1::text::timestamptz, created_at = $1::text::timestamptz, "
            "lease_expires_at = $1::text::timestamptz, started_at = $1::text::timestamptz",
            instant,
        )
        for limit in (100, 1):
            monkeypatch.setattr(module, "MAX_COUNTED_JOBS", limit)
            await gauges.run_once()


async def test_a_daemon_that_is_cut_off_reports_no_outdated_values(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still reports what it knows without the database, and the age of the last sample."""
    await make_jobs(conn, 1)
    telemetry = gauges._telemetry
    local = LocalGauges(telemetry, Running({"default": 1}, Wake(), grace=1), ServiceMonitor(), lambda: gauges)
    await gauges.run_once()
    await local.run_once()
    assert metric_value(gauges, "rota_leases_expired") == 0

    monkeypatch.setattr(gauges, "valid_until", 0.0)
    await local.run_once()
    page = generate_latest(telemetry.registry).decode()
    sampled = ("rota_jobs", "rota_oldest", "rota_leases_expired", "rota_dead", "rota_schedules", "rota_nodes")
    assert not [line for line in page.splitlines() if line.startswith(sampled)]
    assert {"rota_slots", "rota_sample_age_seconds"} <= {re.split(r"[{ ]", line)[0] for line in page.splitlines()}

    await gauges.run_once()
    await local.run_once()
    assert metric_value(gauges, "rota_leases_expired") == 0


async def test_due_jobs_under_a_limit_are_counted_apart(conn: Connection[Record], gauges: Gauges) -> None:
    """They don't show that the fleet lags: they wait for a permit. Both ways of counting agree."""
    await conn.execute("select rota.set_limit('tenant:*', 1); select rota.set_limit('handler:shared', 1)")
    await conn.execute("select rota.hold_limit('held', now() + interval '1 hour')")
    await make_jobs(conn, 3, limit_key="tenant:1")
    await make_jobs(conn, 2, limit_key="held")
    await make_jobs(conn, 4, handler="shared")
    await make_jobs(conn, 5, limit_key="free")
    await make_jobs(conn, 6, limit_key="tenant:2", run_at=timedelta(hours=1))
    for counted in (100, 15):
        backlog = await reports.summarise_live_jobs(conn, counted=counted)
        lanes = [*backlog.lanes, *backlog.unnamed]
        totals = {name: sum(getattr(lane, name) for lane in lanes) for name in ("due", "limited", "future")}
        assert totals == {"due": 5, "limited": 9, "future": 6}, counted
        assert backlog.at_least is (counted == 15)
    await gauges.run_once()
    metrics = gauges._telemetry.registry
    assert metrics.get_sample_value("rota_jobs_limited", {"queue": "default"}) == 9
    assert metrics.get_sample_value("rota_jobs", {"queue": "default", "state": "due"}) == 5
