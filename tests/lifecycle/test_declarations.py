"""Schedules declared in code: a start of the daemon applies them, and leaves to people what is theirs."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from daemon_queries import dump_all_tables
from in_process_daemons import run_node
from rota import App
from rota.services import declarations
from schedule_rows import clock, dispositions, make_due, make_schedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection, Record

    from rota.domain.declaration import Step
    from servers import Database

HOUR = timedelta(hours=1)


def shop(cron: str | None = "0 6 * * *", *, name: str = "shop", release: str | None = None, **columns: Any) -> App:
    """An app with one handler and, unless cron is None, one schedule."""
    app = App(name, release=release)

    async def report(job: Any) -> None:
        del job

    app.handler(f"{name}.report")(report)
    if cron is not None:
        app.schedule(cron, **{"name": "morning", **columns})(report)
    return app


async def start(conn: Connection[Record], app: App, **options: bool) -> Sequence[Step]:
    """What a daemon of that app does at its start."""
    return await declarations.apply(conn, app=app.name, release=app.release, declarations=app.schedules, **options)


async def became(conn: Connection[Record], app: App, **options: bool) -> dict[str, str]:
    """The same, told by name."""
    return {step.name: step.what for step in await start(conn, app, **options)}


async def morning(conn: Connection[Record]) -> Record:
    """The schedule's row."""
    row = await conn.fetchrow("select * from rota.schedules where name = 'morning'")
    assert row is not None
    return row


async def test_a_start_inserts_what_is_missing_and_a_restart_writes_nothing(conn: Connection[Record]) -> None:
    """Of a thousand restarts not one is an edit."""
    app = shop(
        timezone="Europe/Berlin", payload={"n": 1e22}, jitter=timedelta(minutes=5), meta={"team": "a"}, priority=2
    )
    assert await became(conn, app) == {"morning": "inserted"}
    row = await morning(conn)
    assert (row["cron"], row["timezone"], row["handler"]) == ("0 6 * * *", "Europe/Berlin", "shop.report")
    assert (row["jitter"], row["priority"], row["declared_by"]) == (timedelta(minutes=5), 2, "shop")
    assert json.loads(row["payload"]) == {"n": 1e22}
    before = await dump_all_tables(conn)
    assert await became(conn, app) == {"morning": "unchanged"}
    assert await dump_all_tables(conn) == before


async def test_a_change_in_the_code_fires_nothing(conn: Connection[Record]) -> None:
    """It is an edit as any other: what was due and not decided is recorded, what comes next is planned from now on."""
    await start(conn, shop())
    made = (await morning(conn))["schedule_id"]
    await make_due(conn, made)
    version = (await clock(conn, made))["version"]
    assert await became(conn, shop("0 7 * * *")) == {"morning": "updated"}
    assert (await clock(conn, made))["version"] == version + 1
    assert await dispositions(conn) == ["skipped_edit"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


async def test_a_change_that_has_nothing_to_do_with_time_is_no_edit_of_it(conn: Connection[Record]) -> None:
    """Else a new description would void what is due at that moment."""
    await start(conn, shop())
    made = (await morning(conn))["schedule_id"]
    due = await make_due(conn, made)
    await start(conn, shop(description="for the shops", release="2"))
    assert (await clock(conn, made))["next_fire_at"] == due
    assert (await morning(conn))["description"] == "for the shops"


async def test_what_operators_have_edited_or_paused_survives(conn: Connection[Record]) -> None:
    """Restarts, and changes of the declaration elsewhere: only what has changed in the code is written."""
    await start(conn, shop(priority=3))
    await conn.execute(
        "update rota.schedules set cron = '30 5 * * *', priority = 1; select rota.pause_schedule('morning')"
    )
    assert await became(conn, shop(priority=3)) == {"morning": "unchanged"}
    assert await became(conn, shop(priority=3, overlap="allow")) == {"morning": "updated"}
    row = await morning(conn)
    assert (row["cron"], row["priority"], row["paused"], row["overlap"]) == ("30 5 * * *", 1, True, "allow")
    await start(conn, shop("0 8 * * *", priority=3, overlap="allow"))
    row = await morning(conn)
    assert (row["cron"], row["priority"], row["paused"]) == ("0 8 * * *", 1, True)


async def test_an_older_release_changes_nothing(conn: Connection[Record]) -> None:
    """While old and new run side by side, a restart of an old one must not take the new one's change back."""
    assert await became(conn, shop("0 7 * * *", release="2")) == {"morning": "inserted"}
    assert await became(conn, shop("0 6 * * *", release="1")) == {"morning": "newer_release"}
    assert await became(conn, shop(None, release="1"), prune=True) == {"morning": "newer_release"}
    assert (await morning(conn))["cron"] == "0 7 * * *"
    assert await became(conn, shop("0 6 * * *", release="1"), force=True) == {"morning": "updated"}
    assert (await morning(conn))["cron"] == "0 6 * * *"


async def test_two_services_share_a_database(conn: Connection[Record]) -> None:
    """Neither prunes, edits or takes over what the other has declared."""
    await start(conn, shop())
    other = shop("0 9 * * *", name="billing")
    assert await became(conn, other, prune=True) == {"morning": "not_ours"}
    assert (await morning(conn))["declared_by"] == "shop"
    assert await became(conn, other, dry_run=True) == {"morning": "not_ours"}


async def test_what_is_no_longer_declared_goes_only_when_asked(conn: Connection[Record]) -> None:
    """A forgotten import must not cost a schedule; made by hand, it is nobody's to prune."""
    await start(conn, shop())
    await make_schedule(conn, "by hand")
    assert await became(conn, shop(None)) == {"morning": "undeclared"}
    assert await became(conn, shop(None), prune=True, dry_run=True) == {"morning": "undeclared"}
    assert await conn.fetchval("select count(*) from rota.schedules") == 2
    assert await became(conn, shop(None), prune=True) == {"morning": "undeclared"}
    assert await conn.fetchval("select array_agg(name) from rota.schedules") == ["by hand"]
    assert await conn.fetchval("select reason from rota.audit where action = 'remove'") is not None


async def test_a_dry_run_writes_nothing(conn: Connection[Record]) -> None:
    """It says what would be."""
    before = await dump_all_tables(conn)
    assert await became(conn, shop(), dry_run=True) == {"morning": "inserted"}
    assert await dump_all_tables(conn) == before


async def test_what_the_server_refuses_keeps_nothing_else_out(conn: Connection[Record]) -> None:
    """And is told of by the rule that it breaks."""
    app = shop(priority=99)
    app.schedule("0 7 * * *", name="fine", handler="shop.report")
    refused, fine = sorted(await start(conn, app), key=lambda step: step.name, reverse=True)
    assert (refused.what, refused.why) == ("refused", "priority must lie between 0 (first) and 9 (last)")
    assert fine.what == "inserted"


async def test_what_somebody_keeps_locked_is_told_of_as_not_written(
    database: Database, conn: Connection[Record]
) -> None:
    """A console left open on the row must neither hold up a start nor have it say that the new expression is in force."""
    await start(conn, shop())
    async with database.connect() as other, other.transaction():
        await other.execute("update rota.schedules set description = 'mine'")
        (step,) = await start(conn, shop("0 7 * * *"))
        assert (step.what, step.why) == ("refused", "somebody holds it locked, or keeps changing it: sync again")
    assert await became(conn, shop("0 7 * * *")) == {"morning": "updated"}
    assert ((await morning(conn))["cron"], (await morning(conn))["description"]) == ("0 7 * * *", "mine")


async def test_ten_daemons_that_start_at_once_write_each_schedule_once(
    database: Database, conn: Connection[Record]
) -> None:
    """Losers see what is there by then; nobody waits for a row, and nobody deadlocks."""
    app = shop(None)
    for number in range(50):
        app.schedule("0 6 * * *", name=f"s{number}", handler="shop.report", priority=3)

    async def node(app: App) -> Sequence[Step]:
        async with database.connect() as own:
            return await start(own, app)

    for _ in range(2):
        told = await asyncio.gather(*(node(app) for _ in range(10)))
        whats = [step.what for steps in told for step in steps]
        assert whats.count("inserted") + whats.count("updated") == 50
        app = shop(None)
        for number in range(50):
            app.schedule("0 6 * * *", name=f"s{number}", handler="shop.report", priority=4)
    assert await conn.fetchval("select count(*) from rota.schedules where priority = 4") == 50
    assert await conn.fetchval("select array_agg(distinct version) from rota.schedule_clocks") == [1]


async def test_a_daemon_applies_its_declarations_before_it_claims(conn: Connection[Record], database: Database) -> None:
    """And tells of what it has left alone."""
    await make_schedule(conn, "taken")
    app = shop(every=None)
    app.schedule("0 6 * * *", name="taken", handler="shop.report")
    async with run_node(database.dsn, app) as running:
        assert running.events_named("schedule.inserted")[0]["schedule"] == "morning"
        assert running.events_named("schedule.left_alone")[0]["schedule"] == "taken"
    assert (await morning(conn))["declared_by"] == "shop"


@pytest.mark.parametrize("declared", [True, False])
async def test_watched_schedules_have_a_time_series_of_their_own_if_code_declares_them(
    conn: Connection[Record], database: Database, declared: bool
) -> None:
    """A name that somebody has inserted is no label: the one that has waited longest stands for them all, as other."""
    if not declared:
        await make_schedule(conn, "by hand", expect_success_within=HOUR)
        await make_schedule(conn, "by hand, too", expect_success_within=HOUR)
    app = shop(expect_success_within=HOUR) if declared else shop(None)
    async with run_node(database.dsn, app) as running:
        await running.wait_for_event("service.ran", service="gauges")
        metrics = running.daemon.telemetry.registry
        name = "rota_schedule_last_success_timestamp_seconds"
        assert metrics.get_sample_value(name, {"schedule": "morning" if declared else "other"}) is not None
        assert metrics.get_sample_value(name, {"schedule": "by hand"}) is None
        assert metrics.get_sample_value("rota_schedules", {"state": "ok"}) == (1 if declared else 2)
        assert metrics.get_sample_value("rota_schedules", {"state": "invalid"}) == 0
