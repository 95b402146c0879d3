"""What a daemon tells of the whole installation: due jobs that nobody would claim."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest
from prometheus_client import generate_latest

from factories import make_handler, make_jobs, make_running_job
from rota.inline import Lent
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

    monkeypatch.setattr(module, "WARN_AGAIN_SECONDS", 0.0)
    await gauges.run_once()
    assert len(warnings()) == 4


async def test_age_and_coverage_are_exact_however_many_jobs_there_are(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that are due next year must not hide the few that nobody claims; only counts may become lower bounds."""
    monkeypatch.setattr(module, "COUNTED", 400)
    await alive(conn, handlers=["send_receipt"], queues=["default"])
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
    assert (shown(gauges, "rota_jobs_unclaimable"), shown(gauges, "rota_leases_expired")) == (20, 1)
    assert shown(gauges, "rota_jobs_capped") == 1
    assert 10 <= (show("rota_jobs", {"queue": "default", "state": "future"}) or 0) <= 500


async def test_a_row_inserted_with_a_run_at_in_the_past_hides_no_older_one(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lag counts from the later of run_at and creation, also where the first index entry is a back-dated row."""
    monkeypatch.setattr(module, "COUNTED", 2)
    await make_jobs(conn, 3, run_at=timedelta(days=-3))
    old, *_ = await make_jobs(conn, 1, run_at=timedelta(hours=-1))
    await conn.execute("update rota.jobs set created_at = run_at where job_id = $1", old.job_id)
    await gauges.run_once()
    show = gauges._telemetry.registry.get_sample_value
    assert show("rota_oldest_due_seconds", {"queue": "default", "priority": "5"}) == pytest.approx(3600, abs=5)


async def test_names_that_a_client_makes_up_hide_no_registered_lane(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for lanes is bounded, so what daemons have registered and serve is looked at first."""
    monkeypatch.setattr(module, "COUNTED", 10)
    monkeypatch.setattr(module, "EXPLORED", 5)
    await alive(conn, handlers=["send_receipt"], queues=["zone"])
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
    assert shown(gauges, "rota_jobs_unserved") == 2
    assert (shown(gauges, "rota_jobs_unclaimable") or 0) >= 5


async def test_no_row_with_an_odd_instant_costs_the_gauges(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Restored rows and rows of an owner may hold any instant, small table or large."""
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
        for most in (100, 1):
            monkeypatch.setattr(module, "COUNTED", most)
            await gauges.run_once()


async def test_a_daemon_that_is_cut_off_shows_no_old_values(
    conn: Connection[Record], gauges: Gauges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last value of a lag may well be 0. What the daemon knows by itself is still shown, and the age of the sample."""
    await make_jobs(conn, 1)
    telemetry = gauges._telemetry
    local = LocalGauges(telemetry, Running({"default": 1}, Wake(), grace=1), ServiceMonitor(), lambda: gauges)
    await gauges.run_once()
    await local.run_once()
    assert shown(gauges, "rota_leases_expired") == 0
    monkeypatch.setattr(gauges, "valid_until", 0.0)
    await local.run_once()
    page = generate_latest(telemetry.registry).decode()
    sampled = ("rota_jobs", "rota_oldest", "rota_leases_expired", "rota_dead", "rota_schedules", "rota_nodes")
    assert not [line for line in page.splitlines() if line.startswith(sampled)]
    assert {"rota_slots", "rota_sample_age_seconds"} <= {re.split(r"[{ ]", line)[0] for line in page.splitlines()}
    await gauges.run_once()
    await local.run_once()
    assert shown(gauges, "rota_leases_expired") == 0
