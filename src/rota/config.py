"""What rota is told to do: one frozen tree from the command line, the environment and `rota.toml`, checked whole.

Precedence is command line, then environment, then file, then default. A setting's variable is its path in capitals
(`lease.reap_interval` is `ROTA_LEASE_REAP_INTERVAL`); `ROTA_LEASE`, `ROTA_DIRECT_URL` and `DATABASE_URL` are further
names. An empty variable counts as unset. `ROTA_DATABASE_URL_FILE` and its like name a file that holds the URL, as systemd and
containers hand over secrets. A list of queues is taken whole: what it doesn't name, this daemon doesn't
serve, unless it names `*`, which is every other queue. Durations are `500ms`, `30s`, `5m`, `1h`, `7d`, `1h30m`, or a
number of seconds.

An unknown key in the file is an error. An unknown `ROTA_*` variable is one only when it is all but a setting's name,
hence a slip; any other is somebody else's (Kubernetes sets `ROTA_PORT` for a Service named rota) and just a warning.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import quote

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    SecretStr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from rota.errors import ConfigError, NoDatabase

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")
_HOST = r"(?:\[[^\]@/?#]*\]|[^:,@/?#\[\]]*)(?::\d+)?"
_PAIR = r"[^#&=%]+=[^#&]*"
_DSN = re.compile(
    r"(?P<start>postgres(?:ql)?://)(?:(?P<user>[^:@/?#]*)(?P<password>:[^@/?#]*)?@)?"
    rf"(?P<rest>{_HOST}(?:,{_HOST})*(?:/[^?#]*)?)(?:\?(?P<query>{_PAIR}(?:&{_PAIR})*)?)?"
)
_SECRET_IN_TEXT = re.compile(r"(?i)://|password")
_QUERY_SECRET = re.compile(r"(?i)((?:^|&)[^=&]*password[^=&]*=)[^&]*")


def parse_duration(value: object) -> timedelta:
    """Read `30s`, `1h30m`, or a bare number of seconds; ValueError, saying how it is written, for anything else."""
    if isinstance(value, timedelta):
        return value
    text = str(value).strip()
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            if re.fullmatch(rf"(?:{_PART.pattern})+", text):
                return timedelta(seconds=sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text)))
            return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        pass
    raise ValueError("write a duration such as 500ms, 30s, 5m, 1h or 7d")


def format_duration(value: timedelta) -> str:
    """Write a duration as `parse_duration` reads it, in the largest unit that divides it."""
    milliseconds, remainder = divmod(value, timedelta(milliseconds=1))
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if not remainder and milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"


def mask_dsn(dsn: str) -> str:
    """Show where a URL leads, never its passwords; of what isn't a PostgreSQL URL, nothing."""
    if not (parts := _DSN.fullmatch(dsn)):
        return "***"
    start, user, password, rest, query = parts.group("start", "user", "password", "rest", "query")
    login = "" if user is None else f"{user}{':***' if password else ''}@"
    return f"{start}{login}{rest}" + ("?" + _QUERY_SECRET.sub(r"\1***", query) if query else "")


def _between(low: str, high: str, *, or_for_ever: bool = False) -> BeforeValidator:
    def check(value: object) -> timedelta | None:
        duration = parse_duration(value)
        if or_for_ever and not duration:
            return None
        if not parse_duration(low) <= duration <= parse_duration(high):
            raise ValueError(f"choose {low} to {high}{', or 0 for ever' if or_for_ever else ''}")
        return duration

    return BeforeValidator(check)


def _whole(low: int, high: int) -> BeforeValidator:
    def check(value: object) -> int:
        if isinstance(value, int | str) and not isinstance(value, bool):
            text = str(value).strip()
            if re.fullmatch(r"[+-]?[0-9]{1,9}", text) and low <= int(text) <= high:
                return int(text)
        raise ValueError(f"choose a whole number from {low} to {high}")

    return BeforeValidator(check)


def _dsn(value: object) -> SecretStr:
    text = value.get_secret_value() if isinstance(value, SecretStr) else str(value).strip()
    if _DSN.fullmatch(text):
        return SecretStr(text)
    raise ValueError(
        "write postgresql://user:password@host:5432/database?name=value, with @ : / ? # in a password as %40 and so on"
    )


def _slots_by_queue(value: object) -> Mapping[str, int]:
    if isinstance(value, str):
        pairs = [entry.strip().rpartition(":")[::2] for entry in value.split(",") if entry.strip()]
    elif isinstance(value, Mapping):
        pairs = [(str(name), slots) for name, slots in value.items()]
    else:
        pairs = [("", "")]
    queues: dict[str, int] = {}
    for name, slots in ((name.strip(), str(slots).strip()) for name, slots in pairs):
        if not name or not re.fullmatch(r"[0-9]{1,5}", slots) or int(slots) > 10_000:
            raise ValueError("write name:slots,name:slots (in the file, name = slots) with 0 to 10000 slots each")
        if name in queues:
            raise ValueError(f"name the queue {name!r} once")
        queues[name] = int(slots)
    return MappingProxyType(queues)


class Advice(NamedTuple):
    """Something in the configuration that is no error and yet nobody's intention."""

    finding: str
    do: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.do}"


class Section(BaseModel):
    """A frozen table of settings that refuses what it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Dsn = Annotated[SecretStr, BeforeValidator(_dsn)]
Queues = Annotated[Mapping[str, int], PlainValidator(_slots_by_queue), PlainSerializer(dict)]
Keep = Annotated[timedelta | None, _between("1h", "36500d", or_for_ever=True)]
_LOWERED = BeforeValidator(lambda value: str(value).strip().lower())


class Database(Section):
    """`url` may lead through PgBouncer; `direct_url`, for LISTEN and migrations, may not."""

    url: Dsn | None = None
    direct_url: Dsn | None = None
    pool_size: Annotated[int, _whole(2, 100)] = 5
    handler_pool_size: Annotated[int, _whole(1, 1000)] = 10


class Lease(Section):
    """How long a claim holds unextended, and who looks for those that ran out.

    No `heartbeat` means a third of the shortest lease held. When the main loop hasn't turned for `wedged_after`, this
    node stops extending.
    """

    duration: Annotated[timedelta, _between("3s", "1d")] = timedelta(seconds=30)
    heartbeat: Annotated[timedelta, _between("100ms", "8h")] | None = None
    reap_interval: Annotated[timedelta, _between("100ms", "10m")] = timedelta(seconds=5)
    wedged_after: Annotated[timedelta, _between("10s", "1d")] = timedelta(minutes=10)

    @field_validator("heartbeat")
    @classmethod
    def _beats_thrice_a_lease(cls, heartbeat: timedelta | None, info: ValidationInfo) -> timedelta | None:
        lease = info.data.get("duration")
        if lease and heartbeat and heartbeat > lease / 3:
            raise ValueError(f"choose at most a third of lease.duration, which is {format_duration(lease)}")
        return heartbeat


class Drain(Section):
    """How long jobs may finish after SIGTERM, and how long those interrupted then get to settle."""

    timeout: Annotated[timedelta, _between("0s", "1d")] = timedelta(seconds=30)
    grace: Annotated[timedelta, _between("0s", "10m")] = timedelta(seconds=5)


class Retention(Section):
    """How long history is kept. Written as 0, read as None: for ever."""

    job_runs: Keep = timedelta(days=7)
    attempts: Keep = timedelta(days=30)
    fires: Keep = timedelta(days=30)
    dead_letters: Keep = timedelta(days=90)
    guards: Keep = timedelta(days=30)


class Http(Section):
    """Where /metrics, /healthz and /readyz are served. Port 0 is any free one."""

    host: Name = "127.0.0.1"
    port: Annotated[int, _whole(0, 65535)] = 9843


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
    timeout: Annotated[timedelta, _between("100ms", "30d")] | None = timedelta(minutes=1)
    max_attempts: Annotated[int, _whole(1, 1000)] | None = None


_STATUSES = (400, 405, 410, 413, 415, 422)


class Endpoint(Work):
    """Where the handler `http.<name>` sends its jobs. `private`: addresses of private networks are meant."""

    url: Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+(/|\?|$)")]
    method: Literal["POST", "PUT", "PATCH", "DELETE", "GET"] = "POST"
    headers: dict[Name, SecretStr] = Field(default_factory=dict)
    secret: SecretStr | None = None
    private: bool = False
    permanent: frozenset[Annotated[int, _whole(300, 599)]] = frozenset(_STATUSES)

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
    permanent: frozenset[Annotated[int, _whole(300, 599)]] = frozenset(_STATUSES)
    endpoints: dict[Name, Endpoint] = Field(default_factory=dict)


class Command(Work):
    """What the handler `command.<name>` runs, with the payload on its standard input. Its environment is empty but for `env`,
    `pass_env`, PATH, HOME and LANG. `permanent`: exit codes that make a dead letter at once.
    """

    argv: Annotated[list[str], Field(min_length=1)]
    cwd: Path | None = None
    env: dict[Name, str] = Field(default_factory=dict)
    pass_env: list[Name] = Field(default_factory=list)
    permanent: frozenset[Annotated[int, _whole(1, 255)]] = frozenset()
    grace: Annotated[timedelta, _between("0s", "10m")] = timedelta(seconds=3)


class Statement(Work):
    """What the handler `sql.<name>` executes as the login of `url`, with the payload as $1, if it has a parameter.

    `transaction`: in one transaction with the job's completion; false for VACUUM and its like.
    """

    statement: Name
    url: Dsn
    transaction: bool = True


class Handlers(Section):
    """The handlers that need no code. Each is off until it is written here: whoever may insert a job can have it run."""

    http: HttpJobs | None = None
    command: dict[Name, Command] | None = None
    sql: dict[Name, Statement] | None = None


class Config(Section):
    """Everything rota is told, read once at start."""

    app: Name | None = None
    poll_interval: Annotated[timedelta, _between("50ms", "1m")] = timedelta(seconds=1)
    queues: Queues = Field(default_factory=lambda: _slots_by_queue("default:100,*:10"))
    database: Database = Database()
    lease: Lease = Lease()
    drain: Drain = Drain()
    retention: Retention = Retention()
    http: Http = Http()
    log: Log = Log()
    dead_letters: DeadLetters = DeadLetters()
    handlers: Handlers = Handlers()

    _sources: Mapping[str, str] = PrivateAttr(default_factory=dict)
    _warnings: tuple[Advice, ...] = PrivateAttr(default=())
    _libpq: str | None = PrivateAttr(default=None)

    @property
    def warnings(self) -> tuple[Advice, ...]:
        """What start-up should say aloud, though it is no error."""
        return self._warnings

    def source(self, path: str) -> str:
        """Where the value of `lease.duration` and its like came from: a variable, a file, the command line, default."""
        return self._sources.get(path, "default")

    def require_database(self) -> str:
        """Return the URL to connect with, password and all; NoDatabase if nobody named one."""
        if self.database.url:
            return self.database.url.get_secret_value()
        if self._libpq:
            return self._libpq
        raise NoDatabase(
            "no database: set DATABASE_URL or ROTA_DATABASE_URL (postgresql://user:password@host:5432/database), "
            "pass --dsn, or set database.url in rota.toml; PGHOST and its like do too. "
            "To try rota without a server of your own: rota dev"
        )

    def require_direct_database(self) -> str:
        """Return the URL for LISTEN and migrations: the direct one if there is one, else the same as for all."""
        if self.database.direct_url:
            return self.database.direct_url.get_secret_value()
        return self.require_database()

    def masked(self) -> dict[str, Any]:
        """Every value as it would be written in `rota.toml`, as a nested dict fit for JSON, without passwords."""
        tree: dict[str, Any] = {}
        for path, value in _leaves(self):
            section, _, name = path.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[name] = _written(path, value)
        return tree

    def rendered(self) -> str:
        """Every value as a line of TOML with its source, without passwords; what has no value is commented out."""
        lines: list[str] = []
        for path, value in _leaves(self):
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


class _Given(NamedTuple):
    value: Any
    source: str


def _within(path: str, value: object) -> Iterator[str]:
    """Yield the path of a setting, and of each that stands in its table."""
    yield path
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _within(f"{path}.{name}", each)


def load(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Read and check everything; ConfigError with every error at once, a line each.

    `overrides` are what the command line said, by path (`{"database.url": …, "lease.duration": "30s"}`); None is
    unsaid. Values may be text, as in the environment, or already of their type.
    """
    problems: list[str] = []
    warnings: list[Advice] = []
    said = {path: value for path, value in (overrides or {}).items() if value is not None}
    given = (
        _from_file(config_file, environ, problems)
        | _from_environment(environ, problems, warnings)
        | _known(said, "the command line", problems)
    )
    tree: dict[str, Any] = {}
    for path, (value, _) in given.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    config = Config()
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_context=True, include_input=False):
            path = ".".join(map(str, fault["loc"]))
            if path in given and not path.startswith("handlers."):
                shown = f" = {_shown(path, given[path].value)} (from {given[path].source})"
            else:  # deep in a table, beside secrets
                shown = f" (from {given['.'.join(path.split('.')[:2])].source})"
            problems.append(f"{path}{shown}: {_remedy(fault)}")
    warnings += _stop_timeout_warnings(config, environ, problems)
    if problems:
        # Not inside the except: a traceback with pydantic's error in it could print what was refused.
        raise ConfigError("\n".join(sorted(problems)))
    config._sources = MappingProxyType(  # noqa: SLF001
        {leaf: source for path, (value, source) in given.items() for leaf in _within(path, value)}
    )
    config._warnings = tuple(warnings)  # noqa: SLF001
    config._libpq = _libpq_dsn(environ)  # noqa: SLF001
    return config


def _from_file(config_file: Path | None, environ: Mapping[str, str], problems: list[str]) -> dict[str, _Given]:
    named = config_file or environ.get("ROTA_CONFIG", "").strip()
    path = Path(named or "rota.toml")
    if not named and not path.exists():
        return {}
    try:
        table = tomllib.loads(
            path.read_text(encoding="utf-8-sig")
        )  # some editors begin a file with a mark of its encoding
    except OSError as error:
        told_by = "the command line" if config_file else "ROTA_CONFIG" if named else "the current folder"
        problems.append(f"{path} (from {told_by}): can't be read ({error.strerror}); name a file that can")
        return {}
    except ValueError as error:
        problems.append(f"{path}: is no TOML: {error}")
        return {}
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            settings |= {f"{key}.{name}": setting for name, setting in value.items()}
        else:
            settings[key] = value
    return _known(settings, str(path), problems)


def _from_environment(environ: Mapping[str, str], problems: list[str], warnings: list[Advice]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for path in _SETTINGS:
        present = [name for name in _variables(path) if environ.get(name, "").strip()]
        for name in present[:1]:
            try:
                given[path] = _Given(_said(path, name, environ[name].strip()), name)
            except (OSError, ValueError) as error:
                problems.append(
                    f"{name} (from the environment): can't be read ({getattr(error, 'strerror', 'no text')})"
                )
        warnings += [
            Advice(f"{name} is ignored, for {present[0]} is set", "unset one of the two")
            for name in present[1:]
            if name.startswith("ROTA_")
        ]
    known = {name for path in _SETTINGS for name in _variables(path)}
    for name in sorted(name for name in environ if name.startswith("ROTA_") and name not in known | _NO_SETTINGS):
        short = {other.removeprefix("ROTA_"): other for other in known if other.startswith("ROTA_")}
        if close := get_close_matches(name.removeprefix("ROTA_"), short, n=1, cutoff=0.85):
            problems.append(f"{name} (from the environment): no such setting; did you mean {short[close[0]]}?")
        else:
            remedy = "unset it, or choose one that `rota config` shows"
            warnings.append(Advice(f"{name} is ignored, for rota has no such setting", remedy))
    return given


def _known(settings: Mapping[str, Any], source: str, problems: list[str]) -> dict[str, _Given]:
    for path in settings.keys() - _SETTINGS:
        remedy = f"is a section; write [{path}] and its settings below" if path in _SECTIONS else _meant(path)
        problems.append(f"{path} (from {source}): {remedy}")
    return {path: _Given(value, source) for path, value in settings.items() if path in _SETTINGS}


def _meant(path: str) -> str:
    section, dot, name = path.rpartition(".")
    beside = [
        other.removeprefix(section + dot) for other in [*_SETTINGS, *_SECTIONS] if other.rpartition(".")[0] == section
    ]
    elsewhere = {other.rpartition(".")[2]: other for other in _SETTINGS}
    if close := get_close_matches(name, beside, n=1, cutoff=0.7):
        return f"no such setting; did you mean {section + dot + close[0]}?"
    if close := get_close_matches(name, elsewhere, n=1, cutoff=0.8):
        return f"no such setting; did you mean {elsewhere[close[0]]}?"
    return f"no such setting; there are {', '.join(beside)}"


def _stop_timeout_warnings(config: Config, environ: Mapping[str, str], problems: list[str]) -> list[Advice]:
    told = environ.get("ROTA_STOP_TIMEOUT", "").strip()
    if told in {"", "infinity"}:
        return []
    try:
        stop = parse_duration(told)
    except ValueError as error:
        problems.append(f"ROTA_STOP_TIMEOUT = {told!r} (from the environment): {error}")
        return []
    needed = config.drain.timeout + config.drain.grace
    if needed <= stop:
        return []
    return [
        Advice(
            f"drain.timeout ({format_duration(config.drain.timeout)}) and drain.grace "
            f"({format_duration(config.drain.grace)}) outlast ROTA_STOP_TIMEOUT ({told}), after which this daemon is "
            f"killed, and jobs cut then wait for their leases to end",
            f"raise the stop timeout (TimeoutStopSec) to {format_duration(needed)} or more, or drain for less",
        )
    ]


def _libpq_dsn(environ: Mapping[str, str]) -> str | None:
    # asyncpg reads PGHOST and its like by itself, but looks at PGSERVICE only after it has read the service file.
    if service := environ.get("PGSERVICE"):
        return f"postgresql://?service={quote(service, safe='')}"
    return "postgresql://" if any(environ.get(name) for name in ("PGHOST", "PGDATABASE")) else None


def _variables(path: str) -> list[str]:
    names = dict.fromkeys([*_OTHER_NAMES.get(path, ()), f"ROTA_{path.upper().replace('.', '_')}"])
    # Each beside its file: rota's own, in a file, is still nearer than the application's DATABASE_URL.
    return [each for name in names for each in ((name, f"{name}_FILE") if path in _SECRETS else (name,))]


def _said(path: str, name: str, value: str) -> str:
    return Path(value).read_text(encoding="utf-8").strip() if path in _SECRETS and name.endswith("_FILE") else value


def _remedy(fault: Any) -> str:
    if fault["type"] == "literal_error":
        return f"choose {fault['ctx']['expected']}"
    return str(fault["msg"].removeprefix("Value error, "))


def _shown(path: str, value: object) -> str:
    # A refused URL is often broken by its very password, so that nobody can tell which part that is; and it may have
    # gone into the wrong variable.
    text = "***" if path in _SECRETS or _SECRET_IN_TEXT.search(str(value)) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        elif isinstance(value, dict) and value and all(isinstance(each, Section) for each in value.values()):
            for key, each in value.items():
                yield from _leaves(each, f"{prefix}{name}.{key}.")
        else:
            yield f"{prefix}{name}", value


_SETTINGS = [path for path, _ in _leaves(Config())]
_SECTIONS = list(dict.fromkeys(path.partition(".")[0] for path in _SETTINGS if "." in path))
_SECRETS = {"database.url", "database.direct_url"}
_OTHER_NAMES = {  # first come, first served
    "database.url": ("ROTA_DATABASE_URL", "DATABASE_URL"),
    "database.direct_url": ("ROTA_DIRECT_URL",),
    "lease.duration": ("ROTA_LEASE",),
}
_NO_SETTINGS = {"ROTA_CONFIG", "ROTA_DATA_DIR", "ROTA_STOP_TIMEOUT", "ROTA_PG_BIN"}
