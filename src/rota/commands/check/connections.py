"""Checks of the login and of the URLs."""

from contextlib import suppress
from typing import TYPE_CHECKING

from rota.commands.check.finding import Finding
from rota.commands.database_errors import explaining_errors

if TYPE_CHECKING:
    from datetime import datetime

    from rota.commands.check.finding import Facts
    from rota.config.database_url import DatabaseUrl
    from rota.db.connecting import Address
    from rota.db.server import Server


async def check_login(facts: "Facts") -> list[Finding]:
    """Report a login that can't run a daemon. Without a configured app the login is assumed to be a person's."""
    server = facts.server
    if facts.config.app is None or server.may_run:
        return []
    return [
        Finding(
            check="role",
            object=server.user_name,
            finding=f"the login {server.user_name} may not run a daemon, but an app is configured (ROTA_APP)",
            do=f"grant {server.daemon_role or 'rota_daemon'} to {server.user_name}, or give the URL of a login that has it",
        )
    ]


async def check_listen_route(facts: "Facts") -> list[Finding]:
    """Report a connection that can't receive notifications. LISTEN succeeds even through a pooler, so there is no error."""
    from rota.db.connecting import close_connection
    from rota.db.migrate import read_installation
    from rota.db.pool import connect
    from rota.db.server import is_pooled, probe
    from rota.db.sessions import ROUTE_OF_COMMANDS
    from rota.errors import RotaError

    config = facts.config
    if config.database.direct_url is None:
        if not is_pooled(facts.db, pid=facts.server.pid):
            return []
        return [
            _pooler_finding(
                "the URL leads through a connection pooler, which notifications can't pass",
                "set ROTA_DIRECT_URL to a URL straight to the server; without it, jobs are found by polling",
            )
        ]
    url = config.direct_database_url()
    try:
        with explaining_errors(url.dsn):
            if (await probe(url)).pooled:
                return [
                    _pooler_finding(
                        "ROTA_DIRECT_URL leads through a connection pooler, which notifications can't pass",
                        "set it to the server's own host and port; until then, jobs are found by polling",
                    )
                ]
            direct = await connect(url, route=ROUTE_OF_COMMANDS, name="rota check direct")
            try:
                there = await read_installation(direct)
            finally:
                await close_connection(direct)
    except RotaError as error:
        return [
            _direct_url_finding(
                f"ROTA_DIRECT_URL can't be used: {error}",
                "correct it, or unset it if DATABASE_URL leads straight to the server; until then, jobs are found by polling",
            )
        ]
    if there.installation_id == (await read_installation(facts.db)).installation_id:
        return []
    return [
        _direct_url_finding(
            "ROTA_DIRECT_URL and DATABASE_URL lead to different databases, so inserts do not notify the daemons",
            "set both to the same database; until then, jobs are found by polling",
        )
    ]


def _pooler_finding(finding: str, do: str) -> Finding:
    return Finding(check="pooler", object="database URL", finding=finding, do=do, alert="RotaListenerDown")


def _direct_url_finding(finding: str, do: str) -> Finding:
    return Finding(check="direct URL", object="ROTA_DIRECT_URL", finding=finding, do=do, alert="RotaListenerDown")


async def check_hosts(facts: "Facts") -> list[Finding]:
    """Report a URL with several writable hosts. Their data diverges, and the jobs of all but one host will be lost."""
    from rota.db.connecting import address_text, host_addresses

    url = facts.config.database_url()
    addresses = host_addresses(url) if "," in url.dsn else []
    servers = [await _writable_server(url, address) for address in addresses]
    hosts = {
        server: address_text(address) for address, server in zip(addresses, servers, strict=True) if server is not None
    }
    if len(hosts) < 2:
        return []
    primaries = ", ".join(f"{host} (timeline {server.timeline})" for (server, _), host in hosts.items())
    return [
        Finding(
            check="two primaries",
            object=primaries,
            finding=f"several hosts of the database URL accept writes: {primaries}. Daemons may use any of them",
            do="stop every host except the primary of your cluster manager, or except that with the highest timeline. Make the "
            "stopped hosts standbys with pg_rewind or a new base backup. Jobs that exist only there are lost",
        )
    ]


async def _writable_server(url: "DatabaseUrl", address: "Address") -> "tuple[Server, datetime] | None":
    """Return the server at one host if it is writable. A host that is down is not a finding, and returns None."""
    from asyncpg import PostgresError

    from rota.db.connecting import close_connection, open_connection
    from rota.db.salvage import LOST
    from rota.db.server import find_writable_server
    from rota.db.sessions import ROUTE_OF_COMMANDS, own_session_options

    with suppress(*LOST, PostgresError):
        db = await open_connection(
            url, only=address, limit=3, command_timeout=3, **own_session_options(ROUTE_OF_COMMANDS, "rota check")
        )
        try:
            return await find_writable_server(db)
        finally:
            await close_connection(db)
    return None
