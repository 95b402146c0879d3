"""Schedules declared in code: each start of a daemon applies them and keeps the edits of operators."""

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
from schedule_rows import make_due, make_schedule, open_transaction, read_clock, read_dispositions

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


async def apply_declarations(conn: Connection[Record], app: App, **options: bool) -> Sequence[Step]:
    """Apply the app's declarations as a daemon does at its start."""
    return await declarations.apply(conn, app=app.name, release=app.release, declarations=app.schedules, **options)


async def apply_and_return_steps(conn: Connection[Record], app: App, **options: bool) -> dict[str, str]:
    """Apply the app's declarations and return schedule name -> what was done."""
    return {step.name: step.what for step in await apply_declarations(conn, app, **options)}


async def morning(conn: Connection[Record]) -> Record:
    """The row of the schedule `morning`."""
    row = await conn.fetchrow("select * from rota.schedules where name = 'morning'")
    assert row is not None
    return row


async def test_the_first_start_inserts_missing_schedules_and_a_restart_writes_nothing(conn: Connection[Record]) -> None:
    app = shop(
        timezone="Europe/Berlin", payload={"n": 1e22}, jitter=timedelta(minutes=5), meta={"team": "a"}, priority=2
    )
    assert await apply_and_return_steps(conn, app) == {"morning": "inserted"}

    row = await morning(conn)
    assert (row["cron"], row["timezone"], row["handler"]) == ("0 6 * * *", "Europe/Berlin", "shop.report")
    assert (row["jitter"], row["priority"], row["declared_by"]) == (timedelta(minutes=5), 2, "shop")
    assert json.loads(row["payload"]) == {"n": 1e22}

    before = await dump_all_tables(conn)
    assert await apply_and_return_steps(conn, app) == {"morning": "unchanged"}
    assert await dump_all_tables(conn) == before


async def test_a_changed_expression_is_an_edit_and_fires_nothing(conn: Connection[Record]) -> None:
    """A due instant that was not decided is recorded as skipped_edit, and the next fire is planned from now on."""
    await apply_declarations(conn, shop())
    schedule_id = (await morning(conn))["schedule_id"]
    await make_due(conn, schedule_id)
    version = (await read_clock(conn, schedule_id))["version"]
    assert await apply_and_return_steps(conn, shop("0 7 * * *")) == {"morning": "updated"}
    assert (await read_clock(conn, schedule_id))["version"] == version + 1
    assert await read_dispositions(conn) == ["skipped_edit"]
    assert await conn.fetchval("select count(*) from rota.jobs") == 0


async def test_a_changed_description_keeps_the_next_fire(conn: Connection[Record]) -> None:
    """Otherwise a new description would skip an instant that is due."""
    await apply_declarations(conn, shop())
    schedule_id = (await morning(conn))["schedule_id"]
    due = await make_due(conn, schedule_id)
    await apply_declarations(conn, shop(description="for the shops", release="2"))
    assert (await read_clock(conn, schedule_id))["next_fire_at"] == due
    assert (await morning(conn))["description"] == "for the shops"


async def test_a_restart_keeps_what_operators_have_edited_or_paused(conn: Connection[Record]) -> None:
    """Only the options that have changed in the code are written."""
    await apply_declarations(conn, shop(priority=3))
    await conn.execute(
        "update rota.schedules set cron = '30 5 * * *', priority = 1; select rota.pause_schedule('morning')"
    )
    assert await apply_and_return_steps(conn, shop(priority=3)) == {"morning": "unchanged"}
    assert await apply_and_return_steps(conn, shop(priority=3, overlap="allow")) == {"morning": "updated"}

    row = await morning(conn)
    assert (row["cron"], row["priority"], row["paused"], row["overlap"]) == ("30 5 * * *", 1, True, "allow")

    await apply_declarations(conn, shop("0 8 * * *", priority=3, overlap="allow"))
    row = await morning(conn)
    assert (row["cron"], row["priority"], row["paused"]) == ("0 8 * * *", 1, True)


async def test_a_start_of_an_older_release_changes_nothing(conn: Connection[Record]) -> None:
    """While two releases run side by side, a restart of the older one must not undo the change of the newer one."""
    assert await apply_and_return_steps(conn, shop("0 7 * * *", release="2")) == {"morning": "inserted"}
    assert await apply_and_return_steps(conn, shop("0 6 * * *", release="1")) == {"morning": "newer_release"}
    assert await apply_and_return_steps(conn, shop(None, release="1"), prune=True) == {"morning": "newer_release"}
    assert (await morning(conn))["cron"] == "0 7 * * *"
    assert await apply_and_return_steps(conn, shop("0 6 * * *", release="1"), force=True) == {"morning": "updated"}
    assert (await morning(conn))["cron"] == "0 6 * * *"


async def test_two_services_on_one_database_leave_each_others_schedules_alone(conn: Connection[Record]) -> None:
    """Neither prunes, edits or takes over a schedule that the other has declared."""
    await apply_declarations(conn, shop())
    other = shop("0 9 * * *", name="billing")
    assert await apply_and_return_steps(conn, other, prune=True) == {"morning": "not_ours"}
    assert (await morning(conn))["declared_by"] == "shop"
    assert await apply_and_return_steps(conn, other, dry_run=True) == {"morning": "not_ours"}


async def test_a_schedule_that_is_no_longer_declared_is_removed_only_with_prune(conn: Connection[Record]) -> None:
    """A forgotten import must not remove a schedule, and schedules made by hand are never pruned."""
    await apply_declarations(conn, shop())
    await make_schedule(conn, "by hand")
    assert await apply_and_return_steps(conn, shop(None)) == {"morning": "undeclared"}
    assert await apply_and_return_steps(conn, shop(None), prune=True, dry_run=True) == {"morning": "undeclared"}
    assert await conn.fetchval("select count(*) from rota.schedules") == 2
    assert await apply_and_return_steps(conn, shop(None), prune=True) == {"morning": "undeclared"}
    assert await conn.fetchval("select array_agg(name) from rota.schedules") == ["by hand"]
    assert await conn.fetchval("select reason from rota.audit where action = 'remove'") is not None


async def test_a_dry_run_reports_the_steps_and_writes_nothing(conn: Connection[Record]) -> None:
    before = await dump_all_tables(conn)
    assert await apply_and_return_steps(conn, shop(), dry_run=True) == {"morning": "inserted"}
    assert await dump_all_tables(conn) == before


async def test_a_declaration_that_the_server_rejects_is_reported_and_the_others_are_written(
    conn: Connection[Record],
) -> None:
    app = shop(priority=99)
    app.schedule("0 7 * * *", name="fine", handler="shop.report")
    refused, accepted = sorted(await apply_declarations(conn, app), key=lambda step: step.name, reverse=True)
    assert (refused.what, refused.why) == ("refused", "priority must lie between 0 (first) and 9 (last)")
    assert accepted.what == "inserted"


async def test_a_locked_schedule_is_reported_as_refused_and_does_not_delay_the_start(
    database: Database, conn: Connection[Record]
) -> None:
    """The report must not claim that the new expression is in force."""
    await apply_declarations(conn, shop())
    async with database.connect() as other, other.transaction():
        await other.execute("update rota.schedules set description = 'mine'")
        (step,) = await apply_declarations(conn, shop("0 7 * * *"))
        assert (step.what, step.why) == ("refused", "another session keeps it locked, or keeps changing it: sync again")
    assert await apply_and_return_steps(conn, shop("0 7 * * *")) == {"morning": "updated"}
    assert ((await morning(conn))["cron"], (await morning(conn))["description"]) == ("0 7 * * *", "mine")


async def test_a_name_in_an_open_transaction_is_refused_and_delays_no_start(
    database: Database, conn: Connection[Record]
) -> None:
    """Any client may insert a schedule with the name that an app declares, and leave its transaction open."""
    app = App("many")

    @app.handler("many.report")
    async def report(job: Any) -> None: ...

    for number in range(40):
        app.schedule("0 6 * * *", name=f"s{number}")(report)
    insert = "insert into rota.schedules (name, handler, every) values ('s7', 'x', '1 h')"
    async with open_transaction(database, insert):
        steps = await apply_and_return_steps(conn, app)
    assert {name for name, what in steps.items() if what == "refused"} == {"s7"}
    assert await conn.fetchval("select count(*) from rota.schedules") == 39


async def test_ten_daemons_that_start_together_write_each_schedule_once(
    database: Database, conn: Connection[Record]
) -> None:
    """No daemon waits for a locked row, and there is no deadlock."""
    app = shop(None)
    for number in range(50):
        app.schedule("0 6 * * *", name=f"s{number}", handler="shop.report", priority=3)

    async def node(app: App) -> Sequence[Step]:
        async with database.connect() as own:
            return await apply_declarations(own, app)

    for _ in range(2):
        steps_by_node = await asyncio.gather(*(node(app) for _ in range(10)))
        actions = [step.what for steps in steps_by_node for step in steps]
        assert actions.count("inserted") + actions.count("updated") == 50
        app = shop(None)
        for number in range(50):
            app.schedule("0 6 * * *", name=f"s{number}", handler="shop.report", priority=4)
    assert await conn.fetchval("select count(*) from rota.schedules where priority = 4") == 50
    assert await conn.fetchval("select array_agg(distinct version) from rota.schedule_clocks") == [1]


async def test_a_daemon_applies_its_declarations_at_its_start_and_logs_what_it_left_alone(
    conn: Connection[Record], database: Database
) -> None:
    await make_schedule(conn, "taken")
    app = shop(every=None)
    app.schedule("0 6 * * *", name="taken", handler="shop.report")
    async with run_node(database.dsn, app) as running:
        assert running.events_named("schedule.inserted")[0]["schedule"] == "morning"
        assert running.events_named("schedule.left_alone")[0]["schedule"] == "taken"
    assert (await morning(conn))["declared_by"] == "shop"


@pytest.mark.parametrize("declared", [True, False])
async def test_only_declared_schedules_have_a_success_metric_of_their_own(
    conn: Connection[Record], database: Database, declared: bool
) -> None:
    """All others share the label `other`, whose value is that of the schedule with the oldest success."""
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


def limited(*, release: str | None = None, key: str = "handler", **limits: Any) -> App:
    """An app with one handler and its limits."""
    app = App("shop", release=release)
    app.handler(key, **limits)(lambda _: None)
    return app


async def apply_limits(conn: Connection[Record], app: App, **options: bool) -> dict[str, str]:
    """Apply the app's limits as a daemon does at its start, and return key -> what was done."""
    steps = await declarations.apply(
        conn, declarations.LIMITS, app=app.name, release=app.release, declarations=app.limits, **options
    )
    return {step.name: step.what for step in steps}


async def test_declared_limits_follow_the_rules_of_declared_schedules(conn: Connection[Record]) -> None:
    """An operator's edits survive a restart and a change of other values, and a limit set by hand is never taken over."""
    minute = timedelta(minutes=1)
    assert await apply_limits(conn, limited(max_running=3, max_starts=10, per=minute)) == {
        "handler:handler": "inserted"
    }
    await conn.execute("update rota.limits set max_running = 1, weight = null, note = 'by hand'")
    same = limited(max_running=3, max_starts=10, per=minute)
    assert await apply_limits(conn, same) == {"handler:handler": "unchanged"}
    assert await apply_limits(conn, limited(max_running=3, max_starts=20, per=minute, release="2")) == {
        "handler:handler": "updated"
    }
    row = await conn.fetchrow("select * from rota.limits")
    assert row is not None
    assert (row["max_running"], row["max_starts"], row["per"], row["note"]) == (1, 20, minute, "by hand")
    assert await apply_limits(conn, limited(max_running=9, release="1")) == {"handler:handler": "newer_release"}
    assert await apply_limits(conn, limited(release="2")) == {"handler:handler": "undeclared"}
    await conn.execute("select rota.set_limit('handler:mine', 5)")
    mine = limited(key="mine", max_running=1)
    assert await apply_limits(conn, mine, prune=True) == {"handler:handler": "undeclared", "handler:mine": "not_ours"}
    assert await conn.fetchval("select array_agg(key) from rota.limits") == ["handler:mine"]
    assert await apply_limits(conn, mine, force=True) == {"handler:mine": "updated"}
    assert await conn.fetchval("select max_running from rota.limits") == 1


async def test_a_starting_daemon_declares_the_limits_of_its_handlers(
    database: Database, conn: Connection[Record]
) -> None:
    """With the rights of rota_daemon, which are tested elsewhere."""
    async with run_node(database.dsn, limited(max_running=2)) as running:
        assert running.events_named("limit.inserted")[0]["limit"] == "handler:handler"
    assert await conn.fetchval("select max_running from rota.limits where declared_by = 'shop'") == 2
