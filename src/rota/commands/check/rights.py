"""Checks of rights, and of locks that other sessions hold."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.commands.check.finding import MAX_FINDINGS, Finding, cap_findings

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts
    from rota.db.pool import Connection

LONG_WAIT = timedelta(seconds=2)
"""Two polls. Shorter waits are normal."""


async def check_rights(facts: "Facts") -> list[Finding]:
    """Report row-level security, disabled triggers, replication settings and, for a daemon's login, missing privileges."""
    from rota.db.server_reports import examine_rights

    is_daemon = facts.config.app is not None and facts.server.may_run
    return [
        Finding(check="rights", object=fault.object, finding=fault.cause, do=fault.cure)
        for fault in await examine_rights(facts.db)
        if is_daemon or fault.kind != "privilege"
    ]


async def check_schema(facts: "Facts") -> list[Finding]:
    """Report missing, invalid, unlogged and changed objects of the schema, and a sequence that would give out used job_ids."""
    from rota.db.migrate import VERSION, read_installation
    from rota.db.server_reports import find_damage, find_sequence_behind

    if (await read_installation(facts.db)).schema_version != VERSION:
        return []  # a later version has other objects
    findings = [
        Finding(check="schema", object=damage.name, finding=damage.cause, do=damage.cure)
        for damage in await find_damage(facts.db)
    ]
    if largest := await find_sequence_behind(facts.db):
        findings.append(
            Finding(
                check="schema",
                object="jobs_job_id_seq",
                finding=f"the sequence rota.jobs_job_id_seq is behind job {largest}: inserts of jobs fail",
                do=f"select setval('rota.jobs_job_id_seq', {largest})",
            )
        )
    return cap_findings("schema", findings[:MAX_FINDINGS], len(findings), "rota migrate --sql shows all objects")


async def find_obstacles(db: "Connection") -> list[Finding]:
    """Report locks and row-level security, which would keep the other checks from reading rota's tables."""
    from rota.db.server_reports import examine_rights

    hidden = [fault for fault in await examine_rights(db) if fault.kind == "row_security"]
    findings = await find_lock_findings(db)
    findings += [Finding(check="rights", object=fault.object, finding=fault.cause, do=fault.cure) for fault in hidden]
    if findings:
        findings.append(
            Finding(
                check="incomplete",
                object="rota check",
                finding="the other checks were skipped, because they read tables that may be locked or hidden",
                do="fix the findings above, then run rota check again",
            )
        )
    return findings


async def find_lock_findings(db: "Connection") -> list[Finding]:
    """Report each session that daemons have been waiting for. Reads no table of rota, so no lock can delay it."""
    from rota.db.blockers import find_blockers

    return [
        Finding(
            check="locks",
            object=blocker.object,
            finding=f"{blocker}; daemons have been waiting for it for {blocker.waited:.0f} s",
            do=blocker.cure,
            alert="RotaLockWait",
        )
        for blocker in await find_blockers(db, pid=None, at_least=LONG_WAIT)
    ]
