"""`rota check`: report each problem with its cause and its cure.

To add a check, write a function of the type `Check` in the module of its subject, and add it to CHECKS.
"""

import asyncio
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

import typer

from rota.commands.check import connections, housekeeping, jobs, limits, nodes, rights, schedules, settings
from rota.commands.check.finding import Check, Facts, Finding
from rota.commands.check.server import check_server, server_findings
from rota.commands.database import Database, run_on_connection, takes_database
from rota.commands.database_errors import explain_error
from rota.commands.options import AsJson
from rota.commands.printing import plural, print_json, printable

if TYPE_CHECKING:
    from rota.config import Config
    from rota.db.pool import Connection
    from rota.db.server_reports import ServerFacts

__all__ = ["CHECKS", "check", "examine", "server_findings"]

CHECKS: tuple[Check, ...] = (
    connections.check_login,
    rights.check_rights,
    rights.check_schema,
    check_server,
    settings.check_settings,
    settings.check_table_autovacuum,
    settings.check_connection_limits,
    connections.check_hosts,
    connections.check_listen_route,
    jobs.check_paused,
    jobs.check_unclaimed,
    jobs.check_priorities,
    jobs.check_slots,
    jobs.check_lanes,
    jobs.check_leases,
    jobs.check_dead_letters,
    limits.check_limits,
    limits.check_unmatched,
    limits.check_open_keys,
    nodes.check_zone_data,
    nodes.check_foreign_handlers,
    nodes.check_refused_rows,
    nodes.check_lost,
    nodes.check_absence,
    housekeeping.check_housekeeping,
    schedules.check_states,
    schedules.check_ahead,
    schedules.check_crowds,
)
"""Every check, in the order in which findings are printed."""


@takes_database
def check(database: Database, as_json: AsJson = False) -> None:
    """Find problems, and print how to fix them.

    Exit codes: 0 no finding, 1 findings, 3 the database can't be used.
    """
    with database.configured() as config:
        server, database_findings = asyncio.run(run_on_connection(config, partial(examine, config), name="check"))
    advice = [
        Finding(check="configuration", object="configuration", finding=each.finding, do=each.do)
        for each in config.warnings
    ]
    findings = [*advice, *database_findings]
    if as_json:
        print_json({"server_version": server.version, "findings": findings})
    else:
        for each in findings:
            typer.echo(printable(f"{each.check}: {each.finding}\n    {each.do}"))
        typer.echo(f"PostgreSQL {server.version}, schema in order, {plural(len(findings), 'finding')}", err=True)
    raise typer.Exit(1 if findings else 0)


async def examine(config: "Config", db: "Connection") -> "tuple[ServerFacts, list[Finding]]":
    """Read the shared facts, then run every check. A check that fails becomes a finding; the others still run."""
    from asyncpg import PostgresError

    from rota.db import server_reports

    if obstacles := await rights.find_obstacles(db):
        return await server_reports.examine_server(db), obstacles
    facts = await _read_facts(config, db)
    findings: list[Finding] = []
    for each in CHECKS:
        try:
            findings += await each(facts)
        except PostgresError as error:
            findings.append(_failed_check_finding(each, error, config))
    return facts.server, findings


async def _read_facts(config: "Config", db: "Connection") -> Facts:
    from rota.db import node_reports, reports, schedule_reports, server_reports

    query_sent_at = datetime.now(UTC)
    server = await server_reports.examine_server(db)
    query_answered_at = datetime.now(UTC)
    return Facts(
        db=db,
        config=config,
        server=server,
        query_sent_at=query_sent_at,
        query_answered_at=query_answered_at,
        backlog=await reports.summarise_live_jobs(db),
        nodes=await node_reports.list_nodes(db),
        known_handlers=await node_reports.list_handler_names(db),
        schedules=await schedule_reports.summarise_schedules(db),
    )


def _failed_check_finding(failed: Check, error: Exception, config: "Config") -> Finding:
    """Return the finding for a check that the database rejected. Omits the server's detail, which may contain a row."""
    name = getattr(failed, "__name__", str(failed)).removeprefix("check_").replace("_", " ")
    return Finding(
        check="incomplete",
        object=name,
        finding=f"the check of {name} failed: {explain_error(error, config.require_database())}",
        do="fix the cause in the message, then run rota check again; the result of this check is unknown until then",
    )
