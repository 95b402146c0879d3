"""Find the database when a daemon starts: probe the server, read the schema, and wait for a fail-over to end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rota.config import mask_dsn
from rota.db.connecting import WORTH_WAITING, close_connection
from rota.db.migrate import Installation, read_installation
from rota.db.pool import connect
from rota.db.salvage import TRANSIENT
from rota.db.server import probe, unreachable_error
from rota.db.server_reports import examine_rights
from rota.errors import DatabaseUnusable
from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import Callable

    from rota.config.database_url import DatabaseUrl
    from rota.db.sessions import Route

FAILOVER_SECONDS = 15.0
"""How long a starting daemon waits for a server that accepts writes before it exits with 3 and is started again."""


async def find_database(
    url: DatabaseUrl, *, connection_name: str, on_wait: Callable[[str], None]
) -> tuple[Route, Installation]:
    """Return how to connect and what is installed. Calls `on_wait` with the reason before each retry.

    Waits up to FAILOVER_SECONDS for a server that accepts writes and has a free connection. Raises DatabaseUnusable after that,
    and at once for any other outage.
    """
    give_up_at = boottime() + FAILOVER_SECONDS
    reason = ""
    while boottime() < give_up_at:
        try:
            route = await _probe_database(url)
            return route, await _read_installation(url, route, connection_name)
        except WORTH_WAITING as error:
            reason = str(error) or type(error).__name__
            on_wait(reason)
            await asyncio.sleep(1)
    raise DatabaseUnusable(f"{mask_dsn(url.dsn)} has not become usable within {FAILOVER_SECONDS:g} s: {reason}")


async def _probe_database(url: DatabaseUrl) -> Route:
    try:
        return await probe(url)
    except WORTH_WAITING:
        raise
    except TRANSIENT as error:
        raise unreachable_error(mask_dsn(url.dsn), str(error) or type(error).__name__) from error


async def _read_installation(url: DatabaseUrl, route: Route, connection_name: str) -> Installation:
    # Not through a pool: the first statement on each of its connections needs the schema.
    conn = await connect(url, route=route, name=connection_name)
    try:
        installation = await read_installation(conn)
        if fault := next((fault for fault in await examine_rights(conn) if fault.stops_daemons), None):
            raise DatabaseUnusable(f"{fault.cause}. {fault.cure}")
        return installation
    finally:
        await close_connection(conn)
