"""Two or three connections on the same rows, interleaved by locks that the tests hold open.

The narrowest place of all is between a statement's snapshot and its row lock: what commits there is under the lock, and not
in the snapshot. A row policy makes a statement stop there: see `Interrupted`.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

import rota
from daemon_queries import claim, dump_all_tables, examine_unsettled, extend, reap, settle, settlement_row, sql, succeed
from factories import (
    NODE,
    OTHER_NODE,
    make_dead_letter,
    make_handler,
    make_job,
    make_jobs,
    make_running_job,
    make_running_jobs,
    request_cancellation,
    state_of,
    wait_until_blocked,
)
from rota.db import queries
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from asyncpg import Connection, Record

    from servers import Database

LATE = timedelta(seconds=-1)
HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Interrupted:
    """`conn` is stopped at every row of rota.jobs that it looks at, after its snapshot and before its lock, while asked to."""

    conn: Connection[Record]
    other: Connection[Record]
    watcher: Connection[Record]

    async def run(self, statement: Coroutine[Any, Any, Any], meanwhile: Callable[[], Awaitable[Any]]) -> Any:
        """Let `meanwhile` happen, and be committed, after the snapshot of `statement` (which runs on `conn`)."""
        await self.other.execute("select pg_advisory_lock(7)")
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(statement)
            await wait_until_blocked(self.conn, watched_by=self.watcher)
            await meanwhile()
            await self.other.execute("select pg_advisory_unlock(7)")
        return waiting.result()


@pytest.fixture
async def interrupted(database: Database) -> AsyncIterator[Interrupted]:
    """A connection that can be stopped between snapshot and lock, and one for what happens meanwhile."""
    role = f"rota_stopped_{os.getpid()}"
    async with database.connect() as conn, database.connect() as other, database.connect() as watcher:
        # Nobody but the test waits: without anyone on the lock, taking it costs nothing.
        await other.execute(
            f"""
            create role {role};
            grant usage on schema rota to {role};
            grant all on all tables in schema rota to {role};
            grant all on all sequences in schema rota to {role};
            grant execute on all functions in schema rota to {role};
            create function stop_here() returns boolean language plpgsql as $$
            begin
                perform pg_advisory_lock_shared(7), pg_advisory_unlock_shared(7);
                return true;
            end $$;
            create policy stop_here on rota.jobs using (stop_here()) with check (true);
            alter table rota.jobs enable row level security;
            set lock_timeout = '5s';
            """
        )
        try:
            await conn.execute(f"set role {role}")
            yield Interrupted(conn, other, watcher)
        finally:
            await conn.close()
            await other.execute(f"drop owned by {role}; drop role {role}")


@asynccontextmanager
async def locked(database: Database, *job_ids: int) -> AsyncIterator[None]:
    """Somebody's open transaction holds these rows."""
    async with database.connect() as other, other.transaction():
        await other.execute("select from rota.jobs where job_id = any ($1) for update", job_ids)
        yield


# ------------------------------------------------------------------------------------------------------------------ claims


async def test_two_claims_at_once_share_no_job(conn: Connection[Record], database: Database) -> None:
    """The second steps over what the first has taken and not committed, and doesn't wait for it."""
    await make_handler(conn)
    made = {job.job_id for job in await make_jobs(conn, 10)}
    async with database.connect() as other:
        await other.execute("set lock_timeout = '2s'")
        async with conn.transaction():
            first = {got.job_id for got in await claim(conn, 6)}
            second = {got.job_id for got in await claim(other, 6, node=OTHER_NODE)}
    assert len(first) == 6
    assert first | second == made
    assert not first & second


async def test_many_claims_at_once_take_each_job_once(conn: Connection[Record], database: Database) -> None:
    """However they interleave: every job is claimed, by one node, at its first attempt."""
    await make_handler(conn)
    made = {job.job_id for job in await make_jobs(conn, 400)}

    async def dispatcher() -> list[int]:
        async with database.connect() as mine:
            taken: list[int] = []
            while got := await claim(mine, 7):
                taken += [each.job_id for each in got]
            return taken

    async with asyncio.TaskGroup() as group:
        dispatchers = [group.create_task(dispatcher()) for _ in range(6)]
    taken = [job_id for each in dispatchers for job_id in each.result()]
    assert sorted(taken) == sorted(made)
    assert await conn.fetchval("select max(attempt) from rota.jobs") == 1


@pytest.mark.parametrize("many", [1, 50])
async def test_locked_rows_at_the_front_of_a_lane_do_not_stop_a_claim_for_one_slot(
    conn: Connection[Record], database: Database, many: int
) -> None:
    """A client that forgot its transaction on the oldest rows must not stand in the way of everybody behind them."""
    await make_handler(conn)
    front = await make_jobs(conn, many, run_at=timedelta(minutes=-1))
    behind, _ = await make_job(conn)
    async with locked(database, *(job.job_id for job in front)):
        assert [got.job_id for got in await claim(conn, 1)] == [behind]


@pytest.mark.parametrize("what", ["rescheduled", "claimed", "cancelled", "touched"])
async def test_a_claim_takes_no_row_that_changed_after_its_snapshot(interrupted: Interrupted, what: str) -> None:
    """What it would run is what it saw; a row that only looks different now is claimed at the next look."""
    other = interrupted.other
    await make_handler(other)
    job_id, _ = await make_job(other)
    steady, _ = await make_job(other, run_at=timedelta(seconds=-1))
    happens: dict[str, Callable[[], Awaitable[Any]]] = {
        "rescheduled": lambda: other.execute("select rota.reschedule($1, now() + interval '1 hour')", job_id),
        "claimed": lambda: claim(other, 1, node=OTHER_NODE),
        "cancelled": lambda: other.execute("select rota.cancel($1)", job_id),
        "touched": lambda: other.execute("update rota.jobs set meta = '{}' where job_id = $1", job_id),
    }
    got = await interrupted.run(claim(interrupted.conn, 2), happens[what])
    assert [each.job_id for each in got] == [steady]
    becomes = {"rescheduled": "future", "claimed": "running", "cancelled": "cancelled", "touched": "due"}
    assert await state_of(other, job_id) == becomes[what]
    assert [each.job_id for each in await claim(other, 2)] == ([job_id] if what == "touched" else [])


async def test_tokens_issued_while_the_sequence_is_being_raised_are_not_issued_again(
    conn: Connection[Record], database: Database
) -> None:
    """Rule 3: between a new connection's look at the sequence and its write, others go on claiming."""
    clock = "(extract(epoch from clock_timestamp()) * 1000000)::int8"
    async with database.connect() as claiming, database.connect() as watcher, asyncio.TaskGroup() as group:
        async with claiming.transaction():
            await claiming.execute("alter sequence rota.fence_tokens owned by none")  # stops the write, not the look
            await claiming.execute(f"select setval('rota.fence_tokens', {clock})")
            raising = group.create_task(queries.raise_fence_tokens(conn))
            await wait_until_blocked(conn, watched_by=watcher)
            issued = await claiming.fetchval("select max(nextval('rota.fence_tokens')) from generate_series(1, 50000)")
        assert await raising
    assert await conn.fetchval("select nextval('rota.fence_tokens')") > issued


# ----------------------------------------------------------------------------------- heartbeat, settlement, reaper: one row


async def test_a_beat_between_snapshot_and_lock_puts_a_success_off_to_the_next_turn(interrupted: Interrupted) -> None:
    """A ledger row appears exactly when the job's row has really left: never for a delete that hit an old version."""
    job = await make_running_job(interrupted.other)
    steady = await make_running_job(interrupted.other)
    beat = lambda: extend(interrupted.other, job)  # noqa: E731
    written = await interrupted.run(succeed(interrupted.conn, job, steady), beat)
    assert written == [steady.fence_token]
    assert [await state_of(interrupted.other, each.job_id) for each in (job, steady)] == ["running", "succeeded"]
    assert await examine_unsettled(interrupted.other, job) == {job.fence_token: "free"}
    assert await succeed(interrupted.other, job) == [job.fence_token]
    assert await interrupted.other.fetchval("select count(*) from rota.job_runs") == 2


@pytest.mark.parametrize(
    ("ruling", "becomes"), [("retry", "retrying"), ("release", "future"), ("bury", "dead"), ("cancel", "cancelled")]
)
async def test_a_beat_between_snapshot_and_lock_does_not_stop_a_settlement(
    interrupted: Interrupted, ruling: str, becomes: str
) -> None:
    """The row is the same claim's still: it is written once, with one row of history."""
    job = await make_running_job(interrupted.other)
    beat = lambda: extend(interrupted.other, job)  # noqa: E731
    written = await interrupted.run(settle(interrupted.conn, settlement_row(job, ruling)), beat)
    assert written == {job.fence_token: ruling}
    assert await state_of(interrupted.other, job.job_id) == becomes
    assert await interrupted.other.fetchval("select count(*) from rota.attempts") == 1
    ended = await interrupted.other.fetchval(
        "select (select count(*) from rota.dead_letters) + (select count(*) from rota.job_runs)"
    )
    assert ended == (ruling in {"bury", "cancel"})


async def test_a_beat_between_snapshot_and_lock_stops_the_reaper(interrupted: Interrupted) -> None:
    """B55: the lease that it read as expired has been extended; the attempt goes on."""
    job = await make_running_job(interrupted.other, lease=LATE)
    beat = lambda: extend(interrupted.other, job)  # noqa: E731
    reaping = settle(interrupted.conn, settlement_row(job, "bury", outcome="lost"), expired_only=True)
    assert await interrupted.run(reaping, beat) == {}
    assert await state_of(interrupted.other, job.job_id) == "running"
    assert await interrupted.other.fetchval("select count(*) from rota.attempts") == 0


@pytest.mark.parametrize("what", ["succeeded", "retried", "completed", "reaped and claimed again"])
@pytest.mark.parametrize("by", ["reaper", "settler", "success"])
async def test_whoever_comes_second_writes_nothing(interrupted: Interrupted, by: str, what: str) -> None:
    """B55: the same row, settled between snapshot and lock, or on its way again under another claim."""
    other = interrupted.other
    await make_handler(other)
    job = await make_running_job(other, lease=LATE)

    async def meanwhile() -> None:
        match what:
            case "succeeded":
                await succeed(other, job)
            case "retried":
                await settle(other, settlement_row(job))
            case "completed":
                await other.execute("select rota.complete($1, $2)", *job)
            case _:
                await settle(other, settlement_row(job, delay=timedelta(0), outcome="lost"), expired_only=True)
                assert len(await claim(other, node=OTHER_NODE)) == 1
        after.update(await dump_all_tables(other))

    after: dict[str, list[str]] = {}
    if by == "success":
        assert await interrupted.run(succeed(interrupted.conn, job), meanwhile) == []
    else:
        second = settle(interrupted.conn, settlement_row(job, "bury", outcome="lost"), expired_only=by == "reaper")
        assert await interrupted.run(second, meanwhile) == {}
    assert await dump_all_tables(other) == after


@pytest.mark.parametrize("what", ["settled", "reaped", "reaped and claimed again"])
async def test_a_beat_extends_nothing_that_was_taken_meanwhile(interrupted: Interrupted, what: str) -> None:
    """B65: its answer may still call the token ours, for its snapshot is older, but never extended; and nothing is written."""
    other = interrupted.other
    await make_handler(other)
    job = await make_running_job(other, lease=LATE)
    after: dict[str, list[str]] = {}

    async def meanwhile() -> None:
        if what == "settled":
            await succeed(other, job)
        else:
            await settle(other, settlement_row(job, delay=timedelta(0), outcome="lost"), expired_only=True)
        if what.endswith("again"):
            assert len(await claim(other, node=OTHER_NODE)) == 1
        after.update(await dump_all_tables(other))

    answer = await interrupted.run(extend(interrupted.conn, job), meanwhile)
    assert answer == {job.fence_token: (False, False)}
    assert await dump_all_tables(other) == after
    assert await extend(other, job) == {}


async def test_a_handlers_own_transaction_decides_and_nobody_waits_for_it(
    conn: Connection[Record], database: Database
) -> None:
    """Between rota.complete and COMMIT the row is locked: heartbeat, reaper and settlement step over it, none calls it lost."""
    job = await make_running_job(conn, lease=LATE)
    await conn.execute("set lock_timeout = '2s'")
    async with database.connect() as handler:
        for ends in ("rollback", "commit"):
            await handler.execute("begin")
            await handler.execute("select rota.complete($1, $2)", *job)
            assert await extend(conn, job) == {job.fence_token: (False, False)}
            assert await reap(conn) == {}
            assert await succeed(conn, job) == []
            assert await examine_unsettled(conn, job) == {job.fence_token: "held"}
            await handler.execute(ends)
            finding = {"rollback": "free", "commit": "settled"}[ends]
            assert await examine_unsettled(conn, job) == {job.fence_token: finding}
    assert await state_of(conn, job.job_id) == "succeeded"


# ----------------------------------------------------------------------------------------------------------------- cancel


async def test_cancel_during_a_settlement_is_a_request_that_the_sweep_answers(
    conn: Connection[Record], database: Database
) -> None:
    """The settlement can't see it, and it can't see the settlement: it is answered all the same, and waits for nobody."""
    job = await make_running_job(conn)
    async with database.connect() as settler, settler.transaction():
        await settle(settler, settlement_row(job))
        await conn.execute("set lock_timeout = '2s'")
        assert await conn.fetchval("select rota.cancel($1)", job.job_id) == "requested"
    assert await state_of(conn, job.job_id) == "retrying"
    assert len(await conn.fetch(sql("answer_cancel_requests"), 10, None)) == 1
    assert await state_of(conn, job.job_id) == "cancelled"


async def test_a_request_between_snapshot_and_lock_is_answered_by_the_sweep(interrupted: Interrupted) -> None:
    """The settlement decides by its snapshot, in which nobody had asked; the request isn't forgotten."""
    other = interrupted.other
    job = await make_running_job(other)
    written = await interrupted.run(
        settle(interrupted.conn, settlement_row(job)), lambda: other.execute("select rota.cancel($1)", job.job_id)
    )
    assert written == {job.fence_token: "retry"}
    assert len(await other.fetch(sql("answer_cancel_requests"), 10, None)) == 1
    assert await state_of(other, job.job_id) == "cancelled"


async def test_an_uncommitted_request_neither_stops_a_settlement_nor_outlives_the_job(
    conn: Connection[Record], database: Database
) -> None:
    """Somebody's open transaction has asked: the job ends, and the request that then appears is swept away."""
    job = await make_running_job(conn)
    async with database.connect() as other, other.transaction():
        await other.execute("select rota.cancel($1)", job.job_id)
        await conn.execute("set lock_timeout = '2s'")
        assert await succeed(conn, job) == [job.fence_token]
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 1
    assert await conn.fetch(sql("answer_cancel_requests"), 10, None) == []
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0
    assert await state_of(conn, job.job_id) == "succeeded"


# ------------------------------------------------------------------------------------------------------ sweeps and redrives


async def test_a_job_claimed_between_snapshot_and_lock_does_not_expire(interrupted: Interrupted) -> None:
    """It has begun in time; that its start_by passes while it runs is nothing."""
    other = interrupted.other
    await make_handler(other)
    job_id, _ = await make_job(other, start_by=HOUR)
    late, _ = await make_job(other, handler="foreign", start_by=LATE)

    async def meanwhile() -> None:
        await other.execute("update rota.jobs set start_by = now() + interval '1 hour' where job_id = $1", late)

    assert await interrupted.run(interrupted.conn.fetch(sql("expire_unstarted_jobs"), 10, None), meanwhile) == []
    assert [await state_of(other, each) for each in (job_id, late)] == ["due", "due"]


@pytest.mark.parametrize("commits", [True, False])
async def test_redrive_waits_for_whoever_is_taking_the_key(
    conn: Connection[Record], database: Database, *, commits: bool
) -> None:
    """B49: with the key taken the dead letter stays where it is, and the refusal names the job; else it goes back."""
    letter = await make_dead_letter(conn, unique_key="k")
    async with database.connect() as other, database.connect() as watcher, asyncio.TaskGroup() as group:
        taking = other.transaction()
        await taking.start()
        live, _ = await make_job(other, unique_key="k")
        redrive = group.create_task(_sqlstate(conn.execute("select rota.redrive($1)", letter)))
        await wait_until_blocked(conn, watched_by=watcher)
        await (taking.commit() if commits else taking.rollback())
        refused = await redrive
    assert refused == ("RT005" if commits else None)
    assert await state_of(conn, letter) == ("dead" if commits else "due")
    assert await state_of(conn, live) == ("due" if commits else None)


async def _sqlstate(statement: Awaitable[Any]) -> str | None:
    try:
        await statement
    except asyncpg.PostgresError as error:
        return str(error.sqlstate)
    return None


# -------------------------------------------------------------------------------------------------------------- lock order


async def test_overlapping_batches_in_opposite_orders_neither_deadlock_nor_write_twice(
    conn: Connection[Record], database: Database
) -> None:
    """Heartbeats, settlements and reapers of the same jobs, given in whatever order: each job ends once, with its history."""
    jobs = await make_running_jobs(conn, 120, lease=LATE)
    held = [(job.job_id, job.fence_token) for job in jobs]
    forwards, backwards = held[:80], held[:39:-1]

    async def send(what: Callable[[Connection[Record]], Awaitable[Any]]) -> None:
        async with database.connect() as mine:
            await mine.execute("set deadlock_timeout = '10ms'")
            for _ in range(5):
                await what(mine)

    async with asyncio.TaskGroup() as group:
        for batch in (forwards, backwards):
            rows = [settlement_row(each, "bury") for each in batch]
            lost = [settlement_row(each, "retry", outcome="lost") for each in batch]
            group.create_task(send(lambda mine, b=batch: extend(mine, *b)))  # type: ignore[misc]
            group.create_task(send(lambda mine, b=batch: succeed(mine, *b)))  # type: ignore[misc]
            group.create_task(send(lambda mine, r=rows: settle(mine, *r)))  # type: ignore[misc]
            group.create_task(send(lambda mine, r=lost: settle(mine, *r, expired_only=True)))  # type: ignore[misc]
    stand = await conn.fetch("select job_id from rota.job_status")
    assert sorted(row["job_id"] for row in stand) == sorted(job.job_id for job in jobs)
    wrong = await conn.fetchval(
        """
        select count(*) from rota.job_status as job
        where (select count(*) from rota.attempts where attempts.job_id = job.job_id) <> (job.state in ('dead', 'retrying'))::int
        """
    )
    assert wrong == 0


async def in_opposite_orders(
    conn: Connection[Record],
    database: Database,
    column: str,
    write: Callable[[Connection[Record], str], Coroutine[Any, Any, Any]],
) -> None:
    """Let one connection write a and b, another b and a, by one statement each, the first of which stops between the two."""
    table, name = column.rsplit(".", 1)
    await conn.execute(
        f"""
        create function stop_here() returns trigger language plpgsql as $$
        begin
            if current_setting('application_name') = 'slow' and new.{name} = 'b' then
                perform pg_advisory_xact_lock(7);
            end if;
            return new;
        end $$;
        create trigger stop_here before insert on {table} for each row execute function stop_here();
        """
    )
    slow_settings = {"application_name": "slow"}
    async with (
        database.connect(server_settings=slow_settings) as slow,
        database.connect() as fast,
        asyncio.TaskGroup() as group,
    ):
        await conn.execute("select pg_advisory_lock(7)")
        for mine, order in ((slow, "ab"), (fast, "ba")):
            group.create_task(write(mine, order))
            await wait_until_blocked(mine, watched_by=conn)
        await conn.execute("select pg_advisory_unlock(7)")


async def test_daemons_that_register_the_same_handlers_in_opposite_orders_do_not_deadlock(
    conn: Connection[Record], database: Database
) -> None:
    """They all do so at the same instant, after the first deployment that has them."""

    async def register(mine: Connection[Record], order: str) -> None:
        handlers: list[queries.HandlerRow] = [(name, None, None, None, None, None, None) for name in order]
        await queries.register_handlers(mine, app="shop", release=None, handlers=handlers)

    await in_opposite_orders(conn, database, "rota.handlers.handler", register)


async def test_clients_that_enqueue_the_same_keys_in_opposite_orders_do_not_deadlock(
    conn: Connection[Record], database: Database
) -> None:
    """Two that were told of the same events: each makes what the other hasn't made, and none loses its transaction."""

    async def enqueue(mine: Connection[Record], order: str) -> None:
        await rota.enqueue_many(mine, "h", list(order), unique_key=lambda key: key)

    await in_opposite_orders(conn, database, "rota.jobs.unique_key", enqueue)
    assert await conn.fetchval("select array_agg(unique_key order by unique_key) from rota.jobs") == ["a", "b"]


async def test_a_history_row_that_is_there_already_does_not_stop_the_batch(conn: Connection[Record]) -> None:
    """B49: after a restore a token can come again; one such row would keep a whole sweep from ever being written."""
    jobs = await make_running_jobs(conn, 3, lease=LATE)
    await conn.execute(
        "insert into rota.attempts (job_id, fence_token, attempt, outcome) values ($1, $2, 1, 'failed')", *jobs[1]
    )
    assert (
        len(await settle(conn, *(settlement_row(job, node=NODE, outcome="lost") for job in jobs), expired_only=True))
        == 3
    )
    assert await conn.fetchval("select count(*) from rota.attempts") == 3


async def test_pruning_spares_a_guard_that_is_touched_meanwhile(conn: Connection[Record], database: Database) -> None:
    """A guard in use orders effects at this moment: forgotten, it would let a stale holder in."""
    await conn.execute(
        "insert into rota.guards values ('old', 1, now() - interval '1 day'), ('used', 1, now() - interval '1 day')"
    )
    await conn.execute("select setval('rota.fence_tokens', 10)")
    async with database.connect() as other, other.transaction():
        await other.execute("select rota.guard('used', 2)")
        assert await conn.fetchval(sql("prune_guards"), HOUR, 10) == 1
    assert [row["resource"] for row in await conn.fetch("select resource from rota.guards")] == ["used"]


async def test_requests_and_claims_of_the_same_job_end_in_one_place(
    conn: Connection[Record], database: Database
) -> None:
    """Cancel, claim, settle and sweep at once, again and again: every job ends exactly once, and no request is left over."""
    await make_handler(conn)
    made = [job.job_id for job in await make_jobs(conn, 60)]

    async def work() -> None:
        async with database.connect() as mine:
            while got := await claim(mine, 3):
                for each in got:
                    again = settlement_row((each.job_id, each.fence_token), delay=timedelta(0))
                    await eventually(partial(settle, mine, again))  # a row that is locked just now is stepped over

    async def stop() -> None:
        async with database.connect() as mine:
            for job_id in made:
                await mine.execute("select rota.cancel($1)", job_id)

    async with asyncio.TaskGroup() as group:
        for act in (work, work, stop, stop):
            group.create_task(act())
    while await conn.fetch(sql("answer_cancel_requests"), 100, None):
        pass
    states = await conn.fetch("select job_id, state from rota.job_status")
    assert sorted(row["job_id"] for row in states) == sorted(made)
    assert {row["state"] for row in states} == {"cancelled"}
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0


async def test_a_request_is_not_seen_by_the_claim_but_ends_the_job_at_its_settlement(conn: Connection[Record]) -> None:
    """A request may outlast a retry: the next settlement is where it wins."""
    await make_handler(conn)
    job_id, _ = await make_job(conn, attempt=1)
    await request_cancellation(conn, job_id)
    (got,) = await claim(conn)
    assert await settle(conn, settlement_row((job_id, got.fence_token))) == {got.fence_token: "cancel"}
