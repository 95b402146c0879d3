"""Every file of sql/queries is what its header says: parameters, columns, indexes, and the values they are read into."""

from __future__ import annotations

import dataclasses
import re
import typing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import pytest

import rota.db
from daemon_queries import claim
from factories import NODE, make_handler, make_job, make_running_job
from rota.db import node_reports, operations, queries, reports, schedule_queries, schedule_reports, server_reports
from rota.db.sql import MIGRATIONS, SQL
from rota.domain import job as domain
from rota.domain.job import Claim, Terms, idempotency_key

if TYPE_CHECKING:
    from types import ModuleType

    from asyncpg import Connection, Record

EACH = pytest.mark.parametrize("name", SQL)


class Column(NamedTuple):
    """A parameter or a column, as the header names it."""

    name: str
    type: str
    nullable: bool = False


class Header(NamedTuple):
    """What a query's first lines promise."""

    parameters: list[Column]
    columns: list[Column]
    indexes: list[tuple[str, str]]


def header(text: str) -> Header:
    """Read it."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line)
    parameters, columns, indexes = [], [], []
    for line in lines:
        if given := re.match(r"--   \$(\d+) +(\w+) +(\S+)", line):
            parameters.append(Column(given[2], given[3]))
            assert int(given[1]) == len(parameters), f"out of order: {line}"
        elif found := re.match(r"--   -> (.*)", line):
            for column in re.split(r",\s*", re.split(r"\s{2,}", found[1])[0]):
                name, kind = column.split()
                columns.append(Column(name, kind.rstrip("?"), kind.endswith("?")))
        elif named := re.match(r"-- index: (.*)", line):
            for names, migration in re.findall(r"([\w, ]+) \((\d{4})\)", named[1]):
                indexes += [(name, migration) for name in re.findall(r"\w+", names)]
            assert indexes, f"no index with its migration in: {line}"
    return Header(parameters, columns, indexes)


@EACH
async def test_parameters_and_columns_are_those_of_the_header(conn: Connection[Record], name: str) -> None:
    """The header is what a caller reads; with an empty search_path nothing but rota's own objects can be meant."""
    promised = header(SQL[name])
    await conn.execute("set search_path = ''")
    prepared = await conn.prepare(SQL[name])
    assert [kind.name for kind in prepared.get_parameters()] == [column.type for column in promised.parameters]
    real = [
        (attribute.name, attribute.type.name)
        for attribute in prepared.get_attributes()
        if attribute.type.name != "void"
    ]
    assert real == [(column.name, column.type) for column in promised.columns]


@EACH
async def test_every_index_that_a_header_names_exists(conn: Connection[Record], name: str) -> None:
    """A plan test can only look for an index by a name that is still true."""
    for index, migration in header(SQL[name]).indexes:
        table = await conn.fetchval(
            "select indrelid::regclass::text from pg_index where indexrelid = to_regclass($1)", f"rota.{index}"
        )
        assert table is not None, f"there is no index {index}"
        (text,) = [text for file, text in MIGRATIONS.items() if file.startswith(migration)]
        assert re.search(rf"\b{index}\b", text) or f"create table {table} (" in text, (
            f"{index} isn't made in {migration}"
        )


@EACH
def test_every_query_is_one_statement_that_lists_its_columns(name: str) -> None:
    """Without a list of columns a new one of the table would change what callers get."""
    text = SQL[name]
    assert text.startswith("-- ")
    body = re.sub(r"--.*", "", text)
    assert ";" not in body
    assert not re.search(
        r"\b(from|join|update|into)\s+(jobs|job_runs|attempts|dead_letters|handlers|nodes|queues)\b", body
    )


@EACH
def test_every_query_is_sent_by_somebody(name: str) -> None:
    """A file that nobody reads any more is a claim about the protocol that isn't true."""
    folder = Path(rota.db.__file__).parent
    sources = "".join(path.read_text("utf-8") for path in folder.glob("*.py"))
    assert f'"{name}"' in sources or (name.startswith("prune_") and 'f"prune_{what}"' in sources)


def _fields(cls: type) -> list[Column]:
    hints = typing.get_type_hints(cls, vars(domain), {"UUID": UUID})
    result = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        options = [option for option in typing.get_args(hint) if option is not type(None)] or [hint]
        kind = getattr(options[0], "__supertype__", options[0])
        result.append(Column(field.name, getattr(kind, "__name__", str(kind)), type(None) in typing.get_args(hint)))
    return result


PYTHON_NAMES = {
    "int2": "int", "int4": "int", "int8": "int", "text": "str", "uuid": "UUID", "interval": "timedelta",
    "timestamptz": "datetime", "bool": "bool",
}  # fmt: skip


@pytest.mark.parametrize("name", ["find_expired_leases", "load_terms"])
def test_terms_are_the_columns_of_the_queries_that_read_them(name: str) -> None:
    """A column more, fewer, or of another kind would be an error in the middle of an outage, when jobs are retried."""
    columns = [(c.name, PYTHON_NAMES[c.type], c.nullable) for c in header(SQL[name]).columns]
    assert sorted(columns) == sorted(tuple(field) for field in _fields(Terms))


def test_a_claim_is_built_from_the_columns_in_their_order() -> None:
    """It is built by position, because that is what a claim can afford: two columns swapped would pass unseen."""
    fields = _fields(Claim)
    assert [field.name for field in fields[-2:]] == ["limit_key", "is_limited"]
    last_row = {
        "claim_due_jobs": ["next_in", "others", "due_lanes", "due_from", "ignored", "limited"],
        "claim_limited_jobs": [
            "turn", "weight", "next_in", "is_contended", "ignored", "round_complete", "walked_priorities", "walked_parts",
            "walked_queues", "walked_keys",
        ],
    }  # fmt: skip
    for name, of_a_job in (("claim_due_jobs", fields[:-2]), ("claim_limited_jobs", fields)):
        columns = header(SQL[name]).columns
        assert [c.name for c in columns] == [*(field.name for field in of_a_job), *last_row[name]]
        kinds = [PYTHON_NAMES[c.type] for c in columns[: len(of_a_job)]]
        assert kinds == ["int" if f.name == "fence_token" else f.type for f in of_a_job]


async def test_a_claim_carries_what_the_row_says(conn: Connection[Record]) -> None:
    """The same, by a row in which no two columns are alike."""
    await make_handler(conn)
    job_id, _ = await make_job(conn, priority=3, payload='{"n": 7}', timeout=timedelta(seconds=41), meta='{"t": 1}')
    (got,) = await claim(conn)
    row = await conn.fetchrow("select * from rota.jobs")
    assert row is not None
    assert got.job_id == job_id
    for name in (
        "handler",
        "queue",
        "priority",
        "payload",
        "attempt",
        "fence_token",
        "run_at",
        "started_at",
        "timeout",
    ):
        assert getattr(got, name) == row[name]
    assert (got.meta, got.checkpoint, got.schedule_id, got.idempotency_key) == ('{"t": 1}', None, None, None)


async def test_a_claim_is_silent_about_what_goes_without_saying(conn: Connection[Record]) -> None:
    """Each value that comes along costs both sides; what is as for most jobs comes as NULL, all else as the row says."""
    await make_handler(conn)
    plain, _ = await make_job(conn)
    odd, _ = await make_job(conn, lease=timedelta(seconds=41), idempotency_key="k", schedule_id=7)
    await conn.execute("update rota.jobs set scheduled_for = run_at where job_id = $1", plain)
    await conn.execute("update rota.jobs set scheduled_for = run_at - interval '1 s' where job_id = $1", odd)
    claims = {got.job_id: got for got in await claim(conn)}
    got = claims[plain]
    assert (got.scheduled_for, got.lease, got.schedule_id, got.meta) == (None,) * 4
    got, row = claims[odd], await conn.fetchrow("select * from rota.jobs where job_id = $1", odd)
    assert row is not None
    for name in ("scheduled_for", "created_at", "lease", "schedule_id", "idempotency_key"):
        assert getattr(got, name) == row[name] is not None


async def test_a_derived_idempotency_key_is_stable_and_differs_for_a_reissued_job_id(conn: Connection[Record]) -> None:
    """A promoted standby that lagged issues job_ids again. Without created_at, a receiver would drop the second job's effect."""
    await make_handler(conn)
    due = datetime(2031, 1, 1, tzinfo=UTC)
    put = (
        "insert into rota.jobs (job_id, handler, run_at, created_at) "
        "overriding system value values (1, 'h', $1, '1970-01-01 00:00:01.000002+00'::timestamptz + $2)"
    )
    make_due = "select rota.reschedule(1, now())"
    release = "update rota.jobs set state = 'scheduled', leased_by = null, lease_expires_at = null"

    async def key() -> str:
        (got,) = await claim(conn)
        return idempotency_key(got, "i")

    await conn.execute(put, due, timedelta(0))
    await conn.execute(make_due)
    first = await key()
    assert first == "rota:i:job:1:2031-01-01T00:00:00.000000Z:1000002"
    await conn.execute(release)
    assert await key() == first, "the next attempt"
    await conn.execute("delete from rota.jobs")
    await conn.execute(put, due, timedelta(microseconds=1))
    await conn.execute(make_due)
    assert await key() == "rota:i:job:1:2031-01-01T00:00:00.000000Z:1000003", "another job with this job_id"
    await conn.execute(f"{release}, schedule_id = 7")
    assert await key() == "rota:i:7:2031-01-01T00:00:00.000000Z", "a fire"


async def test_columns_marked_as_nullable_are_and_the_others_are_not(conn: Connection[Record]) -> None:
    """PREPARE doesn't tell: a job without any of its options shows which columns a caller has to expect as None."""
    bare = await make_running_job(
        conn, delivery=None, max_attempts=None, backoff_base=None, backoff_cap=None, lease=timedelta(seconds=-1)
    )
    await make_job(conn, start_by=timedelta(seconds=-1))
    arguments: dict[str, list[Any]] = {
        "find_expired_leases": [0, 10],
        "load_terms": [NODE, [bare.job_id], [bare.fence_token]],
        "find_orphaned_claims": [NODE, []],
        "expire_unstarted_jobs": [10, None],
    }
    for name, given in arguments.items():
        (row,) = await conn.fetch(SQL[name], *given)
        for column in header(SQL[name]).columns:
            assert column.nullable or row[column.name] is not None, f"{name}: {column.name}"


@pytest.mark.parametrize(
    "module", [node_reports, operations, queries, reports, schedule_queries, schedule_reports, server_reports]
)
def test_the_modules_that_call_have_no_text_of_their_own(module: ModuleType) -> None:
    """SQL in strings has no header, no contract, and no plan test."""
    text = Path(str(module.__file__)).read_text("utf-8")
    assert not re.search(r"\b(select|insert into|update \w+ set|delete from)\b", text)
