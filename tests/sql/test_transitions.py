"""Each state, each statement: the row moves as the map in rota.lifecycle says, or nothing at all is written."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import pytest

from daemon_queries import claim, dump_all_tables, examine_unsettled, extend, reap, settle, settlement_row, sql, succeed
from factories import (
    NODE,
    OTHER_NODE,
    make_dead_letter,
    make_handler,
    make_job,
    make_ledger_row,
    make_running_job,
    request_cancellation,
    state_of,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection, Record

    from servers import Database

Conn = Any
HOUR = timedelta(hours=1)
NEVER_ISSUED = 2**53

UNTOUCHED = "untouched"
NOTED = "noted"


class Row(NamedTuple):
    """The job under test; the token is that of its last claim, or one that nobody has."""

    job_id: int
    fence_token: int


async def _waiting(conn: Conn, **columns: Any) -> Row:
    job_id, token = await make_job(conn, **columns)
    return Row(job_id, token or NEVER_ISSUED)


async def _dead(conn: Conn) -> Row:
    job_id = await make_dead_letter(conn, finished_at=-HOUR, start_by=None)
    return Row(job_id, await conn.fetchval("select fence_token from rota.dead_letters"))


async def _in_the_ledger(conn: Conn, outcome: str) -> Row:
    return Row(*await make_ledger_row(conn, outcome=outcome))


# Every place a job can be in: the finer states of the view, and what makes a difference to some statement.
STATES: dict[str, Callable[[Conn], Awaitable[tuple[int, int]]]] = {
    "future": lambda conn: _waiting(conn, run_at=HOUR),
    "due": _waiting,
    "unstarted": lambda conn: _waiting(conn, start_by=timedelta(seconds=-1)),
    "retrying": lambda conn: _waiting(conn, run_at=HOUR, attempt=2),
    "due again": lambda conn: _waiting(conn, attempt=2, start_by=timedelta(seconds=-1)),
    "suspect": lambda conn: _waiting(conn, attempt=2, losses=2),
    "running": make_running_job,
    "expired lease": lambda conn: make_running_job(conn, lease=timedelta(seconds=-1)),
    "running elsewhere": lambda conn: make_running_job(conn, node=OTHER_NODE),
    "dead": _dead,
    "succeeded": lambda conn: _in_the_ledger(conn, "succeeded"),
    "cancelled": lambda conn: _in_the_ledger(conn, "cancelled"),
    "expired": lambda conn: _in_the_ledger(conn, "expired"),
    "discarded": lambda conn: _in_the_ledger(conn, "discarded"),
}  # fmt: skip

LIVE_AND_WAITING = ("future", "due", "unstarted", "retrying", "due again", "suspect")
MINE = ("running", "expired lease")
RUNNING = (*MINE, "running elsewhere")


async def _alone(conn: Conn, statement: str, *arguments: Any) -> None:
    try:
        async with conn.transaction():
            await conn.execute(statement, *arguments)
    except asyncpg.PostgresError as refused:
        if not str(refused.sqlstate).startswith("RT"):
            raise


def _function(statement: str) -> Callable[[Conn, Row], Awaitable[Any]]:
    return lambda conn, row: _alone(conn, statement, row.job_id)


# What is done to the job -> from which states it moves, and where to. From all others it doesn't, and nothing is written.
MOVES: dict[str, tuple[Callable[[Conn, Row], Awaitable[Any]], dict[str, str]]] = {
    "claim": (lambda conn, _: claim(conn), dict.fromkeys(("due", "due again"), "running")),
    "claim suspects": (lambda conn, _: claim(conn, suspects=True), {"suspect": "running"}),
    "succeed": (succeed, dict.fromkeys(MINE, "succeeded")),
    "retry": (lambda conn, row: settle(conn, settlement_row(row)), dict.fromkeys(MINE, "retrying")),
    "release": (
        lambda conn, row: settle(conn, settlement_row(row, "release", delay=timedelta(0))),
        dict.fromkeys(MINE, "due"),
    ),
    "release at the end of the lease": (
        lambda conn, row: settle(conn, settlement_row(row, "release", delay=None)),
        {"running": "future", "expired lease": "due"},
    ),
    "bury": (lambda conn, row: settle(conn, settlement_row(row, "bury")), dict.fromkeys(MINE, "dead")),
    "settle as cancelled": (
        lambda conn, row: settle(conn, settlement_row(row, "cancel")),
        dict.fromkeys(MINE, "cancelled"),
    ),
    "reap": (lambda conn, _: reap(conn), {"expired lease": "retrying"}),
    "reap what was found earlier": (
        lambda conn, row: settle(conn, settlement_row(row, "bury", outcome="lost"), expired_only=True),
        {"expired lease": "dead"},
    ),
    "complete": (
        lambda conn, row: _alone(conn, "select rota.complete($1, $2)", *row),
        dict.fromkeys(RUNNING, "succeeded"),
    ),
    "expire": (lambda conn, _: conn.fetch(sql("expire_unstarted_jobs"), 10, None), {"unstarted": "expired"}),
    "cancel": (
        _function("select rota.cancel($1)"),
        {**dict.fromkeys(LIVE_AND_WAITING, "cancelled"), **dict.fromkeys(RUNNING, NOTED)},
    ),
    "extend": (extend, dict.fromkeys(MINE, NOTED)),
    "checkpoint": (lambda conn, row: conn.fetch(sql("save_checkpoint"), NODE, *row, "[1]"), dict.fromkeys(MINE, NOTED)),
    "progress": (lambda conn, row: conn.fetch(sql("report_progress"), NODE, *row, 0.5, ""), dict.fromkeys(MINE, NOTED)),
    "cancel by force": (
        _function("select rota.cancel($1, force => true)"),
        dict.fromkeys((*LIVE_AND_WAITING, *RUNNING), "cancelled"),
    ),
    "reschedule": (
        _function("select rota.reschedule($1, now() + interval '1 hour')"),
        {
            **dict.fromkeys(("future", "retrying"), NOTED),
            **dict.fromkeys(("due", "unstarted"), "future"),
            **dict.fromkeys(("due again", "suspect"), "retrying"),
        },
    ),
    "retry now": (lambda conn, _: conn.fetch("select rota.retry_now()"), {"retrying": "due"}),
    "redrive": (_function("select rota.redrive($1)"), {"dead": "due"}),
    "discard": (_function("select rota.discard($1)"), {"dead": "discarded"}),
    "prune dead letters": (
        lambda conn, _: conn.fetch(sql("prune_dead_letters"), timedelta(minutes=1), 10),
        {"dead": "discarded"},
    ),
}

# These only look.
LOOKS: dict[str, Callable[[Conn, Row], Awaitable[Any]]] = {
    "find expired leases": lambda conn, _: conn.fetch(sql("find_expired_leases"), 0, 10),
    "load terms": lambda conn, row: conn.fetch(sql("load_terms"), NODE, [row.job_id], [row.fence_token]),
    "find orphaned claims": lambda conn, _: conn.fetch(sql("find_orphaned_claims"), NODE, []),
    "examine": examine_unsettled,
    "sample": lambda conn, _: conn.fetch(sql("sample_backlog"), 100),
    "list queues": lambda conn, _: conn.fetch(sql("list_queues"), "", 100, ["h"]),
    "answer requests that nobody made": lambda conn, _: conn.fetch(sql("answer_cancel_requests"), 10, None),
}


async def _what_happens(conn: Conn, do: Callable[[Conn, Row], Awaitable[Any]]) -> dict[str, str | None]:
    """State -> where the job stands afterwards, `noted` if only something was written, or `untouched`."""
    await make_handler(conn)
    found: dict[str, str | None] = {}
    for state, make in STATES.items():
        doing = conn.transaction()
        await doing.start()
        row = Row(*await make(conn))
        was, before = await state_of(conn, row.job_id), await dump_all_tables(conn)
        await do(conn, row)
        stands, after = await state_of(conn, row.job_id), await dump_all_tables(conn)
        del before["rota.audit"], after["rota.audit"]  # a bulk call that found nothing is on record, too
        found[state] = stands if stands != was else UNTOUCHED if before == after else NOTED
        await doing.rollback()
    return found


@pytest.mark.parametrize("move", MOVES)
async def test_a_job_moves_as_the_map_says_or_not_at_all(conn: Connection[Record], move: str) -> None:
    """One table for the whole protocol: what isn't in it must not happen, and leaves no trace."""
    do, moves = MOVES[move]
    assert await _what_happens(conn, do) == {**dict.fromkeys(STATES, UNTOUCHED), **moves}


@pytest.mark.parametrize("look", LOOKS)
async def test_what_only_looks_writes_nothing(conn: Connection[Record], look: str) -> None:
    """A gauge or a diagnosis must never be able to touch a job."""
    assert await _what_happens(conn, LOOKS[look]) == dict.fromkeys(STATES, UNTOUCHED)


# ------------------------------------------------------------------------------------------------------------- the fence

FENCED: dict[str, Callable[[Conn, Row], Awaitable[Any]]] = {
    "extend": extend,
    "succeed": succeed,
    "succeed with a result": lambda conn, row: succeed(conn, row, results={row.fence_token: "[1]"}),
    "retry": lambda conn, row: settle(conn, settlement_row(row)),
    "release": lambda conn, row: settle(conn, settlement_row(row, "release")),
    "bury": lambda conn, row: settle(conn, settlement_row(row, "bury"), alert="alarm"),
    "cancel": lambda conn, row: settle(conn, settlement_row(row, "cancel")),
    "reap": lambda conn, row: settle(conn, settlement_row(row, outcome="lost"), expired_only=True),
    "checkpoint": lambda conn, row: conn.fetch(sql("save_checkpoint"), NODE, *row, "[1]"),
    "progress": lambda conn, row: conn.fetch(sql("report_progress"), NODE, *row, 0.5, None),
    "load terms": lambda conn, row: conn.fetch(sql("load_terms"), NODE, [row.job_id], [row.fence_token]),
}


@pytest.mark.parametrize("what", FENCED)
@pytest.mark.parametrize("wrong", ["token", "owner", "job"])
async def test_a_stale_claim_writes_nothing(conn: Connection[Record], what: str, wrong: str) -> None:
    """Neither an older token, nor a token with another owner, nor the token of another job counts: zero rows, no trace."""
    late = timedelta(seconds=-1)
    job_id, token = await make_running_job(conn, lease=late, node=OTHER_NODE if wrong == "owner" else NODE)
    other, _ = await make_running_job(conn, lease=late)
    claimed = {"token": Row(job_id, token - 1), "owner": Row(job_id, token), "job": Row(other, token)}[wrong]
    before = await dump_all_tables(conn)
    assert not await FENCED[what](conn, claimed)
    assert await dump_all_tables(conn) == before


@pytest.mark.parametrize("what", [name for name in FENCED if name not in {"checkpoint", "progress", "load terms"}])
async def test_a_locked_row_is_left_for_the_next_turn(conn: Connection[Record], database: Database, what: str) -> None:
    """Nobody waits for a lock, nothing is written, and the claim isn't taken for a loss."""
    row = Row(*await make_running_job(conn, lease=timedelta(seconds=-1)))
    before = await dump_all_tables(conn)
    await conn.execute("set lock_timeout = '2s'")
    async with database.connect() as other, other.transaction():
        await other.execute("select from rota.jobs where job_id = $1 for update", row.job_id)
        answer = await FENCED[what](conn, row)
        assert answer == ({row.fence_token: (False, False)} if what == "extend" else type(answer)())
        assert await examine_unsettled(conn, row) == {row.fence_token: "held"}
    assert await dump_all_tables(conn) == before
    assert await examine_unsettled(conn, row) == {row.fence_token: "free"}
    assert await FENCED[what](conn, row)


async def test_a_claim_steps_over_a_locked_row(conn: Connection[Record], database: Database) -> None:
    """And takes it once it is free."""
    await make_handler(conn)
    locked, _ = await make_job(conn, run_at=timedelta(minutes=-1))
    free, _ = await make_job(conn)
    async with database.connect() as other, other.transaction():
        await other.execute("select from rota.jobs where job_id = $1 for update", locked)
        assert [got.job_id for got in await claim(conn, 2)] == [free]
    assert [got.job_id for got in await claim(conn, 2)] == [locked]


async def test_the_reaper_leaves_a_lease_that_has_been_extended(conn: Connection[Record]) -> None:
    """It proves the expiry again in the statement that writes."""
    row = Row(*await make_running_job(conn, lease=timedelta(seconds=-1)))
    assert (await extend(conn, row))[row.fence_token] == (True, False)  # type: ignore[index]
    before = await dump_all_tables(conn)
    assert not await settle(conn, settlement_row(row, outcome="lost"), expired_only=True)
    assert await dump_all_tables(conn) == before


@pytest.mark.parametrize(
    ("row_is", "finding"),
    [
        ("running", "free"),
        ("running elsewhere", "lost"),
        ("claimed again", "lost"),
        ("succeeded by us", "settled"),
        ("succeeded by another", "lost"),
        ("retried by us", "written"),
        ("reaped", "lost"),
        ("buried by us", "written"),
        ("cancelled by force", "lost"),
        ("gone", "lost"),
    ],
)
async def test_what_became_of_an_unanswered_settlement_is_found(
    conn: Connection[Record], row_is: str, finding: str
) -> None:
    """After a lost reply, "settled by this very token" is no loss, and a success is told apart from everything else."""
    await make_handler(conn)
    node = OTHER_NODE if row_is in {"running elsewhere", "succeeded by another"} else NODE
    row = Row(*await make_running_job(conn, node=node, lease=timedelta(seconds=-1)))
    match row_is:
        case "succeeded by us":
            await succeed(conn, row)
        case "succeeded by another":
            await succeed(conn, row, node=OTHER_NODE)
        case "retried by us":
            await settle(conn, settlement_row(row))
        case "claimed again":
            await settle(conn, settlement_row(row, delay=timedelta(0), outcome="lost"), expired_only=True)
            assert len(await claim(conn)) == 1
        case "reaped":
            await reap(conn)
        case "buried by us":
            await settle(conn, settlement_row(row, "bury"))
        case "cancelled by force":
            await conn.execute("select rota.cancel($1, force => true)", row.job_id)
        case "gone":
            await conn.execute("delete from rota.jobs")
    assert await examine_unsettled(conn, row) == {row.fence_token: finding}


# ---------------------------------------------------------------------------------------- what a transition writes beside

RULINGS = ("retry", "release", "bury", "cancel")


@pytest.mark.parametrize("ruling", RULINGS)
@pytest.mark.parametrize("by", ["its node", "a reaper"])
async def test_a_request_to_cancel_wins_over_everything_but_success(
    conn: Connection[Record], ruling: str, by: str
) -> None:
    """In the same statement, whoever settles: a job that should stop doesn't come back once more."""
    row = Row(*await make_running_job(conn, lease=timedelta(seconds=-1)))
    await request_cancellation(conn, row.job_id)
    assert await settle(conn, settlement_row(row, ruling), expired_only=by == "a reaper") == {row.fence_token: "cancel"}
    assert await state_of(conn, row.job_id) == "cancelled"
    assert await conn.fetchval("select note from rota.job_runs") == "cancelled by someone: moot"
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0
    assert await conn.fetchval("select count(*) from rota.attempts") == 1


async def test_success_wins_over_a_request_to_cancel(conn: Connection[Record]) -> None:
    """The work is done: saying that it was cancelled would be a lie. The request is forgotten at the next sweep."""
    row = Row(*await make_running_job(conn))
    await request_cancellation(conn, row.job_id)
    assert await succeed(conn, row) == [row.fence_token]
    assert await state_of(conn, row.job_id) == "succeeded"
    assert await conn.fetch(sql("answer_cancel_requests"), 10, None) == []
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0


async def test_a_result_goes_to_the_attempt_that_returned_it(conn: Connection[Record]) -> None:
    """In a batch, by token: others have returned something else, or nothing."""
    first, second, third = [await make_running_job(conn) for _ in range(3)]
    results = {third.fence_token: '"third"', first.fence_token: '"first"'}
    assert len(await succeed(conn, first, second, third, results=results)) == 3
    rows = {row["job_id"]: row["result"] for row in await conn.fetch("select job_id, result from rota.job_runs")}
    assert rows == {first.job_id: '"first"', second.job_id: None, third.job_id: '"third"'}


async def test_a_request_that_came_too_late_for_the_settlement_is_answered_by_the_sweep(
    conn: Connection[Record],
) -> None:
    """It was written while the job ran, and the job waits for its retry by now: it is cancelled all the same."""
    job_id, _ = await make_job(conn, attempt=1, run_at=HOUR)
    await request_cancellation(conn, job_id)
    (ended,) = await conn.fetch(sql("answer_cancel_requests"), 10, None)
    assert ended["job_id"] == job_id
    assert await state_of(conn, job_id) == "cancelled"
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 0


async def test_requests_that_nobody_obeys_do_not_hide_younger_ones(conn: Connection[Record]) -> None:
    """Jobs that can't be stopped may run for hours; a bounded sweep must get past their requests."""
    for _ in range(3):
        await request_cancellation(conn, (await make_running_job(conn)).job_id)
    waiting, _ = await make_job(conn, attempt=1)
    await request_cancellation(conn, waiting)
    assert [row["job_id"] for row in await conn.fetch(sql("answer_cancel_requests"), 2, None)] == [waiting]
    assert await conn.fetchval("select count(*) from rota.cancel_requests") == 3


async def test_a_claim_writes_down_the_terms_in_force(conn: Connection[Record]) -> None:
    """Everyone later reads the row only: a handler's defaults may change while the job runs."""
    await make_handler(
        conn, max_attempts=7, backoff_base=timedelta(seconds=1), backoff_cap=timedelta(seconds=2), timeout=HOUR
    )
    bare, _ = await make_job(conn)
    own, _ = await make_job(
        conn,
        max_attempts=3,
        backoff_base=timedelta(seconds=3),
        backoff_cap=timedelta(seconds=4),
        timeout=timedelta(seconds=5),
        lease=timedelta(seconds=6),
    )
    once, _ = await make_job(conn, delivery="at_most_once", max_attempts=5)
    assert len(await claim(conn)) == 3
    columns = "max_attempts, backoff_base, backoff_cap, timeout, lease, delivery, attempt"
    rows = {row["job_id"]: tuple(row)[1:] for row in await conn.fetch(f"select job_id, {columns} from rota.jobs")}
    seconds = [timedelta(seconds=n) for n in range(8)]
    lease = timedelta(seconds=30)
    assert rows == {
        bare: (7, seconds[1], seconds[2], HOUR, lease, "at_least_once", 1),
        own: (3, seconds[3], seconds[4], seconds[5], seconds[6], "at_least_once", 1),
        once: (1, seconds[1], seconds[2], HOUR, lease, "at_most_once", 1),
    }
    left = await conn.fetch("select lease_expires_at - started_at as left, lease from rota.jobs")
    assert all(abs(row["left"] - row["lease"]) < timedelta(seconds=1) for row in left)


async def test_later_claims_have_larger_tokens(conn: Connection[Record]) -> None:
    """Across jobs and across claims of one job: that is what orders effects."""
    await make_handler(conn)
    await make_job(conn)
    tokens = []
    for _ in range(3):
        (got,) = await claim(conn)
        tokens.append(got.fence_token)
        await settle(conn, settlement_row((got.job_id, got.fence_token), delay=timedelta(0)))
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize(
    ("ruling", "outcome", "attempt", "releases", "losses"),
    [
        ("retry", "failed", 3, 1, 1),
        ("retry", "lost", 3, 1, 2),
        ("release", "snoozed", 2, 2, 0),
        ("release", "interrupted", 2, 2, 1),
    ],
)
async def test_counters_say_what_happened(
    conn: Connection[Record], ruling: str, outcome: str, attempt: int, releases: int, losses: int
) -> None:
    """A release gives the attempt back, a loss counts against the job, and a snooze proves that its worker lives."""
    row = Row(*await make_running_job(conn, attempt=3, releases=1, losses=1, progress=0.5))
    await settle(conn, settlement_row(row, ruling, outcome=outcome))
    job = await conn.fetchrow("select attempt, releases, losses, progress, fence_token from rota.jobs")
    assert job is not None
    assert tuple(job) == (attempt, releases, losses, None, row.fence_token)
    remembered = await conn.fetchrow("select fence_token, attempt, node, outcome, error from rota.attempts")
    assert remembered is not None
    assert tuple(remembered) == (row.fence_token, 3, NODE, outcome, "it broke")


async def test_a_dead_letter_keeps_every_column_of_the_job(conn: Connection[Record]) -> None:
    """What isn't kept can't be redriven."""
    row = Row(
        *await make_running_job(
            conn, payload='{"n": 1}', unique_key="k", idempotency_key="i", meta='{"t": 1}', checkpoint="[2]",
            retry_for=HOUR, timeout=HOUR, schedule_id=7, exclusive=True, priority=2, progress=0.25, progress_note="half",
        )
    )  # fmt: skip
    job = await conn.fetchrow("select * from rota.jobs")
    await settle(conn, settlement_row(row, "bury"))
    letter = await conn.fetchrow("select * from rota.dead_letters")
    assert job is not None
    assert letter is not None
    of_the_claim = {"state", "leased_by", "lease_expires_at", "start_by", "follow_up"}
    kept = {name: value for name, value in job.items() if name not in of_the_claim}
    assert {name: letter[name] for name in kept} == kept
    assert (letter["node"], letter["reason"], letter["error_kind"], letter["error"]) == (
        NODE, "exhausted", "ValueError", "it broke",
    )  # fmt: skip


async def test_an_alert_is_a_job_of_the_burying_statement_and_alarms_nobody_about_itself(
    conn: Connection[Record],
) -> None:
    """A dead letter of the alert handler itself would otherwise breed alerts for ever."""
    first = await make_running_job(conn)
    second = await make_running_job(conn, handler="alarm")
    await settle(conn, settlement_row(first, "bury"), settlement_row(second, "bury"), alert="alarm")
    (alert,) = await conn.fetch("select handler, payload::jsonb ->> 'job_id' as about from rota.jobs")
    assert tuple(alert) == ("alarm", str(first.job_id))
    assert await conn.fetchval("select count(*) from rota.dead_letters") == 2


async def test_an_extension_ends_at_the_timeout_and_never_shortens_a_lease(conn: Connection[Record]) -> None:
    """A job that should have been stopped loses its lease at last; a beat can't take back what a claim has granted."""
    capped = await make_running_job(conn, timeout=timedelta(seconds=10))
    generous = await make_running_job(conn, lease=HOUR)
    before = {row["job_id"]: row["lease_expires_at"] for row in await conn.fetch("select * from rota.jobs")}
    beat = await extend(conn, capped, generous)
    assert beat == {capped.fence_token: (True, False), generous.fence_token: (True, False)}
    rows = {row["job_id"]: row for row in await conn.fetch("select * from rota.jobs")}
    cap = rows[capped.job_id]["started_at"] + timedelta(seconds=15)
    assert rows[capped.job_id]["lease_expires_at"] == max(before[capped.job_id], cap)
    assert rows[generous.job_id]["lease_expires_at"] == before[generous.job_id]


async def test_a_beat_tells_of_requests_to_cancel(conn: Connection[Record]) -> None:
    """Without notifications, that is how a running job hears of it."""
    asked, other = await make_running_job(conn), await make_running_job(conn)
    await request_cancellation(conn, asked.job_id)
    assert await extend(conn, asked, other) == {asked.fence_token: (True, True), other.fence_token: (True, False)}


async def test_a_paused_lane_is_not_claimed_from(conn: Connection[Record]) -> None:
    """By queue, by handler, or all at once; what is taken back is claimed again at the next look."""
    await make_handler(conn)
    await make_job(conn)
    for pause, resume in (
        ("rota.pause_queue('default')", "rota.resume_queue('default')"),
        ("rota.pause_queue('*')", "rota.resume_queue('*')"),
        ("rota.pause_handler('h')", "rota.resume_handler('h')"),
    ):
        await conn.execute(f"select {pause}")
        assert await claim(conn) == []
        await conn.execute(f"select {resume}")
    assert len(await claim(conn)) == 1


async def test_the_most_urgent_come_first(conn: Connection[Record]) -> None:
    """By priority, and within it by run_at, whatever the order of insertion."""
    await make_handler(conn)
    order = {}
    for priority, minutes in ((7, 3), (2, 1), (5, 9), (2, 4), (5, 2)):
        order[priority, -minutes], _ = await make_job(conn, priority=priority, run_at=timedelta(minutes=-minutes))
    got = []
    while claims := await claim(conn, 2):
        got.append({c.job_id for c in claims})
    ids = [order[key] for key in sorted(order)]
    assert got == [set(ids[:2]), set(ids[2:4]), set(ids[4:])]
