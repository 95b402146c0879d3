"""Read instants and intervals that Python can't represent as the nearest ones that it can compute with.

For commands: one row that an owner wrote without the constraints must not keep a report from all others.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncpg

POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

EARLIEST, LATEST = datetime(1000, 1, 1, tzinfo=UTC), datetime(8000, 1, 1, tzinfo=UTC)
"""Far enough from Python's own ends for what commands add and subtract."""

LONGEST = LATEST - EARLIEST

MICROSECOND = timedelta(microseconds=1)

INFINITE = {
    datetime.min.replace(tzinfo=UTC): -(2**63),
    datetime.max.replace(tzinfo=UTC): 2**63 - 1,
}
"""The instants that stand for -infinity and infinity, as they do for the driver."""


def decode_instant(sent: tuple[int]) -> datetime:
    """Return the instant that lies so many microseconds after 2000, at most LATEST and at least EARLIEST."""
    try:
        found = POSTGRES_EPOCH + timedelta(microseconds=sent[0])
    except OverflowError:
        found = LATEST if sent[0] > 0 else EARLIEST
    return min(max(found, EARLIEST), LATEST)


def encode_instant(instant: datetime) -> tuple[int]:
    """Return the microseconds after 2000 of an instant, which is local time if it names no zone."""
    if (infinite := INFINITE.get(instant)) is not None:
        return (infinite,)
    return ((instant.astimezone(UTC) - POSTGRES_EPOCH) // MICROSECOND,)


def decode_interval(sent: tuple[int, int, int]) -> timedelta:
    """Return months (of 30 days, years of 365), days and microseconds as one length, at most LONGEST in either direction."""
    months, days, microseconds = sent
    years = int(months / 12)
    microseconds += (years * 365 + (months - years * 12) * 30 + days) * 86_400_000_000
    longest = LONGEST // MICROSECOND
    return timedelta(microseconds=min(max(microseconds, -longest), longest))


def encode_interval(length: timedelta) -> tuple[int, int, int]:
    """Return a length as months, days and microseconds."""
    return (0, length.days, length.seconds * 1_000_000 + length.microseconds)


async def saturate(conn: asyncpg.Connection) -> None:
    """Have this connection read and write instants and intervals by the functions above."""
    for typename, encoder, decoder in (
        ("timestamptz", encode_instant, decode_instant),
        ("interval", encode_interval, decode_interval),
    ):
        await conn.set_type_codec(typename, schema="pg_catalog", encoder=encoder, decoder=decoder, format="tuple")
