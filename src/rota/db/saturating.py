"""Decode instants and intervals outside of Python's range as the nearest value inside of it.

Used by commands, so that one row written without the constraints does not make a whole report fail.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncpg

POSTGRES_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)

EARLIEST, LATEST = datetime(1000, 1, 1, tzinfo=UTC), datetime(8000, 1, 1, tzinfo=UTC)
"""These lie well inside of Python's range, so that commands can add and subtract."""

LONGEST = LATEST - EARLIEST

MICROSECOND = timedelta(microseconds=1)

INFINITE = {
    datetime.min.replace(tzinfo=UTC): -(2**63),
    datetime.max.replace(tzinfo=UTC): 2**63 - 1,
}
"""The instants that mean -infinity and infinity, as in the driver."""


def decode_instant(sent: tuple[int]) -> datetime:
    """Return the instant for microseconds since 2000, clamped to EARLIEST and LATEST."""
    (microseconds,) = sent
    try:
        instant = POSTGRES_EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        instant = LATEST if microseconds > 0 else EARLIEST
    return min(max(instant, EARLIEST), LATEST)


def encode_instant(instant: datetime) -> tuple[int]:
    """Return microseconds since 2000. An instant without a zone is local time."""
    if (infinite := INFINITE.get(instant)) is not None:
        return (infinite,)
    return ((instant.astimezone(UTC) - POSTGRES_EPOCH) // MICROSECOND,)


def decode_interval(sent: tuple[int, int, int]) -> timedelta:
    """Return the length of months (30 days; a year is 365), days and microseconds, clamped to LONGEST in both directions."""
    months, days, microseconds = sent
    years = int(months / 12)
    microseconds += (years * 365 + (months - years * 12) * 30 + days) * 86_400_000_000
    longest = LONGEST // MICROSECOND
    return timedelta(microseconds=min(max(microseconds, -longest), longest))


def encode_interval(length: timedelta) -> tuple[int, int, int]:
    """Return months, days and microseconds."""
    return (0, length.days, length.seconds * 1_000_000 + length.microseconds)


async def saturate(conn: asyncpg.Connection) -> None:
    """Make a connection use these codecs for timestamptz and interval."""
    for typename, encoder, decoder in (
        ("timestamptz", encode_instant, decode_instant),
        ("interval", encode_interval, decode_interval),
    ):
        await conn.set_type_codec(typename, schema="pg_catalog", encoder=encoder, decoder=decoder, format="tuple")
