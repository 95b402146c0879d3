"""The value that every check returns, and the facts that several checks share."""

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

NAMED = 20
"""Most objects of one kind that get a finding of their own; the others are counted in one more finding."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault that a person can mend.

    `check` names the kind of fault, `object` what it is about, `finding` the cause in a sentence that names the object, `do` the
    cure, `alert` the Prometheus alert that fires for it (None: the daemons' metrics don't show it).
    """

    check: str
    object: str
    finding: str
    do: str
    alert: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The connection and the configuration, and what more than one check needs: read once, before the first check."""

    db: "Connection"
    config: "Config"
    server: "ServerFacts"
    asked: datetime
    """This machine's time when the server was asked for its own."""
    answered: datetime
    backlog: "Backlog"
    nodes: "Sequence[LivingNode]"
    known_handlers: Sequence[str]
    schedules: "dict[str, int]"
    """state -> number of schedules"""


Check = Callable[[Facts], Awaitable[Iterable[Finding]]]
"""One kind of fault or a few related ones. A check may query the database; it changes nothing."""


def capped(check: str, findings: Sequence[Finding], total: int, do: str) -> list[Finding]:
    """Return at most NAMED of the findings, and one more with the number of the others where `total` is larger."""
    shown = list(findings[:NAMED])
    if total > len(shown):
        more = f"{total - len(shown):,} more of them"
        shown.append(Finding(check=check, object=more, finding=more, do=do, alert=shown[0].alert if shown else None))
    return shown
