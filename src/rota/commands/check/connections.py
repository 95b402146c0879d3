"""Checks of the login and of the URLs."""

from typing import TYPE_CHECKING

from rota.commands.check.finding import Finding
from rota.commands.session import explaining

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts


async def check_login(facts: "Facts") -> list[Finding]:
    """Report a login that can't run a daemon, where an app is configured. Without an app this is a person's shell."""
    server = facts.server
    if facts.config.app is None or server.may_run:
        return []
    return [
        Finding(
            check="role",
            object=server.user_name,
            finding=f"the login {server.user_name} may not run a daemon, which ROTA_APP says that this is for",
            do=f"grant {server.daemon_role or 'rota_daemon'} to {server.user_name}, or give the URL of a login that has it",
        )
    ]


async def check_listen_route(facts: "Facts") -> list[Finding]:
    """Report a connection on which notifications can't arrive: LISTEN succeeds there, and no error ever says so."""
    from rota.db.migrate import installation
    from rota.db.pool import ROUTE_OF_COMMANDS, connect, is_pooled, probe
    from rota.errors import RotaError

    config = facts.config
    if config.database.direct_url is None:
        if not is_pooled(facts.db, pid=facts.server.pid):
            return []
        return [
            _pooler(
                "the URL leads through a connection pooler, which notifications can't pass",
                "set ROTA_DIRECT_URL to a URL straight to the server; without it, jobs are found by polling",
            )
        ]
    dsn = config.require_direct_database()
    try:
        with explaining(dsn):
            if (await probe(dsn)).pooled:
                return [
                    _pooler(
                        "ROTA_DIRECT_URL leads through a connection pooler, which notifications can't pass",
                        "let it lead straight to the server, to its own host and port; until then, jobs are found by polling",
                    )
                ]
            direct = await connect(dsn, route=ROUTE_OF_COMMANDS, name="rota check direct")
            try:
                there = await installation(direct)
            finally:
                await direct.close()
    except RotaError as error:
        return [
            _direct_url(
                f"ROTA_DIRECT_URL can't be used: {error}",
                "correct it, or unset it where the other URL leads straight to the server; until then, polling finds the jobs",
            )
        ]
    if there.installation_id == (await installation(facts.db)).installation_id:
        return []
    return [
        _direct_url(
            "ROTA_DIRECT_URL leads to another database than the URL: what is inserted there notifies nobody here",
            "let both lead to the same database; until then, jobs are found by polling",
        )
    ]


def _pooler(finding: str, do: str) -> Finding:
    return Finding(check="pooler", object="database URL", finding=finding, do=do, alert="RotaListenerDown")


def _direct_url(finding: str, do: str) -> Finding:
    return Finding(check="direct URL", object="ROTA_DIRECT_URL", finding=finding, do=do, alert="RotaListenerDown")
