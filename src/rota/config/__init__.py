"""The configuration: a validated, frozen tree of settings from the command line, the environment and `rota.toml`.

The command line wins over the environment, the environment over the file, the file over the default. The variable of a setting is
its path in capitals: `lease.reap_interval` is `ROTA_LEASE_REAP_INTERVAL`. `ROTA_LEASE`, `ROTA_DIRECT_URL` and `DATABASE_URL` are
additional names. An empty variable counts as unset. `ROTA_DATABASE_URL_FILE` names a file with the URL, for secrets of systemd and
containers. `queues` is replaced as a whole: a daemon serves only the queues in it, and `*` stands for every other queue.
Durations are `500ms`, `30s`, `5m`, `1h`, `7d`, `1h30m`, or a number of seconds.

An unknown key in the file is an error. An unknown `ROTA_*` variable is an error if it resembles a setting, which suggests a typo;
otherwise it is a warning. The variables that Kubernetes sets for a Service named `rota` or `rota-http` (`ROTA_HTTP_PORT=tcp://…`,
`ROTA_SERVICE_HOST`) are ignored.

`values` parses single values, `sections` defines the settings, `reading` collects them from their sources.
"""

from __future__ import annotations

from rota.config.reading import NO_SETTINGS, SETTINGS, load, variables
from rota.config.sections import (
    Command,
    Config,
    Endpoint,
    Handlers,
    HandlerSettings,
    HttpJobs,
    Retention,
    Statement,
)
from rota.config.values import format_duration, mask_dsn, parse_duration

__all__ = [
    "NO_SETTINGS",
    "SETTINGS",
    "Command",
    "Config",
    "Endpoint",
    "HandlerSettings",
    "Handlers",
    "HttpJobs",
    "Retention",
    "Statement",
    "format_duration",
    "load",
    "mask_dsn",
    "parse_duration",
    "variables",
]
