"""Checks of locks that other sessions hold."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.commands.check.finding import Finding

if TYPE_CHECKING:
    from rota.db.pool import Connection

LONG_WAIT = timedelta(seconds=2)
"""Two polls: shorter waits are part of normal work."""


async def find_lock_findings(db: "Connection") -> list[Finding]:
    """Report each session that daemons have been waiting for. Reads no table of rota, so that no lock on one delays it."""
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
