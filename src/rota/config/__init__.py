"""What rota is told to do: one frozen tree from the command line, the environment and `rota.toml`, checked whole.

Precedence is command line, then environment, then file, then default. A setting's variable is its path in capitals
(`lease.reap_interval` is `ROTA_LEASE_REAP_INTERVAL`); `ROTA_LEASE`, `ROTA_DIRECT_URL` and `DATABASE_URL` are further
names. An empty variable counts as unset. `ROTA_DATABASE_URL_FILE` and its like name a file that holds the URL, as systemd and
containers hand over secrets. A list of queues is taken whole: what it doesn't name, this daemon doesn't
serve, unless it names `*`, which is every other queue. Durations are `500ms`, `30s`, `5m`, `1h`, `7d`, `1h30m`, or a
number of seconds.

An unknown key in the file is an error. An unknown `ROTA_*` variable is one only when it is all but a setting's name,
hence a slip; any other belongs to another program and is a warning. The variables that Kubernetes sets for a Service named
`rota` or `rota-http` (`ROTA_HTTP_PORT=tcp://…`, `ROTA_SERVICE_HOST`) are ignored.

Three floors: `values` (how one is written), `sections` (which there are), `reading` (where they come from).
"""

from __future__ import annotations

from rota.config.reading import NO_SETTINGS, SETTINGS, load, variables
from rota.config.sections import (
    Command,
    Config,
    Endpoint,
    Handlers,
    HttpJobs,
    Retention,
    Statement,
    Work,
)
from rota.config.values import format_duration, mask_dsn, parse_duration

__all__ = [
    "NO_SETTINGS",
    "SETTINGS",
    "Command",
    "Config",
    "Endpoint",
    "Handlers",
    "HttpJobs",
    "Retention",
    "Statement",
    "Work",
    "format_duration",
    "load",
    "mask_dsn",
    "parse_duration",
    "variables",
]
