"""The settings: one frozen tree of sections, with their bounds and defaults."""

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
from rota.config.values import Dsn, Keep, Name, Names, Queues, between, format_duration, mask_dsn, slots_by_queue, whole
from rota.errors import NoDatabase


class Advice(NamedTuple):
    """Something in the configuration that is no error and yet nobody's intention."""

    finding: str
    do: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.do}"


class Section(BaseModel):
    """A frozen table of settings that refuses what it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


_LOWERED = BeforeValidator(lambda value: str(value).strip().lower())


class Database(Section):
    """`url` may lead through PgBouncer; `direct_url`, for LISTEN and migrations, may not."""

    url: Dsn | None = None
    direct_url: Dsn | None = None
    pool_size: Annotated[int, whole(2, 100)] = 5
    handler_pool_size: Annotated[int, whole(1, 1000)] = 10


class Lease(Section):
    """How long a claim holds unextended, and who looks for those that ran out.

    No `heartbeat` means a third of the shortest lease held. When the main loop hasn't turned for `wedged_after`, this
    node stops extending.
    """

    duration: Annotated[timedelta, between("3s", "1d")] = timedelta(seconds=30)
    heartbeat: Annotated[timedelta, between("100ms", "8h")] | None = None
    reap_interval: Annotated[timedelta, between("100ms", "10m")] = timedelta(seconds=5)
    wedged_after: Annotated[timedelta, between("10s", "1d")] = timedelta(minutes=10)

    @field_validator("heartbeat")
    @classmethod
    def _beats_thrice_a_lease(cls, heartbeat: timedelta | None, info: ValidationInfo) -> timedelta | None:
        lease = info.data.get("duration")
        if lease and heartbeat and heartbeat > lease / 3:
            raise ValueError(f"choose at most a third of lease.duration, which is {format_duration(lease)}")
        return heartbeat


class Drain(Section):
    """How long jobs may finish after SIGTERM, and how long those interrupted then get to settle."""

    timeout: Annotated[timedelta, between("0s", "1d")] = timedelta(seconds=30)
    grace: Annotated[timedelta, between("0s", "10m")] = timedelta(seconds=5)


class Retention(Section):
    """How long history is kept. Written as 0, read as None: for ever."""

    job_runs: Keep = timedelta(days=7)
    attempts: Keep = timedelta(days=30)
    fires: Keep = timedelta(days=30)
    dead_letters: Keep = timedelta(days=90)
    guards: Keep = timedelta(days=30)
    audit: Keep = timedelta(days=400)


class Payload(Section):
    """How many bytes of payloads above 32 KiB are held at a time; as Python objects they take some ten times as much memory."""

    max_bytes_in_flight: Annotated[int, whole(1 << 20, 1 << 34)] = 1 << 24


class Http(Section):
    """Where /metrics, /healthz and /readyz are served. Port 0 is any free one."""

    host: Name = "127.0.0.1"
    port: Annotated[int, whole(0, 65535)] = 9843


class Log(Section):
    """Format `auto` is console on a terminal and JSON elsewhere."""

    level: Annotated[Literal["debug", "info", "warning", "error"], _LOWERED] = "info"
    format: Annotated[Literal["auto", "json", "console"], _LOWERED] = "auto"


class DeadLetters(Section):
    """The handler that gets a job for every dead letter, if any."""

    handler: Name | None = None


class Work(Section):
    """What every configured handler may be given: its queue, its jobs' timeout and attempts."""

    queue: Name | None = None
    timeout: Annotated[timedelta, between("100ms", "30d")] | None = timedelta(minutes=1)
    max_attempts: Annotated[int, whole(1, 1000)] | None = None


_STATUSES = (400, 405, 410, 413, 415, 422)


class Endpoint(Work):
    """Where the handler `http.<name>` sends its jobs. `private`: addresses of private networks are meant."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+(/|\?|$)")]
    method: Literal["POST", "PUT", "PATCH", "DELETE", "GET"] = "POST"
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    secret: SecretStr | None = None
    private: bool = False
    permanent: frozenset[Annotated[int, whole(300, 599)]] = frozenset(_STATUSES)

    @field_validator("secret")
    @classmethod
    def _is_a_webhook_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None:
            try:
                if len(b64decode(secret.get_secret_value().removeprefix("whsec_"), validate=True)) >= 16:
                    return secret
            except ValueError:
                pass
            raise ValueError("write whsec_ and at least 16 random bytes in base64, as Standard Webhooks has it")
        return None


class HttpJobs(Work):
    """`endpoints` are handlers of their own. `any_url` adds the handler `http`, whose payload names the URL."""

    any_url: bool = False
    permanent: frozenset[Annotated[int, whole(300, 599)]] = frozenset(_STATUSES)
    endpoints: dict[Name, Endpoint] = Field(default_factory=dict)


def _has_program(argv: list[str]) -> list[str]:
    if not argv[0].strip():
        raise ValueError("write the program first, as in argv = ['/usr/bin/backup', '--all']")
    return argv


class Command(Work):
    """What the handler `command.<name>` runs, with the payload on its standard input. Its environment is empty but for `env`,
    `pass_env`, PATH, HOME, LANG and TZ. `permanent`: exit codes that make a dead letter at once.
    """

    argv: Annotated[list[str], Field(min_length=1), AfterValidator(_has_program)]
    cwd: Path | None = None
    env: dict[Name, str] = Field(default_factory=dict)
    pass_env: list[Name] = Field(default_factory=list)
    permanent: frozenset[Annotated[int, whole(1, 255)]] = frozenset()
    grace: Annotated[timedelta, between("0s", "10m")] = timedelta(seconds=3)


class Statement(Work):
    """What the handler `sql.<name>` executes as the login of `url`, with the payload as $1, if it has a parameter.

    `transaction`: in one transaction with the job's completion; false for VACUUM and its like.
    """

    statement: Name
    url: Dsn
    transaction: bool = True


class Handlers(Section):
    """The handlers that need no code. Each is off until it is written here: whoever may insert a job can have it run.

    `shared`: handlers that apps of different names may have, and so take each other's jobs of.
    """

    shared: Names = frozenset()
    http: HttpJobs | None = None
    command: dict[Name, Command] | None = None
    sql: dict[Name, Statement] | None = None


class Config(Section):
    """Everything rota is told, read once at start."""

    app: Name | None = None
    poll_interval: Annotated[timedelta, between("50ms", "1m")] = timedelta(seconds=1)
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
    """How to read database.url and database.direct_url again, where they came from a file."""
    _urls: dict[str, DatabaseUrl] = PrivateAttr(default_factory=dict)

    @property
    def warnings(self) -> tuple[Advice, ...]:
        """What start-up should say aloud, though it is no error."""
        return self._warnings

    def source(self, path: str) -> str:
        """Where the value of `lease.duration` and its like came from: a variable, a file, the command line, default."""
        return self._sources.get(path, "default")

    def require_database(self) -> str:
        """Return the URL for the driver, password included. Raises NoDatabase if none is configured."""
        return self.database_url().dsn

    def require_direct_database(self) -> str:
        """Return the URL for LISTEN and migrations, password included. Raises NoDatabase if none is configured."""
        return self.direct_database_url().dsn

    def direct_database_url(self) -> DatabaseUrl:
        """Return the URL for LISTEN and migrations: database.direct_url, else database.url. Raises NoDatabase if none is set."""
        if self.database.direct_url:
            return self._url("database.direct_url", self.database.direct_url.get_secret_value())
        return self.database_url()

    def database_url(self) -> DatabaseUrl:
        """Return the URL to connect with, the same object each time. Raises NoDatabase if none is configured."""
        if self.database.url:
            return self._url("database.url", self.database.url.get_secret_value())
        if self._libpq:
            return self._url("database.url", self._libpq)
        raise NoDatabase(
            "no database: set DATABASE_URL or ROTA_DATABASE_URL (postgresql://user:password@host:5432/database), "
            "pass --dsn, or set database.url in rota.toml; PGHOST and its like do too. "
            "To try rota without a server of your own: rota dev, and --embedded with the other commands"
        )

    def reload_database_urls(self) -> bool:
        """Read the URLs again that came from a file; return whether one has changed. New connections use it."""
        changed = [url.reload() for url in self._urls.values()]
        return any(changed)

    def _url(self, path: str, url: str) -> DatabaseUrl:
        return self._urls.setdefault(path, DatabaseUrl(url, self._readers.get(path)))

    def masked(self) -> dict[str, Any]:
        """Every value as it would be written in `rota.toml`, as a nested dict fit for JSON, without passwords."""
        tree: dict[str, Any] = {}
        for path, value in leaves(self):
            section, _, name = path.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = _written(path, value)
        return tree

    def rendered(self) -> str:
        """Every value as a line of TOML with its source, without passwords; what has no value is commented out."""
        lines: list[str] = []
        for path, value in leaves(self):
            section, _, name = path.rpartition(".")
            header = f"[{section}]"
            if section and header not in lines:
                lines += ["", header]
            shown = _written(path, value)
            if isinstance(shown, dict):
                shown = f"{{ {', '.join(f'{_quoted(key)} = {json.dumps(each)}' for key, each in shown.items())} }}"
            elif isinstance(shown, str | bool | list):
                shown = json.dumps(shown, ensure_ascii=False)  # JSON's text, truth and lists are TOML's
            setting = f"# {name} =" if shown is None else f"{name} = {shown}"
            lines.append(f"{setting:<40}  # {self.source(path)}")
        return "\n".join(lines) + "\n"


def leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting's path and value, those of a section's sections too."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from leaves(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and all(isinstance(each, Section) for each in value.values()):
            for key, each in value.items():
                yield from leaves(each, f"{prefix}{name}.{key}.")
        else:
            yield f"{prefix}{name}", value


def _written(path: str, value: object) -> Any:
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
            return {key: _written("", each) for key, each in value.items()}
        case None if path.startswith("retention."):
            return 0
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # A JSON string is a TOML string.
