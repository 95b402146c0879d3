"""The answers of /healthz and /readyz, from the state of the daemon's services."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from rota.db.listen import Listener
from rota.lifecycle.dispatcher import Dispatcher
from rota.lifecycle.heartbeat import Heartbeat
from rota.lifecycle.scheduler import Scheduler
from rota.lifecycle.settle import Settler
from rota.observability.health import Readiness, ServiceHealth
from rota.runtime.clock import boottime
from rota.services.gauges import Gauges, LocalGauges
from rota.services.lock_watch import LockWatch
from rota.services.presence import Presence
from rota.services.pruner import Pruner
from rota.services.schedule_stats import ScheduleStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rota.db.blockers import Blocker
    from rota.supervision.service_monitor import ServiceMonitor

STALLED_AFTER = timedelta(seconds=60)
"""A service without a success for this long, while the database answers, is unhealthy."""

EVENT_DRIVEN_SERVICES = frozenset(kind.name for kind in (Settler, Listener, ScheduleStats))
"""Services that wait for work, so a long time without a success is normal."""

NON_CRITICAL_SERVICES = frozenset(kind.name for kind in (Gauges, LocalGauges, LockWatch, Pruner, ScheduleStats))
"""Services that jobs do not need: their crashes are logged and counted, but never end the daemon."""

NOT_READY_AFTER_SECONDS = 2.0
"""/readyz answers 503 when a service of READINESS_WORK has failed or waited for the database for this long."""

READINESS_WORK = {
    Dispatcher.name: "claims",
    Settler.name: "settlements",
    Heartbeat.name: "extensions of leases",
    Presence.name: "writes of this node's row",
    Scheduler.name: "decisions about due schedules",
}
"""The services that every job needs -> the name of their work in answers of /readyz."""


def service_states(monitor: ServiceMonitor, *, poll_interval: timedelta) -> list[ServiceHealth]:
    """Return the state of every service, for /healthz."""
    now = boottime()
    return [
        ServiceHealth(
            name=name,
            age=timedelta(seconds=now - last_success_at),
            allowed=timedelta.max
            if name in EVENT_DRIVEN_SERVICES | NON_CRITICAL_SERVICES
            else STALLED_AFTER + poll_interval,
            failures=monitor.failures[name],
            database_away=name in monitor.unreachable,
        )
        for name, last_success_at in list(monitor.last_success_at.items())
    ]


def node_readiness(
    monitor: ServiceMonitor, *, database_reached_at: float, draining: bool, blockers: Sequence[Blocker]
) -> Readiness:
    """Return whether this node takes jobs, for /readyz. `database_reached_at`: on this node's clock, 0 if never."""
    return Readiness(
        database_age=timedelta(seconds=boottime() - database_reached_at) if database_reached_at else None,
        draining=draining,
        stalled=[
            f"{READINESS_WORK[service]} {why}"
            for service, why in monitor.stalled_services(for_seconds=NOT_READY_AFTER_SECONDS).items()
            if service in READINESS_WORK
        ],
        blockers=[f"{blocker}. {blocker.cure}" for blocker in blockers],
    )
