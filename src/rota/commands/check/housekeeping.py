"""Checks of the housekeeping: ledger partitions and retention."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.commands.check.finding import Finding
from rota.commands.printing import age

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts

OVERDUE = timedelta(minutes=15)
"""Every daemon tries each piece once a minute, or once in five minutes where a turn takes long."""

PIECES = {
    "ledger_create": "making the ledger's coming partitions",
    "ledger_drop": "dropping the ledger's old partitions",
    "nodes": "moving vanished daemons to the lost ones",
}

CURES = {
    "ledger_create": "mend what the error names: without coming partitions, all rows end up in rota.job_runs_default",
    "ledger_drop": "drop what depends on the partition (select from rota.job_runs instead): it is tried again within a minute",
}


async def check_housekeeping(facts: "Facts") -> list[Finding]:
    """Report pieces of housekeeping that fail, or have not succeeded for OVERDUE while a daemon is alive."""
    from rota.db import server_reports

    found = await server_reports.list_housekeeping(facts.db, patience=OVERDUE)
    return [
        Finding(
            check="housekeeping",
            object=each.piece,
            finding=f"{PIECES.get(each.piece, f'deleting expired rows ({each.piece})')} has not succeeded for {age(each.age)}"
            + (
                f": {each.error}"
                if each.error
                else ": its tables are locked each time, or no daemon of this release is alive"
            ),
            do=CURES.get(
                each.piece, "mend what the error names, or end who holds the lock: it is tried again each minute"
            ),
            alert="RotaHousekeepingFailing",
        )
        for each in found
        if each.error or facts.nodes
    ]
