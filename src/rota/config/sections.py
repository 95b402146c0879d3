"""The settings in their sections, with bounds and defaults."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    StringConstraints,
    ValidationInfo,
    field_validator,
)

from rota.config.database_url import DatabaseUrl
from rota.config.values import (
    Dsn,
    Name,
    Names,
    Queues,
    RetentionPeriod,
    duration_between,
    format_duration,
    mask_dsn,
    slots_by_queue,
    whole_number,
)
from rota.errors import NoDatabase


class Advice(NamedTuple):
    """A warning: the configuration is valid, but probably a mistake."""

    finding: str
    do: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.do}"


class Section(BaseModel):
    """A frozen table of settings that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


_LOWERCASE = BeforeValidator(lambda value: str(value).strip().lower())


class Database(Section):
    """`url` may connect through PgBouncer. `direct_url`, for LISTEN and migrations, must not."""

    url: Dsn | None = None
    direct_url: Dsn | None = None
    pool_size: Annotated[int, whole_number(2, 100)] = 5
    handler_pool_size: Annotated[int, whole_number(1, 1000)] = 10


class Lease(Section):
    """How long a claim is valid without a heartbeat, and how often expired leases are reaped.

    `heartbeat`: interval between extensions; by default a third of the lease. If the main loop is blocked for
    `wedged_after`, the node stops extending its leases.
    """

    duration: Annotated[timedelta, duration_between("3s", "1d")] = timedelta(seconds=30)
    heartbeat: Annotated[timedelta, duration_between("100ms", "8h")] | None = None
    reap_interval: Annotated[timedelta, duration_between("100ms", "10m")] = timedelta(seconds=5)
    wedged_after: Annotated[timedelta, duration_between("10s", "1d")] = timedelta(minutes=10)

    @field_validator("heartbeat")
    @classmethod
    def _fits_in_lease(cls, heartbeat: timedelta | None, info: ValidationInfo) -> timedelta | None:
        lease = info.data.get("duration")
        if lease and heartbeat and heartbeat > lease / 3:
            raise ValueError(f"choose at most a third of lease.duration, which is {format_duration(lease)}")
        return heartbeat


class Drain(Section):
    """`timeout`: how long jobs may finish after SIGTERM. `grace`: how long interrupted jobs then have to settle."""

    timeout: Annotated[timedelta, duration_between("0s", "1d")] = timedelta(seconds=30)
    grace: Annotated[timedelta, duration_between("0s", "10m")] = timedelta(seconds=5)


class Retention(Section):
    """How long history is kept. 0 in the file, None here, means forever."""

    job_runs: RetentionPeriod = timedelta(days=7)
    attempts: RetentionPeriod = timedelta(days=30)
    fires: RetentionPeriod = timedelta(days=30)
    dead_letters: RetentionPeriod = timedelta(days=90)
    guards: RetentionPeriod = timedelta(days=30)
    audit: RetentionPeriod = timedelta(days=400)


class Payload(Section):
    """Limit on the total bytes of running jobs' payloads above 32 KiB. Decoded, a payload needs about ten times its bytes."""

    max_bytes_in_flight: Annotated[int, whole_number(1 << 20, 1 << 34)] = 1 << 24


class Http(Section):
    """The address of /metrics, /healthz and /readyz. Port 0 means any free port."""

    host: Name = "127.0.0.1"
    port: Annotated[int, whole_number(0, 65535)] = 9843


class Log(Section):
    """Format `auto` means console on a terminal and JSON elsewhere."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _LOWERCASE] = "info"
    format: Annotated[Literal["auto", "json", "console"], _LOWERCASE] = "auto"


class DeadLetters(Section):
    """An optional handler that gets a job for every dead letter."""

    handler: Name | None = None


class HandlerSettings(Section):
    """The settings that all configured handlers have."""

    queue: Name | None = None
    timeout: Annotated[timedelta, duration_between("100ms", "30d")] | None = timedelta(minutes=1)
    max_attempts: Annotated[int, whole_number(1, 1000)] | None = None


_PERMANENT_STATUSES = (400, 405, 410, 413, 415, 422)


class Endpoint(HandlerSettings):
    """The URL to which the handler `http.<name>` sends its jobs.

    `private`: allow addresses in private networks. `permanent`: statuses that make a dead letter at once.
    """

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+(/|\?|$)")]
    method: Literal["POST", "PUT", "PATCH", "DELETE", "GET"] = "POST"
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    secret: SecretStr | None = None
    private: bool = False
    permanent: frozenset[Annotated[int, whole_number(300, 599)]] = frozenset(_PERMANENT_STATUSES)

    @field_validator("secret")
    @classmethod
    def _is_a_webhook_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            try:
                if len(b64decode(secret.get_secret_value().removeprefix("whsec_"), validate=True)) >= 16:
                    return secret
            except ValueError:
                pass
            raise ValueError("write whsec_ and at least 16 random bytes in base64, as in Standard Webhooks")
        return None


class HttpJobs(HandlerSettings):
    """Each of the `endpoints` is a handler. `any_url` adds the handler `http`, whose payload contains the URL."""

    any_url: bool = False
    permanent: frozenset[Annotated[int, whole_number(300, 599)]] = frozenset(_PERMANENT_STATUSES)
    endpoints: dict[Name, Endpoint] = Field(default_factory=dict)


def _has_program(argv: list[str]) -> list[str]:
    if not argv[0].strip():
        raise ValueError("write the program first, as in argv = ['/usr/bin/backup', '--all']")
    return argv


class Command(HandlerSettings):
    """The command of the handler `command.<name>`. It gets the payload on standard input.

    Its environment contains only `env`, `pass_env`, PATH, HOME, LANG and TZ. `permanent`: exit codes that make a dead letter at
    once.
    """

    argv: Annotated[list[str], Field(min_length=1), AfterValidator(_has_program)]
    cwd: Path | None = None
    env: dict[Name, str] = Field(default_factory=dict)
    pass_env: list[Name] = Field(default_factory=list)
    permanent: frozenset[Annotated[int, whole_number(1, 255)]] = frozenset()
    grace: Annotated[timedelta, duration_between("0s", "10m")] = timedelta(seconds=3)


class Statement(HandlerSettings):
    """The statement of the handler `sql.<name>`, executed as the user of `url`. The payload is $1, if the statement uses it.

    `transaction`: run it in one transaction with the job's completion. Must be false for VACUUM and similar statements.
    """

    statement: Name
    url: Dsn
    transaction: bool = True


class Handlers(Section):
    """Handlers without code. Each must be configured, because every user who may insert jobs can run it.

    `shared`: handlers that several apps have in common. Their daemons claim each other's jobs.
    """

    shared: Names = frozenset()
    http: HttpJobs | None = None
    command: dict[Name, Command] | None = None
    sql: dict[Name, Statement] | None = None


class Config(Section):
    """All settings. They are read once, at start."""

    app: Name | None = None
    poll_interval: Annotated[timedelta, duration_between("50ms", "1m")] = timedelta(seconds=1)
    queues: Queues = Field(default_factory=lambda: slots_by_queue("default:100,*:10"))
    database: Database = Database()
    lease: Lease = Lease()
    drain: Drain = Drain()
    retention: Retention = Retention()
    payload: Payload = Payload()
    http: Http = Http()
    log: Log = Log()
    dead_letters: DeadLetters = DeadLetters()
    handlers: Handlers = Handlers()

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _warnings: tuple[Advice, ...] = PrivateAttr(default=())
    _libpq: str | None = PrivateAttr(default=None)
    _readers: Mapping[str, Callable[[], str]] = PrivateAttr(default_factory=dict)
    """Functions that read database.url and database.direct_url again, if they came from a file."""
    _urls: dict[str, DatabaseUrl] = PrivateAttr(default_factory=dict)

    @property
    def warnings(self) -> tuple[Advice, ...]:
        """Warnings to print at start."""
        return self._warnings

    def source(self, path: str) -> str:
        """Return the source of a setting such as `lease.duration`: a variable, a file, the command line or default."""
        return self._sources.get(path, "default")

    def require_database(self) -> str:
        """Return the URL for the driver, with the password. Raises NoDatabase if none is configured."""
        return self.database_url().dsn

    def require_direct_database(self) -> str:
        """Return the URL for LISTEN and migrations, with the password. Raises NoDatabase if none is configured."""
        return self.direct_database_url().dsn

    def direct_database_url(self) -> DatabaseUrl:
        """Return database.direct_url, for LISTEN and migrations, or else database.url. Raises NoDatabase if neither is set."""
        if self.database.direct_url:
            return self._url("database.direct_url", self.database.direct_url.get_secret_value())
        return self.database_url()

    def database_url(self) -> DatabaseUrl:
        """Return database.url, the same object on each call. Raises NoDatabase if none is configured."""
        if self.database.url:
            return self._url("database.url", self.database.url.get_secret_value())
        if self._libpq:
            return self._url("database.url", self._libpq)
        raise NoDatabase(
            "no database is configured: set DATABASE_URL or ROTA_DATABASE_URL (postgresql://user:password@host:5432/database), or "
            "PGHOST, pass --dsn, or set database.url in rota.toml. To try rota without a server: rota dev, or --embedded"
        )

    def reload_database_urls(self) -> bool:
        """Read URLs that came from a file again, and return whether one changed. New connections use the new URL."""
        changed = [url.reload() for url in self._urls.values()]
        return any(changed)

    def _url(self, path: str, url: str) -> DatabaseUrl:
        return self._urls.setdefault(path, DatabaseUrl(url, self._readers.get(path)))

    def masked(self) -> dict[str, Any]:
        """Return every setting as in `rota.toml`, in a nested dict that fits JSON. Passwords are masked."""
        tree: dict[str, Any] = {}
        for path, value in iter_settings(self):
            section, _, name = path.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = _to_json_value(path, value)
        return tree

    def rendered(self) -> str:
        """Return every setting as a line of TOML with its source. Passwords are masked, unset settings commented out."""
        lines: list[str] = []
        for path, value in iter_settings(self):
            section, _, name = path.rpartition(".")
            header = f"[{section}]"
            if section and header not in lines:
                lines += ["", header]
            text = _to_json_value(path, value)
            if isinstance(text, dict):
                text = f"{{ {', '.join(f'{_quoted(key)} = {json.dumps(item)}' for key, item in text.items())} }}"
            elif isinstance(text, str | bool | list):
                text = json.dumps(text, ensure_ascii=False)  # TOML writes texts, booleans and lists as JSON does
            setting = f"# {name} =" if text is None else f"{name} = {text}"
            lines.append(f"{setting:<40}  # {self.source(path)}")
        return "\n".join(lines) + "\n"


def iter_settings(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each setting, including nested sections."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from iter_settings(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and all(isinstance(item, Section) for item in value.values()):
            for key, item in value.items():
                yield from iter_settings(item, f"{prefix}{name}.{key}.")
        else:
            yield f"{prefix}{name}", value


def _to_json_value(path: str, value: object) -> Any:
    match value:
        case SecretStr():
            return mask_dsn(value.get_secret_value())
        case timedelta():
            return format_duration(value)
        case Path():
            return str(value)
        case frozenset():
            return sorted(value)
        case Mapping():
            return {key: _to_json_value("", item) for key, item in value.items()}
        case None if path.startswith("retention."):
            return 0
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML writes strings as JSON does
