"""Report that a daemon has started: advice about its configuration, the log line, and the message to systemd."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from rota.cron import tzdata_version
from rota.runtime import systemd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rota.app import App
    from rota.config import Config
    from rota.db.sessions import Route
    from rota.observability.telemetry import Telemetry


def report_start(
    telemetry: Telemetry,
    config: Config,
    app: App,
    *,
    slots: Mapping[str, int],
    route: Route,
    address: tuple[str, int],
) -> None:
    """Log the start, and advice about the configuration. Tell systemd that the daemon is ready."""
    for advice in [*map(str, config.warnings), *_pooler_advice(config, route)]:
        telemetry.node_advised(advice)
    telemetry.node_started(
        version=version("rota"),
        release=app.release,
        tzdata=tzdata_version(),
        app=app.name,
        handlers=sorted(app.handlers),
        slots=dict(slots),
        http=f"http://{address[0]}:{address[1]}",
    )
    systemd.notify(f"READY=1\nSTATUS=up: {sum(slots.values())} slots for {len(app.handlers)} handlers")


def _pooler_advice(config: Config, route: Route) -> list[str]:
    if not route.pooled:
        return []
    advice = [
        (
            "the database URL leads through a connection pooler, which notifications can't pass: jobs are found by polling every "
            f"{config.poll_interval.total_seconds():g} s. Set ROTA_DIRECT_URL to a URL straight to the server"
        )
        if config.database.direct_url is None
        else (
            "the database URL leads through a connection pooler: statements are not kept prepared, "
            "and LISTEN uses ROTA_DIRECT_URL"
        )
    ]
    if route.synchronous_commit == "off":
        advice.append(
            "synchronous_commit is off and can't be turned on through a pooler: after a crash of the server, settlements may be "
            "lost and their jobs run again. Run alter role … set synchronous_commit = on"
        )
    return advice
