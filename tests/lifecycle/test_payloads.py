"""Payloads are decoded into the type that the handler declares, inside the attempt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

import rota
from in_process_daemons import dead_letter, final_outcome, insert_job, run_node

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from servers import Database


@dataclass
class Receipt:
    """A dataclass payload."""

    order: int
    email: str


class Order(BaseModel):
    """A Pydantic payload."""

    order: int


class Strict(Order, extra="forbid"):
    """A Pydantic payload whose errors name unknown keys."""


@dataclass
class Picky:
    """A payload that raises an error of its own."""

    order: int

    def __post_init__(self) -> None:
        raise LookupError("no such order")


def typed_app(seen: list[Any]) -> rota.App:
    """An app with typed and untyped handlers that append their payload to `seen`."""
    app = rota.App("typed")

    @app.handler("receipt")
    async def receipt(job: rota.Job[Receipt]) -> None:
        seen.append(job.payload)

    @app.handler("order")
    async def order(job: rota.Job[Order]) -> None:
        seen.append(job.payload)

    @app.handler("strict")
    async def strict(job: rota.Job[Strict]) -> None:
        seen.append(job.payload)

    @app.handler("picky")
    async def picky(job: rota.Job[Picky]) -> None:
        seen.append(job.payload)

    @app.handler("plain")
    async def plain(job: rota.Job[Any]) -> None:
        seen.append(job.payload)

    @app.handler("thread")
    def thread(job: rota.SyncJob[Receipt]) -> None:
        seen.append(job.payload)

    return app


async def test_payloads_decode_into_the_handlers_type(database: Database, conn: Connection[Record]) -> None:
    seen: list[Any] = []
    async with run_node(database.dsn, typed_app(seen)):
        for handler in ("receipt", "thread"):
            job_id = await insert_job(conn, handler, '{"order": 7, "email": "a@b"}')
            assert await final_outcome(conn, job_id) == "succeeded"
        assert await final_outcome(conn, await insert_job(conn, "order", '{"order": 7}')) == "succeeded"
    assert seen == [Receipt(7, "a@b"), Receipt(7, "a@b"), Order(order=7)]


@pytest.mark.parametrize(
    ("handler", "payload"),
    [
        ("receipt", '{"order": "seven", "email": "a@b"}'),
        ("receipt", "[]"),
        ("order", "null"),
        ("picky", '{"order": 1}'),
        ("thread", "{}"),
        ("plain", '{"n": 1e5000}'),
        ("receipt", '{"order": 1e5000, "email": "secret@example"}'),
        ("strict", '{"' + "k" * 10_000 + '": 1}'),
    ],
    ids=lambda each: each[:40],
)
async def test_a_payload_that_does_not_decode_makes_a_dead_letter_of_its_own_job_only(
    database: Database, conn: Connection[Record], handler: str, payload: str
) -> None:
    """It is not retried, and the error does not contain the payload."""
    seen: list[Any] = []
    async with run_node(database.dsn, typed_app(seen)) as node:
        async with conn.transaction():
            bad = await insert_job(conn, handler, payload)
            good = await insert_job(
                conn, "plain", '{"big": 123456789012345678901234567890, "deep": ' + "[" * 90 + "]" * 90 + "}"
            )
        assert await final_outcome(conn, bad) == "dead: bad_payload"
        assert await final_outcome(conn, good) == "succeeded"
        assert node.crash is None
    assert [value["big"] for value in seen] == [123456789012345678901234567890]

    dead = await dead_letter(conn, bad)
    assert dead["attempt"] == 1
    assert "secret" not in dead["error"]


async def test_extreme_values_in_meta_and_instants_block_no_other_job(
    database: Database, conn: Connection[Record]
) -> None:
    seen: list[Any] = []
    async with run_node(database.dsn, typed_app(seen)) as node:
        job_id = await insert_job(
            conn,
            "plain",
            '{"n": 1}',
            meta="'{\"n\": 1e5000}'",
            run_at="timestamptz '1970-01-01 00:00:00+00'",
            idempotency_key="E'\\u2028\\n\"'",
            timeout="interval '1 microsecond'",
            max_attempts=1,
            lease="interval '1 day'",
            retry_for="interval '366 days'",
        )
        await final_outcome(conn, job_id)

        assert node.crash is None
        assert await final_outcome(conn, await insert_job(conn, "plain")) == "succeeded"
