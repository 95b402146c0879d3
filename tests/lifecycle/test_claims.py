"""Claims: which jobs a node gets, in which order, and when it asks for them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import rota
import rota.services.presence as presence_module
from factories import without_check_constraints
from in_process_daemons import final_outcome, insert_job, ledger_rows, live_row, run_node, wait_for_claim
from rota.db import queries, server_reports
from rota.lifecycle import lanes, refused_jobs
from schedule_rows import make_schedule
from waiting import eventually

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


def recording_app(order: list[int], **declared: Any) -> rota.App:
    """An app whose handler `record` appends each job id to `order`."""
    app = rota.App("recording")

    @app.handler("record", **declared)
    async def record(job: rota.Job[Any]) -> None:
        order.append(job.job_id)

    return app


async def test_jobs_run_by_priority_and_then_by_age(database: Database, conn: Connection[Record]) -> None:
    """Smaller priority numbers run first; among equals the oldest job runs first."""
    order: list[int] = []
    async with conn.transaction():
        jobs = {
            (priority, age): await insert_job(
                conn, "record", priority=priority, run_at=f"now() - interval '{age} minutes'"
            )
            for priority, age in [(5, 1), (9, 9), (0, 1), (5, 3), (0, 2)]
        }
    async with run_node(database.dsn, recording_app(order), queues="default:1"):
        for job_id in jobs.values():
            await final_outcome(conn, job_id)

    assert order == [jobs[key] for key in [(0, 2), (0, 1), (5, 3), (5, 1), (9, 9)]]


@pytest.mark.parametrize("queues", ["default:1", "default:1,*:5"])
async def test_urgent_work_overtakes_a_backlog_within_a_poll(
    database: Database, conn: Connection[Record], queues: str
) -> None:
    """A queue that fills every free slot must not hide more urgent jobs while its backlog lasts.

    C9: free slots of another group must not count as a search of this one.
    """
    app = rota.App("busy")
    order: list[int] = []
    pace = asyncio.Semaphore(0)

    @app.handler("work")
    async def work(job: rota.Job[Any]) -> None:
        order.append(job.job_id)
        await pace.acquire()

    async with run_node(database.dsn, app, queues=queues) as node:
        async with conn.transaction():
            for _ in range(300):
                await insert_job(conn, "work")
        await node.wait_for_event("jobs.claimed")
        for _ in range(20):
            pace.release()
        await eventually(lambda: len(order) > 20, what="a steady pace")
        urgent = await insert_job(conn, "work", priority=0)
        swept = len(order)
        for _ in range(10):  # each iteration frees one slot, which causes one claim
            before = len(order)
            await node.wait_for_turns("trust", 2)
            pace.release()
            await eventually(partial(lambda before: len(order) > before, before), what="the next job")
            if urgent in order:
                break

        assert urgent in order[swept:]


async def test_a_node_claims_no_more_than_it_can_start(database: Database, conn: Connection[Record]) -> None:
    """A claimed job that waits for a slot cannot run on another node."""
    app = rota.App("slots")
    go = asyncio.Event()

    @app.handler("wait")
    async def wait(_: rota.Job[Any]) -> None:
        await go.wait()

    async with run_node(database.dsn, app, queues="default:3,other:1") as node:
        async with conn.transaction():
            jobs = [await insert_job(conn, "wait") for _ in range(10)]
            jobs += [await insert_job(conn, "wait", queue="'other'") for _ in range(5)]
        running = "select queue, count(*) from rota.jobs where state = 'running' group by 1 order by 1"

        async def is_full() -> bool:
            return [tuple(each) for each in await conn.fetch(running)] == [("default", 3), ("other", 1)]

        await eventually(is_full, what="the jobs in every slot")
        await node.wait_for_turns("reaper", 2)
        assert await is_full()
        assert sum(event["count"] for event in node.events_named("jobs.claimed")) == 4

        go.set()
        for job_id in jobs:
            await final_outcome(conn, job_id)


async def test_jobs_without_a_registered_handler_are_not_claimed(database: Database, conn: Connection[Record]) -> None:
    """They wait for a node that has the handler, and use no attempt."""
    order: list[int] = []
    async with run_node(database.dsn, recording_app(order)) as node:
        foreign = await insert_job(conn, "foreign")
        await final_outcome(conn, await insert_job(conn, "record"))
        await node.wait_for_turns("dispatcher")
        assert (await live_row(conn, foreign))["attempt"] == 0


async def test_deleted_handler_rows_are_registered_again(database: Database, conn: Connection[Record]) -> None:
    """Without its row in rota.handlers, no job of a handler can be claimed, and no error would say so."""
    order: list[int] = []
    async with run_node(database.dsn, recording_app(order)):
        await conn.execute("delete from rota.handlers")
        assert await final_outcome(conn, await insert_job(conn, "record"), within=12) == "succeeded"


async def test_a_notification_during_the_claim_is_not_lost(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wake flag is cleared before the claim is sent, so a later notification causes another claim."""
    order: list[int] = []
    inserted: list[int] = []
    real = queries.claim_due_jobs

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await real(*args, **kwargs)
        if order and len(inserted) == 2:  # the claim's snapshot is older than this insert
            inserted.append(await insert_job(conn, "record", queue="'late'"))
        return answer

    async with run_node(database.dsn, recording_app(order), poll_interval="1m", queues="default:5,late:5") as node:
        await node.wait_for_event("listener.up")
        inserted.append(await insert_job(conn, "record"))
        assert await final_outcome(conn, inserted[0], within=5) == "succeeded"
        monkeypatch.setattr(queries, "claim_due_jobs", slow)
        inserted.append(await insert_job(conn, "record"))
        await eventually(lambda: len(order) == 3, within=5, what="the job inserted during the claim")

    assert order == inserted


async def test_queues_of_unknown_handlers_delay_no_other_queue(database: Database, conn: Connection[Record]) -> None:
    """Any client may insert jobs that no daemon can run, in as many queues as it likes."""
    order: list[int] = []
    await conn.execute(
        "insert into rota.jobs (handler, queue) select 'nobody', 'q' || n from generate_series(1, 8000) as n"
    )
    async with run_node(database.dsn, recording_app(order), queues="default:5,*:5", poll_interval="200ms") as node:
        await node.wait_for_turns("dispatcher", 3)
        await conn.execute("alter table rota.jobs disable trigger wake")  # only a poll can find the job
        assert await final_outcome(conn, await insert_job(conn, "record", queue="'z'"), within=4) == "succeeded"


async def test_an_idle_poll_finds_a_new_queue_without_listing_queues(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle daemon with shared slots sends one statement per poll and still finds every queue."""
    order: list[int] = []
    listed: list[list[str]] = []
    real = queries.list_queues

    async def counted(*args: Any, **kwargs: Any) -> list[queries.ListedQueue]:
        found = await real(*args, **kwargs)
        listed.append([queue for queue, _ in found])
        return found

    monkeypatch.setattr(queries, "list_queues", counted)
    monkeypatch.setattr(lanes, "LIST_SECONDS", 3600.0)

    async with run_node(database.dsn, recording_app(order), queues="default:5,*:5") as node:
        future = await insert_job(conn, "foreign", queue="'m'", run_at="now() + interval '1 hour'")
        await eventually(lambda: listed[-1:] == [["m"]], what="the first list")
        await node.wait_for_turns("dispatcher", 3)
        before = len(listed)
        await node.wait_for_turns("dispatcher", 3)
        assert len(listed) == before
        await conn.execute("alter table rota.jobs disable trigger wake")  # only a poll can find the job
        for queue in ("'a'", "'n'", "'default'"):
            assert await final_outcome(conn, await insert_job(conn, "record", queue=queue), within=5) == "succeeded"
        assert len(listed) == before + 2

    assert len(order) == 3
    assert (await live_row(conn, future))["attempt"] == 0


async def test_future_jobs_start_at_their_instant_and_not_at_the_next_poll(
    database: Database, conn: Connection[Record]
) -> None:
    """The dispatcher sleeps until the earliest due time that the last claim reported."""
    order: list[int] = []
    async with run_node(database.dsn, recording_app(order), poll_interval="1m") as node:
        await node.wait_for_event("listener.up")
        job_id = await insert_job(conn, "record", run_at="now() + interval '700 milliseconds'")
        assert await final_outcome(conn, job_id, within=40) == "succeeded"
        (run,) = await ledger_rows(conn, job_id)
        assert timedelta(0) <= run["started_at"] - run["scheduled_for"] < timedelta(seconds=10), "a poll takes a minute"


@pytest.mark.parametrize("what", ["queue", "handler", "*"])
async def test_a_pause_takes_effect_within_a_poll_and_so_does_its_end(
    database: Database, conn: Connection[Record], what: str
) -> None:
    """Pausing a queue, a handler or everything makes jobs wait and changes nothing else about them."""
    order: list[int] = []
    kind, name = {"queue": ("queue", "default"), "handler": ("handler", "record"), "*": ("queue", "*")}[what]
    async with run_node(database.dsn, recording_app(order)) as node:
        await final_outcome(conn, await insert_job(conn, "record"))
        await conn.execute(f"select rota.pause_{kind}($1, reason => 'maintenance')", name)
        job_id = await insert_job(conn, "record")
        await node.wait_for_turns("dispatcher", 3)
        assert (await live_row(conn, job_id))["attempt"] == 0
        await conn.execute(f"select rota.resume_{kind}($1)", name)
        assert await final_outcome(conn, job_id, within=2) == "succeeded"

    assert order.count(job_id) == 1


async def test_a_job_not_started_by_start_by_expires_and_never_runs(
    database: Database, conn: Connection[Record]
) -> None:
    """This holds for unknown handlers too; a job that has started once is retried after start_by."""
    app = rota.App("late")
    calls: list[int] = []

    @app.handler("work", backoff_base=timedelta(milliseconds=700), backoff_cap=timedelta(milliseconds=700))
    async def work(job: rota.Job[Any]) -> None:
        calls.append(job.job_id)
        if job.attempt == 1:
            raise ValueError

    async with run_node(database.dsn, app):
        late = await insert_job(conn, "work", start_by="now() - interval '1 second'")
        foreign = await insert_job(conn, "foreign", start_by="now() - interval '1 second'")
        retried = await insert_job(conn, "work", start_by="now() + interval '300 milliseconds'")
        assert await final_outcome(conn, late) == "expired"
        assert await final_outcome(conn, foreign) == "expired"
        assert await final_outcome(conn, retried) == "succeeded"

    assert calls == [retried, retried]


async def test_retry_for_ends_the_retries_in_time(database: Database, conn: Connection[Record]) -> None:
    """A retry that would start after scheduled_for + retry_for is not scheduled."""
    app = rota.App("patience")

    @app.handler("fail")
    async def fail(_: rota.Job[Any]) -> None:
        raise ValueError

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "fail", retry_for="interval '1 second'")
        assert await final_outcome(conn, job_id) == "dead: expired"


async def test_a_unique_key_is_free_again_when_its_job_has_ended(database: Database, conn: Connection[Record]) -> None:
    """The key is unique among live jobs, which include running jobs and jobs waiting for a retry."""
    app = rota.App("unique")
    go = asyncio.Event()

    @app.handler("wait")
    async def wait(_: rota.Job[Any]) -> None:
        await go.wait()

    async with run_node(database.dsn, app):
        job_id = await insert_job(conn, "wait", unique_key="'k'")
        await wait_for_claim(conn, job_id)
        existing = await conn.fetchrow("select * from rota.enqueue('wait', unique_key => 'k')")
        assert tuple(existing or ()) == (job_id, False)

        go.set()
        await final_outcome(conn, job_id)
        again = await conn.fetchrow("select * from rota.enqueue('wait', unique_key => 'k')")
        assert again is not None
        assert again["created"]
        assert await final_outcome(conn, again["job_id"]) == "succeeded"


async def test_suspects_run_one_at_a_time_beside_other_jobs(database: Database, conn: Connection[Record]) -> None:
    """A job lost twice in a row runs beside no other suspect, which shows the job that kills its worker."""
    app = rota.App("suspects")
    running: set[int] = set()
    together: list[set[int]] = []
    go = asyncio.Event()
    suspects: set[int] = set()

    @app.handler("work")
    async def work(job: rota.Job[Any]) -> None:
        running.add(job.job_id)
        together.append(running & suspects)
        await go.wait()
        running.discard(job.job_id)

    async with conn.transaction():
        for _ in range(3):
            job_id = await insert_job(conn, "work")
            await conn.execute("update rota.jobs set losses = 2, attempt = 2 where job_id = $1", job_id)
            suspects.add(job_id)
        innocent = [await insert_job(conn, "work") for _ in range(3)]
    async with run_node(database.dsn, app):
        await eventually(lambda: running >= set(innocent) and running & suspects, what="one suspect and all others")
        go.set()
        for job_id in [*suspects, *innocent]:
            assert await final_outcome(conn, job_id, within=20) == "succeeded"

    assert max(len(found) for found in together) == 1


async def test_fence_tokens_never_repeat_even_after_the_sequence_was_set_back(
    database: Database, conn: Connection[Record]
) -> None:
    """Rule 3: a failover can reset a sequence; every new connection raises it before its first claim."""
    tokens: list[int] = []
    app = rota.App("tokens")

    @app.handler("work")
    async def work(job: rota.Job[Any]) -> None:
        tokens.append(job.fence_token)

    async with run_node(database.dsn, app) as node:
        for turn in range(6):
            job_id = await insert_job(conn, "work")
            assert await final_outcome(conn, job_id) == "succeeded"
            if turn % 2:
                await conn.execute(
                    """
                    select setval('rota.fence_tokens', 1);
                    select pg_terminate_backend(pid) from pg_stat_activity
                    where datname = current_database() and application_name like 'rota %' and pid <> pg_backend_pid();
                    """
                )
                await node.wait_for_event("fence_tokens.raised", times=turn // 2 + 1)

    assert tokens == sorted(set(tokens))
    assert len(tokens) == 6
    assert tokens[0] > 1_700_000_000_000_000
    assert tokens[-1] < 2**53


async def test_a_guard_rejects_an_older_token_after_a_newer_one(database: Database, conn: Connection[Record]) -> None:
    """The guard rejects an older token after a newer one, and accepts the same token again."""
    app = rota.App("guards")
    first_go, second_done = asyncio.Event(), asyncio.Event()
    log: list[str] = []

    @app.handler("write")
    async def write(job: rota.Job[Any]) -> None:
        if job.payload["n"] == 1:
            await first_go.wait()
        try:
            async with database.connect() as own_conn, own_conn.transaction():
                await job.guard(own_conn, "order:7")
                await job.guard(own_conn, "order:7")
                log.append(f"written by {job.payload['n']}")
        except rota.StaleToken:
            log.append(f"refused to {job.payload['n']}")
        if job.payload["n"] == 2:
            second_done.set()

    async with run_node(database.dsn, app):
        first = await insert_job(conn, "write", '{"n": 1}')
        await wait_for_claim(conn, first)
        second = await insert_job(conn, "write", '{"n": 2}')
        await second_done.wait()
        first_go.set()
        for job_id in (first, second):
            await final_outcome(conn, job_id)

    assert log == ["written by 2", "refused to 1"]


@pytest.mark.parametrize("others", ["'unknown handler', now()", "'record', now() + interval '1 year'"])
async def test_b45_a_due_job_is_found_whatever_the_number_of_other_queues(
    others: str, database: Database, conn: Connection[Record]
) -> None:
    """With one queue per tenant, queues late in the alphabet are served too."""
    order: list[int] = []
    await conn.execute(
        f"insert into rota.jobs (queue, handler, run_at) select 'a' || n, {others} from generate_series(1, 900) as n"
    )
    late = await insert_job(conn, "record", queue="'z'")

    async with run_node(database.dsn, recording_app(order), queues="default:5,*:5"):
        assert await final_outcome(conn, late) == "succeeded"
        later = [await insert_job(conn, "record", queue=f"'{queue}'") for queue in ("z", "zz", "a", "m")]
        for job_id in later:
            assert await final_outcome(conn, job_id) == "succeeded"

    assert sorted(order) == [late, *later]


async def test_a_row_that_rejects_its_claim_blocks_no_other_job(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's trigger raises for one row: that job is set aside for a while, and the log names it."""
    monkeypatch.setattr(refused_jobs, "SET_ASIDE_SECONDS", 0.5)
    order: list[int] = []
    await conn.execute(
        """
        create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
        create trigger refuse before update on rota.jobs for each row when (old.payload ? 'refused') execute function refuse();
        """
    )
    before = [await insert_job(conn, "record", run_at=f"now() - interval '{n} minutes'") for n in range(9, 4, -1)]
    refused = await insert_job(conn, "record", '{"refused": true}', run_at="now() - interval '4 minutes'")
    behind = await insert_job(conn, "record", run_at="now() - interval '3 minutes'")
    beside = [await insert_job(conn, "record", priority=p, queue=f"'{q}'") for p in (0, 4, 6) for q in ("default", "b")]

    async with run_node(database.dsn, recording_app(order), queues="default:20,*:5") as node:
        for job_id in (*before, behind, *beside):
            assert await final_outcome(conn, job_id) == "succeeded"
        later = await insert_job(conn, "record", priority=3)
        assert await final_outcome(conn, later) == "succeeded"
        await node.wait_for_event(
            "row.refused", times=2, doing="claim", job_id=refused, queue="default", handler="record", priority=5
        )
        assert (await live_row(conn, refused))["attempt"] == 0
        await conn.execute("drop trigger refuse on rota.jobs")
        assert await final_outcome(conn, refused) == "succeeded"
        assert node.crash is None

    assert sorted(order) == sorted([*before, refused, behind, *beside, later])


async def test_jobs_set_aside_are_listed_and_their_number_is_bounded(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rejected jobs than the limit neither stop the dispatcher nor block a claimable job."""
    monkeypatch.setattr(refused_jobs, "MAX_SET_ASIDE", 3)
    monkeypatch.setattr(presence_module.Presence, "interval", timedelta(seconds=0.2))
    await conn.execute(
        """
        create function refuse() returns trigger language plpgsql as $$ begin raise 'not this one'; end $$;
        create trigger refuse before update on rota.jobs for each row when (old.payload ? 'refused') execute function refuse();
        """
    )
    refused = [await insert_job(conn, "record", '{"refused": true}') for _ in range(8)]
    behind = await insert_job(conn, "record", priority=6)

    async with run_node(database.dsn, recording_app([]), queues="default:20") as node:
        assert await final_outcome(conn, behind) == "succeeded"

        async def all_are_listed() -> bool:
            return {row.id for row in await server_reports.list_refused_rows(conn)} == set(refused)

        await eventually(all_are_listed)
        (row,) = await server_reports.list_refused_rows(conn, job_id=refused[0])
        assert (row.doing, row.what, row.kind) == ("claim", "job", "RaiseError")
        assert not node.events_named("loop.crashed")


async def test_a_job_buried_by_its_claim_counts_as_a_failure_of_its_schedule(
    database: Database, conn: Connection[Record]
) -> None:
    """The schedule's jobs never run, so its count of failures must grow."""
    schedule_id = await make_schedule(conn, "nightly", handler="record")
    job_id = await insert_job(conn, "record", schedule_id=schedule_id)
    await conn.execute("alter table rota.jobs add constraint odd check (schedule_id is null) not valid")

    async with run_node(database.dsn, recording_app([])):
        assert await final_outcome(conn, job_id) == "dead: permanent"

        async def is_counted() -> bool:
            return await conn.fetchval("select consecutive_failures = 1 from rota.schedule_clocks") is True

        await eventually(is_counted)


async def test_a_claim_error_that_no_row_caused_crashes_the_loop(database: Database, conn: Connection[Record]) -> None:
    """A missing column must be visible as a failing daemon; no job is set aside for it."""
    async with run_node(database.dsn, recording_app([])) as node:
        await conn.execute("alter table rota.jobs rename column meta to matter")
        await insert_job(conn, "record")
        await node.wait_for_event("loop.crashed", loop="dispatcher", kind="UndefinedColumnError")
        assert not node.events_named("row.refused")


async def test_queues_skipped_by_a_shortened_turn_are_searched_before_an_idle_exit(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that stops when idle must not leave their jobs behind."""
    order: list[int] = []
    await conn.execute(
        "insert into rota.jobs (queue, handler, run_at) "
        "select 'a' || n, 'record', now() + interval '1 year' from generate_series(1, 300) as n"
    )
    job_id = await insert_job(conn, "record", queue="'a'")
    real = queries.claim_due_jobs
    failures = [ConnectionError()]

    async def failing(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise failures.pop()
        return await real(*args, **kwargs)

    monkeypatch.setattr(queries, "claim_due_jobs", failing)

    async with run_node(database.dsn, recording_app(order), until_idle=True, queues="*:5") as node:
        await node.wait_until_stopped()

    assert order == [job_id]


async def test_a_job_due_at_the_epoch_crashes_no_daemon(
    database: Database, conn: Connection[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: a run_at of 1970, a common client default, ended every daemon 60 s later."""
    monkeypatch.setattr(lanes, "LANE_IDLE_SECONDS", 0.1)
    order: list[int] = []
    async with run_node(database.dsn, recording_app(order)) as node:
        first = await insert_job(conn, "record", run_at="'epoch'")
        assert await final_outcome(conn, first) == "succeeded"
        await node.wait_for_turns("dispatcher", 3)
        assert await final_outcome(conn, await insert_job(conn, "record", run_at="'epoch'")) == "succeeded"
        assert node.crash is None


@pytest.mark.parametrize(
    ("column", "value"),
    [("lease", "interval '106751000 days' - 2562023976 * interval '1 hour'"), ("created_by", "'nobody'")],
)
async def test_a_job_whose_claim_fails_on_its_values_becomes_a_dead_letter_and_blocks_no_other_job(
    database: Database, conn: Connection[Record], column: str, value: str
) -> None:
    """A2: such rows were stored before the constraints existed.

    The server cannot compute with the lease, and a constraint refuses the update of the other row.
    """
    order: list[int] = []
    ahead = [await insert_job(conn, "record", run_at="now() - interval '3 hours'") for _ in range(3)]
    bad = await insert_job(conn, "record", run_at="now() - interval '2 hours'")
    async with without_check_constraints(conn, "rota.jobs"):
        await conn.execute(f"update rota.jobs set {column} = {value} where job_id = $1", bad)
    await conn.execute("alter table rota.jobs add constraint odd check (created_by <> 'nobody') not valid")
    behind = [await insert_job(conn, "record") for _ in range(5)]

    async with run_node(database.dsn, recording_app(order), dead_letters__handler="alert") as node:
        for job_id in (*ahead, *behind):
            assert await final_outcome(conn, job_id) == "succeeded"
        assert await final_outcome(conn, bad) == "dead: permanent"
        event = await node.wait_for_event("job.settled", job_id=bad, settlement="dead")
        assert node.crash is None

    assert str(bad) in event["do"]
    assert await conn.fetchval("select error_kind = $2 from rota.dead_letters where job_id = $1", bad, event["kind"])
    assert await conn.fetchval("select payload ->> 'job_id' from rota.jobs where handler = 'alert'") == str(bad)


async def test_a_trigger_that_fails_for_every_row_makes_no_dead_letters(
    database: Database, conn: Connection[Record]
) -> None:
    """A division by zero in a trigger is not caused by the values of the jobs."""
    order: list[int] = []
    await conn.execute(
        """
        create function fails() returns trigger language plpgsql as $$ begin new.priority := 1 / 0; return new; end $$;
        create trigger fails before update on rota.jobs for each row execute function fails();
        """
    )
    jobs = [await insert_job(conn, "record") for _ in range(5)]

    async with run_node(database.dsn, recording_app(order)) as node:
        for job_id in jobs:
            await node.wait_for_event("row.refused", doing="claim", job_id=job_id, kind="DivisionByZeroError")

    assert await conn.fetchval("select count(*) from rota.jobs where attempt = 0") == 5
