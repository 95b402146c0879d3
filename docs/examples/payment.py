"""A payment with an external provider: rate limits, permanent failures, and an effect that must count once.

The provider is a class that the app's lifespan opens, so a test can replace it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import rota

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@dataclass
class Payment:
    order: int
    cents: int


class CardDeclined(Exception): ...


class TooManyRequests(Exception):
    """The provider's answer 429."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"try again in {seconds} s")
        self.seconds = seconds


class Provider:
    """A client of the payment provider."""

    async def charge(self, cents: int, *, idempotency_key: str) -> str:
        """Charge the card once per key, and return the provider's reference."""
        return f"ch_{idempotency_key[-8:]}_{cents}"


@asynccontextmanager
async def lifespan() -> AsyncIterator[Provider]:
    yield Provider()


app = rota.App("payments", lifespan=lifespan)


@app.handler("pay", permanent=(CardDeclined,), timeout=timedelta(seconds=30))
async def pay(job: rota.Job[Payment]) -> dict[str, str]:
    """Charge once. The idempotency key is the same for every attempt, so the provider recognises a repetition."""
    provider: Provider = job.state
    try:
        reference = await provider.charge(job.payload.cents, idempotency_key=job.idempotency_key)
    except TooManyRequests as error:
        raise rota.Snooze(after=timedelta(seconds=error.seconds)) from error
    return {"reference": reference}
