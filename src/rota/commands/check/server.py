"""Checks of the PostgreSQL server."""

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from rota.commands.check.finding import Finding
from rota.commands.printing import format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from rota.commands.check.finding import Facts
    from rota.db.server_reports import ServerFacts

MAX_CLOCK_DIFFERENCE = timedelta(seconds=2)
MAX_SNAPSHOT_AGE = timedelta(minutes=10)

MAX_NOTIFY_QUEUE_USE = 0.5
"""A larger used fraction of the notification queue is a finding. At 0.9 the daemons stop notifying."""


def _check_read_only(server: "ServerFacts") -> list[Finding]:
    """Report a server that accepts no writes."""
    from rota.db.server import TO_THE_PRIMARY, WHY_READ_ONLY

    finding = Finding(
        check="read-only",
        object="server",
        finding=f"this server accepts no writes {WHY_READ_ONLY}",
        do=TO_THE_PRIMARY,
    )
    return [finding] if server.read_only else []


def _check_clock(server: "ServerFacts", query_sent_at: datetime, query_answered_at: datetime) -> list[Finding]:
    """Report a difference between the server's clock and this machine's."""
    difference = max(server.clock - query_answered_at, query_sent_at - server.clock)
    finding = Finding(
        check="clock",
        object="server",
        finding=f"the server's clock and this machine's are {format_duration(difference)} apart",
        do="run NTP on both: times in logs and --at are misleading. Leases are not affected, they use only the server's clock",
    )
    return [finding] if difference > MAX_CLOCK_DIFFERENCE else []


def _check_autovacuum(server: "ServerFacts") -> list[Finding]:
    """Report a server without autovacuum."""
    finding = Finding(
        check="autovacuum",
        object="server",
        finding="autovacuum is off for the whole server",
        do="alter system set autovacuum = on, then select pg_reload_conf(): without it, claims become slow",
    )
    return [] if server.autovacuum else [finding]


def _check_snapshots(server: "ServerFacts") -> list[Finding]:
    """Report transactions that have kept vacuum from removing dead rows for too long."""
    findings = []
    if server.snapshot_age is not None and server.snapshot_age > MAX_SNAPSHOT_AGE:
        findings.append(
            Finding(
                check="snapshot",
                object=server.snapshot_owner or "a session",
                finding=f"a transaction has held its snapshot for {format_duration(server.snapshot_age)} ({server.snapshot_owner})",
                do="end it, or select pg_terminate_backend(pid): dead rows can't be removed while it lasts",
                alert="RotaSnapshotHeld",
            )
        )
    if server.prepared_age is not None and server.prepared_age > MAX_SNAPSHOT_AGE:
        findings.append(
            Finding(
                check="snapshot",
                object="a prepared transaction",
                finding=f"a prepared transaction is {format_duration(server.prepared_age)} old",
                do="commit or roll back what pg_prepared_xacts lists: dead rows can't be removed while it lasts",
                alert="RotaSnapshotHeld",
            )
        )
    return findings


def _check_notifications(server: "ServerFacts") -> list[Finding]:
    """Report a notification queue that fills up."""
    used = server.notifications
    finding = Finding(
        check="notifications",
        object="server",
        finding=f"the server's queue of notifications is {used:.0%} full",
        do="end the open transaction of a listening session: in a full queue every NOTIFY fails, and daemons can only poll",
    )
    return [finding] if used > MAX_NOTIFY_QUEUE_USE else []


CHECKS: "tuple[Callable[[ServerFacts], list[Finding]], ...]" = (
    _check_read_only,
    _check_autovacuum,
    _check_snapshots,
    _check_notifications,
)
"""The checks that need only the answer of `examine_server`."""


def server_findings(server: "ServerFacts", *, query_sent_at: datetime, query_answered_at: datetime) -> list[Finding]:
    """Return the findings about the server. It was queried between the two times of this machine's clock."""
    clock_findings = _check_clock(server, query_sent_at, query_answered_at)
    return [*clock_findings, *(finding for each in CHECKS for finding in each(server))]


async def check_server(facts: "Facts") -> list[Finding]:
    """Report settings and states of the server that make a queue slow or unsafe."""
    return server_findings(facts.server, query_sent_at=facts.query_sent_at, query_answered_at=facts.query_answered_at)
