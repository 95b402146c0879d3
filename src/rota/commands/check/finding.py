"""The type of a finding, and the facts that several checks share."""

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rota.config import Config
    from rota.db.node_reports import LivingNode
    from rota.db.pool import Connection
    from rota.db.reports import Backlog
    from rota.db.server_reports import ServerFacts

MAX_FINDINGS = 20
"""Maximum number of findings of one check. One more finding gives the number of the others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that a person can fix.

    `check` is the kind of problem. `finding` is the cause, in a sentence that contains the `object`. `do` is the cure. `alert` is
    the Prometheus alert for it, None if the daemons' metrics don't show it.
    """

    check: str
    object: str
    finding: str
    do: str
    alert: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The connection, the configuration, and query results that several checks use. Read once, before the first check."""

    db: "Connection"
    config: "Config"
    server: "ServerFacts"
    query_sent_at: datetime
    """This machine's time before `server` was queried. `query_answered_at` is the time after it."""
    query_answered_at: datetime
    backlog: "Backlog"
    nodes: "Sequence[LivingNode]"
    known_handlers: Sequence[str]
    schedules: "dict[str, int]"
    """state -> number of schedules"""


Check = Callable[[Facts], Awaitable[Iterable[Finding]]]
"""Finds one kind of problem, or a few related ones. It may query the database but must not change it."""


def cap_findings(check: str, findings: Sequence[Finding], total: int, do: str) -> list[Finding]:
    """Return at most MAX_FINDINGS of the findings. If `total` is larger, add one with the number of the others."""
    shown = list(findings[:MAX_FINDINGS])
    if total > len(shown):
        more = f"{total - len(shown):,} more of them"
        shown.append(Finding(check=check, object=more, finding=more, do=do, alert=shown[0].alert if shown else None))
    return shown
