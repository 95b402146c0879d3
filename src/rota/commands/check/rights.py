"""Checks of rights, and of locks that other sessions hold."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.commands.check.finding import Finding

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
