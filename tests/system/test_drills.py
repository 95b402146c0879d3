"""Incidents, handled with the operator's commands on real daemons.

Each login has only the role that it needs: daemon, client or operator.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from command_line import Shell
from factories import make_dead_letters
from processes import Daemons
from role_logins import RoleDatabase, role_database
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Server

APP = """
from datetime import timedelta
from pathlib import Path

import rota

app = rota.App("shop")

@app.handler("charge", permanent=(KeyError,))
async def charge(job):
    if "currency" not in job.payload:
        raise KeyError("currency")

@app.handler("bad", backoff_base=timedelta(seconds=1))
async def bad(job):
    if not Path("mended").exists():
        raise ValueError("as bad as ever")

@app.handler("good")
async def good(job): ...
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """The database, the operator's shell, the daemons, and the connections of a client and of an observer."""

    place: RoleDatabase
    operator: Shell
    daemons: Daemons
    client: Connection[Record]
    observer: Connection[Record]

    async def value(self, sql: str, *arguments: Any) -> Any:
        """Return the single value of a query."""
        return await self.observer.fetchval(sql, *arguments)

    async def until(self, fact: str, *arguments: Any, within: float = 15.0) -> None:
        """Wait until an SQL condition holds."""
        await eventually(self.condition(fact, *arguments), within=within, what=fact)

    def condition(self, fact: str, *arguments: Any) -> Callable[[], Awaitable[bool]]:
        """Return a function that evaluates the SQL condition."""

        async def is_true() -> bool:
            return bool(await self.value(f"select {fact}", *arguments))

        return is_true


@pytest.fixture
async def drill(server: Server, tmp_path: Path) -> AsyncIterator[Drill]:
    """A database with roles and no daemon yet."""
    (tmp_path / "shop.py").write_text(APP)
    async with role_database(server, "drill") as roles, roles.connect("app") as client, roles.connect() as observer:
        environ = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "ROTA_QUEUES": "default:50,mail:5"}
        with Daemons(tmp_path, roles.dsn("node"), app="shop:app", environ=environ) as daemons:
            operator = Shell(tmp_path, {"DATABASE_URL": roles.dsn("op")})
            yield Drill(place=roles, operator=operator, daemons=daemons, client=client, observer=observer)


async def test_forty_thousand_dead_letters_are_redriven_repaired_or_discarded(drill: Drill) -> None:
    """There are three kinds. One is redriven evenly while live work continues, one gets new payloads, and one is discarded."""
    payload = json.dumps({"amount": 3, "currency": "EUR"})
    timeouts = await make_dead_letters(
        drill.observer, 30_000, handler="charge", error_kind="BankTimeout", payload=payload
    )
    lacking = await make_dead_letters(
        drill.observer, 2_000, handler="charge", reason="permanent", error_kind="KeyError", payload='{"amount": 3}'
    )
    await make_dead_letters(drill.observer, 8_000, handler="newsletter", error_kind="SMTPError")
    daemon = drill.daemons.start()
    rota = drill.operator

    groups = (await rota("dead", "summary", "--json")).json
    assert [(g["handler"], g["error_kind"], g["letters"]) for g in groups] == [
        ("charge", "BankTimeout", 30_000),
        ("newsletter", "SMTPError", 8_000),
        ("charge", "KeyError", 2_000),
    ]
    assert groups[0]["sample"] == timeouts[-1]
    assert "it broke" in (await rota("dead", "show", groups[0]["sample"], "--errors")).out

    # First a dry run, then ten jobs, then all the others over a minute.
    kind = ("--handler", "charge", "--error-kind", "BankTimeout", "--note", "the bank is back")
    assert (await rota("dead", "redrive", *kind, "--dry-run", "--json")).json["letters"] == 30_000
    assert (await rota("dead", "redrive", *kind, "--limit", "10", "--json")).json["redriven"] == 10
    await drill.until("(select count(*) from rota.job_runs where handler = 'charge') = 10")
    spread = await rota("dead", "redrive", *kind, "--spread", "1m", "--json")
    assert spread.json == {"redriven": 29_990, "left_out": 0}
    ahead = await drill.value("select max(run_at) - now() from rota.jobs")
    assert 30 < ahead.total_seconds() <= 60
    early, late = await drill.observer.fetchrow(  # type: ignore[misc]  # one row of counts
        """
        select count(*) filter (where run_at between from_now + interval '10 s' and from_now + interval '25 s'),
               count(*) filter (where run_at between from_now + interval '25 s' and from_now + interval '40 s')
        from rota.jobs, (select now() as from_now) as at
        """
    )
    assert early / max(late, 1) == pytest.approx(1, abs=0.25), (
        "no wave: as many in one quarter of a minute as in the next"
    )

    # Live work continues beside it.
    live = await drill.client.fetchval("insert into rota.jobs (handler) values ('good') returning job_id")
    await drill.until("exists (select from rota.job_runs where job_id = $1)", live)
    assert await drill.value("select exists (select from rota.jobs where handler = 'charge' and run_at > now())")

    async with drill.place.connect("op") as op:
        mended = """select count(rota.redrive(job_id, payload || '{"currency": "EUR"}', 'currency added'))
                    from rota.dead_letters where handler = 'charge' and error_kind = 'KeyError'"""
        assert await op.fetchval(mended) == 2_000
    done = await rota("dead", "discard", "--handler", "newsletter", "--note", "last week's news", "--json")
    assert done.json == {"discarded": 8_000}
    await drill.until("not exists (select from rota.jobs where job_id = any ($1))", lacking, within=30)

    # Do not wait for the rest of the minute: release the remaining jobs now.
    await drill.until("(select count(*) from rota.job_runs where outcome = 'succeeded') > 5000", within=40)
    assert await drill.value("select count(*) from rota.dead_letters") == 0
    note = await drill.value("select distinct note from rota.job_runs where outcome = 'discarded'")
    assert note == f"discarded by {drill.place.prefix}_op: last week's news"
    written = await drill.observer.fetch("select action, sum(affected)::int as n from rota.audit group by 1")
    assert {row["action"]: row["n"] for row in written} == {
        "redrive many": 30_000,
        "redrive with another payload": 2_000,
        "discard many": 8_000,
    }
    assert await drill.value("select count(*) from rota.attempts where outcome = 'failed'") == 0
    assert daemon.stop() == 0


async def test_a_broken_handler_is_paused_while_its_queue_goes_on(drill: Drill) -> None:
    """Paused, it uses no more attempts. After it is mended and resumed, all its jobs run."""
    daemon = drill.daemons.start()
    rota = drill.operator
    await drill.client.execute("insert into rota.jobs (handler) select 'bad' from generate_series(1, 20)")
    await drill.until("(select count(*) from rota.attempts where outcome = 'failed') >= 20")

    paused = await rota("handler", "pause", "bad", "--note", "release 7 broke it", "--json")
    assert paused.json["changed"] == 1

    after = await drill.client.fetchval("insert into rota.jobs (handler, priority) values ('bad', 0) returning job_id")
    await drill.client.execute("insert into rota.jobs (handler) select 'good' from generate_series(1, 200)")
    await drill.until("(select count(*) from rota.job_runs where handler = 'good') = 200")
    await drill.until("not exists (select from rota.jobs where state = 'running')")
    attempts = await drill.value("select count(*) from rota.attempts")
    await drill.until("(select count(*) from rota.jobs where handler = 'bad' and run_at < now() - interval '1 s') > 1")
    assert await drill.value("select attempt from rota.jobs where job_id = $1", after) == 0
    assert await drill.value("select count(*) from rota.attempts") == attempts, "not one attempt more"

    listed = (await rota("handler", "list")).out
    assert "release 7 broke it" in listed
    assert "paused" in (await rota("status")).out

    (rota.folder / "mended").touch()
    await rota("handler", "resume", "bad", "--note", "release 8")
    await rota("job", "retry-now", "--handler", "bad")
    assert not await drill.value("select exists (select from rota.jobs where handler = 'bad' and run_at > now())")

    await drill.until("(select count(*) from rota.job_runs where handler = 'bad' and outcome = 'succeeded') = 21")
    assert daemon.stop() == 0


async def test_everything_is_paused_and_resumed_by_one_command_each(drill: Drill) -> None:
    """No daemon claims while paused, not even one that starts meanwhile; inserted jobs are kept."""
    rota = drill.operator
    first = drill.daemons.start()
    await rota("queue", "pause", "--all", "--note", "the database moves")
    await drill.client.execute(
        "insert into rota.jobs (handler, queue) "
        "select 'good', (array['default', 'mail'])[1 + n % 2] from generate_series(1, 100) as n"
    )
    assert first.stop() == 0

    second = drill.daemons.start()
    # The jobs have been due for five polls.
    await drill.until("now() - max(created_at) > interval '1 s' from rota.jobs")
    assert await drill.value("select sum(attempt) from rota.jobs") == 0

    shown = await rota("queue", "list")
    assert "the database moves" in shown.out

    started = await rota("queue", "resume", "--all", "--note", "it has moved", "--json")
    assert started.json["changed"] == 1

    await drill.until("(select count(*) from rota.job_runs where outcome = 'succeeded') = 100")
    written = await drill.observer.fetch("select action, target, reason from rota.audit order by audit_id")
    assert [tuple(row) for row in written] == [
        ("pause", "queue *", "the database moves"),
        ("resume", "queue *", "it has moved"),
    ]
    assert second.stop() == 0
