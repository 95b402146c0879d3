"""Checks of the server's settings and limits that endanger jobs."""

from typing import TYPE_CHECKING

from rota.commands.check.finding import MAX_FINDINGS, Finding, cap_findings
from rota.commands.printing import plural

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts
    from rota.db.server_reports import ConnectionLimit, RiskySetting

RELOAD_HINT = "then select pg_reload_conf()"

RISKS = {
    "fsync": (
        "a crash of its machine can destroy the database, with all jobs",
        f"alter system set fsync = on, {RELOAD_HINT}; then restart the server or run sync, which also makes older writes safe",
    ),
    "full_page_writes": (
        "a crash of its machine can leave torn pages, and jobs are lost or run again",
        f"alter system set full_page_writes = on, {RELOAD_HINT}, and run checkpoint",
    ),
    "synchronous_commit": (
        "it can't be turned on through a connection pooler: a crash of the server loses settlements, and jobs run again",
        "alter role … set synchronous_commit = on for the daemons' login, then reconnect the pooler",
    ),
    "track_counts": (
        "autovacuum does not know which tables to clean, and claims become slow",
        f"alter system set track_counts = on, {RELOAD_HINT}",
    ),
    "zero_damaged_pages": (
        "the server replaces damaged pages by empty ones without an error, and their jobs disappear",
        f"alter system set zero_damaged_pages = off, {RELOAD_HINT}",
    ),
    "ignore_checksum_failure": (
        "the server reads damaged pages, and jobs from them",
        f"alter system set ignore_checksum_failure = off, {RELOAD_HINT}",
    ),
    "default_transaction_read_only": (
        "daemons can't write, and no job is claimed",
        "alter role … set default_transaction_read_only = off for the daemons' login, then restart the daemons",
    ),
    "statement_timeout": (
        "the server cancels claims and settlements that a lock or a large batch delays for longer",
        "alter role … set statement_timeout = 0 for the daemons' login, then restart the daemons",
    ),
    "transaction_timeout": (
        "the server ends the daemons' transactions, and those of handlers, that last longer",
        "alter role … set transaction_timeout = 0 for the daemons' login, then restart the daemons",
    ),
}
"""setting -> (its risk, the cure)"""

IDLE_CONNECTIONS = 3
"""Connections that a daemon without jobs keeps open. If fewer are free, it can't start."""


async def check_settings(facts: "Facts") -> list[Finding]:
    """Report settings that can lose committed jobs, or run settled jobs again."""
    from rota.db import server_reports
    from rota.db.server import is_pooled

    pooled = is_pooled(facts.db, pid=facts.server.pid)
    return [
        _setting_finding(each)
        for each in await server_reports.list_risky_settings(facts.db)
        # Without a pooler, each daemon turns synchronous_commit on for its sessions. check_server reports a read-only session.
        if (each.name != "synchronous_commit" or pooled)
        and (each.name != "default_transaction_read_only" or each.login is not None)
    ]


def _setting_finding(setting: "RiskySetting") -> Finding:
    risk, cure = RISKS[setting.name]
    unit = " ms" if setting.name.endswith("_timeout") else ""
    of_login = f" for the login {setting.login}" if setting.login else ""
    return Finding(
        check="settings",
        object=setting.name,
        finding=f"{setting.name} is {setting.value}{unit}{of_login}: {risk}",
        do=cure.replace("…", setting.login or "…"),
    )


async def check_table_autovacuum(facts: "Facts") -> list[Finding]:
    """Report rota's tables without autovacuum."""
    from rota.db import server_reports

    names = await server_reports.list_tables_without_autovacuum(facts.db)
    findings = [
        Finding(
            check="autovacuum",
            object=name,
            finding=f"autovacuum is off for {name}",
            do=f"alter table {name} reset (autovacuum_enabled): without it, claims become slow",
        )
        for name in names[:MAX_FINDINGS]
    ]
    return cap_findings("autovacuum", findings, len(names), "reset autovacuum_enabled on all tables of the schema rota")


async def check_connection_limits(facts: "Facts") -> list[Finding]:
    """Report connection limits that are almost reached, or lower than the living daemons need under load."""
    from rota.db import server_reports
    from rota.db.server import is_pooled

    settings = facts.config.database
    needed_by_each = settings.pool_size + settings.handler_pool_size + IDLE_CONNECTIONS - 1
    # A pooler shares few connections among all daemons.
    needed = 0 if is_pooled(facts.db, pid=facts.server.pid) else len(facts.nodes) * needed_by_each
    return [
        finding
        for limit in await server_reports.count_connections(facts.db)
        if (finding := _connection_limit_finding(limit, needed, daemons=len(facts.nodes)))
    ]


def _connection_limit_finding(limit: "ConnectionLimit", needed: int, *, daemons: int) -> Finding | None:
    free = limit.allowed - limit.used
    if free < IDLE_CONNECTIONS:
        finding = f"{limit.scope} has {max(free, 0)} of {limit.allowed} connections left: no other daemon can start"
    elif needed > limit.allowed:
        finding = (
            f"{limit.scope} allows {limit.allowed} connections, and {plural(daemons, 'daemon')} may open {needed}: "
            "under load, some can't connect"
        )
    else:
        return None
    return Finding(
        check="connections",
        object=limit.scope,
        finding=finding,
        do="raise the limit (max_connections, or connection limit of the database or login), lower database.pool_size and "
        "database.handler_pool_size, or use a pooler",
    )
