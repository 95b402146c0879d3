"""The examples of docs/examples run as printed."""

from __future__ import annotations

import importlib.util
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import create_async_engine

from rota.testing import Failed, InlineJob, Snoozed, Succeeded, make_job, perform

if TYPE_CHECKING:
    from types import ModuleType

    import pytest
    from asyncpg import Connection, Record

    from servers import Database

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    """Import one example from its file."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test() -> None:
    """An example that nothing runs stops working unnoticed."""
    source = Path(__file__).read_text()
    assert [file.name for file in EXAMPLES.glob("*.py") if f'example("{file.stem}")' not in source] == []


async def test_the_report_skips_the_sections_that_are_done(capsys: pytest.CaptureFixture[str]) -> None:
    """A retry continues from the checkpoint."""
    report = example("nightly_report")
    job: InlineJob[Any] = make_job({}, checkpoint=["north"])

    result = await report.nightly_report(job)

    assert result == {"sections": 3}
    assert "north" not in capsys.readouterr().out
    assert (job.progress, job.checkpoint) == (1.0, ["north", "south", "west"])


async def test_a_payment_uses_one_idempotency_key_and_distinguishes_two_kinds_of_failure() -> None:
    """A declined card is permanent; a rate limit uses no attempt."""
    payment = example("payment")

    class Declining(payment.Provider):  # type: ignore[misc,name-defined]
        async def charge(self, cents: int, *, idempotency_key: str) -> Any:
            del idempotency_key
            raise payment.CardDeclined if cents > 1000 else payment.TooManyRequests(30)

    paid = await perform(payment.app, "pay", {"order": 7, "cents": 100}, idempotency_key="order-7-paid")
    declined = await perform(payment.app, "pay", {"order": 7, "cents": 2000}, state=Declining())
    postponed = await perform(payment.app, "pay", {"order": 7, "cents": 100}, state=Declining())

    assert isinstance(paid, Succeeded)
    assert paid.value == {"reference": "ch_r-7-paid_100"}
    assert isinstance(declined, Failed)
    assert declined.permanent
    assert isinstance(postponed, Snoozed)
    assert postponed.after == timedelta(seconds=30)


async def test_an_order_and_its_job_commit_together(database: Database, conn: Connection[Record]) -> None:
    """The job is enqueued in the transaction of the web application."""
    shop = example("web_shop")
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: _connect(database.dsn))
    async with engine.begin() as setup:
        await setup.run_sync(shop.metadata.create_all)

    order = await shop.place_order(engine, "bicycle")

    await engine.dispose()

    assert (
        await conn.fetchval("select payload from rota.jobs where unique_key = $1", f"order:{order}")
        == f'{{"order": {order}}}'
    )


async def _connect(dsn: str) -> Any:
    import asyncpg

    return await asyncpg.connect(dsn)
