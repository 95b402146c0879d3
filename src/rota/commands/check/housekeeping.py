"""Checks of housekeeping: ledger partitions and retention."""

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.commands.check.finding import Finding
from rota.commands.printing import format_duration

if TYPE_CHECKING:
    from rota.commands.check.finding import Facts

MAX_AGE = timedelta(minutes=15)
"""A task that has not succeeded for longer is a finding. Daemons run each task every one to five minutes."""

TASKS = {
    "ledger_create": "creating the ledger's next partitions",
    "ledger_drop": "dropping the ledger's old partitions",
    "nodes": "recording lost daemons",
}

CURES = {
    "ledger_create": "fix the cause in the error: without next partitions, all rows end up in rota.job_runs_default",
    "ledger_drop": "drop the objects that depend on the partition, and use rota.job_runs instead: daemons retry within a minute",
}


async def check_housekeeping(facts: "Facts") -> list[Finding]:
    """Report housekeeping tasks that fail, or have not succeeded for MAX_AGE while a daemon is alive."""
    from rota.db import server_reports

    tasks = await server_reports.list_housekeeping(facts.db, patience=MAX_AGE)
    return [
        Finding(
            check="housekeeping",
            object=each.piece,
            finding=TASKS.get(each.piece, f"deleting expired rows ({each.piece})")
            + f" has not succeeded for {format_duration(each.age)}"
            + (
                f": {each.error}"
                if each.error
                else ": its tables are always locked, or no daemon of this release is alive"
            ),
            do=CURES.get(
                each.piece,
                "fix the cause in the error, or end the session that holds the lock: daemons retry every minute",
            ),
            alert="RotaHousekeepingFailing",
        )
        for each in tasks
        if each.error or facts.nodes
    ]
