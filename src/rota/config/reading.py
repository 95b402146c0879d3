"""Read the configuration from the command line, the environment and the file. All errors are reported together."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

from pydantic import ValidationError

from rota.config.sections import Advice, Config, iter_settings
from rota.config.values import format_duration, parse_dsn, parse_duration
from rota.errors import ConfigError

_POSSIBLE_PASSWORD = re.compile(r"(?i)(?<=://)(?![^/@\s:]*(:\d+)?(/[^@]*)?$).*|(?<=password=).*")
"""Text that may be a password in a setting that is not secret, such as a database URL in the wrong variable."""

_SERVICE_LINK_NAME = re.compile(r"(_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")

SETTINGS = [path for path, _ in iter_settings(Config())]
"""The path of every setting, such as `lease.duration`."""

_SECTIONS = list(dict.fromkeys(path.partition(".")[0] for path in SETTINGS if "." in path))
_SECRETS = {"database.url", "database.direct_url"}
_EXTRA_VARIABLES = {  # in order of precedence
    "database.url": ("ROTA_DATABASE_URL", "DATABASE_URL"),
    "database.direct_url": ("ROTA_DIRECT_URL",),
    "lease.duration": ("ROTA_LEASE",),
}
NO_SETTINGS = {"ROTA_CONFIG", "ROTA_DATA_DIR", "ROTA_STOP_TIMEOUT", "ROTA_PG_BIN"}
"""Variables that are not settings, but are read by other modules."""


class _Value(NamedTuple):
    value: Any
    source: str


def _nested_paths(path: str, value: object) -> Iterator[str]:
    """Yield a path, and the paths of all values in its table."""
    yield path
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _nested_paths(f"{path}.{name}", item)


def load(
    config_file: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Read and validate the configuration. Raises ConfigError with one line for each error.

    `overrides` are values from the command line by path, such as `{"database.url": …, "lease.duration": "30s"}`. None counts as
    unset. A value may be text, or already have its type.
    """
    problems: list[str] = []
    warnings: list[Advice] = []
    from_command_line = {path: value for path, value in (overrides or {}).items() if value is not None}
    values = (
        _from_file(config_file, environ, problems)
        | _from_environment(environ, problems, warnings)
        | _check_paths(from_command_line, "the command line", problems)
    )
    tree: dict[str, Any] = {}
    for path, (value, _) in values.items():
        section, _, name = path.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    config = Config()
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        for fault in error.errors(include_url=False, include_context=True, include_input=False):
            path = ".".join(map(str, fault["loc"]))
            if path in values and not path.startswith("handlers."):
                origin = f" = {_masked_text(path, values[path].value)} (from {values[path].source})"
            else:  # omit the value: a table of handlers may contain secrets
                origin = f" (from {values['.'.join(path.split('.')[:2])].source})"
            problems.append(f"{path}{origin}: {_remedy(fault)}")
    warnings += _stop_timeout_warnings(config, environ, problems)
    if problems:
        # Outside the except block: pydantic's error in the traceback could print the rejected values.
        raise ConfigError("\n".join(sorted(problems)))
    config._sources = MappingProxyType(  # noqa: SLF001
        {leaf: source for path, (value, source) in values.items() for leaf in _nested_paths(path, value)}
    )
    config._warnings = tuple(warnings)  # noqa: SLF001
    config._libpq = _libpq_dsn(environ)  # noqa: SLF001
    config._readers = {  # noqa: SLF001
        path: reader
        for path in _SECRETS & values.keys()
        if (reader := _url_reader(path, values[path].source, config_file, environ)) is not None
    }
    return config


def _config_path(config_file: Path | None, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the configuration file, and whether it was named explicitly. A file that was not named need not exist."""
    explicit = config_file or environ.get("ROTA_CONFIG", "").strip()
    return Path(explicit or "rota.toml"), bool(explicit)


def _url_reader(
    path: str, source: str, config_file: Path | None, environ: Mapping[str, str]
) -> Callable[[], str] | None:
    """Return a function that reads a database URL again, None if the URL did not come from a file."""
    toml, _ = _config_path(config_file, environ)
    if source.endswith("_FILE"):
        file = Path(environ[source].strip())
        return lambda: parse_dsn(file.read_text(encoding="utf-8").strip()).get_secret_value()
    if source == str(toml):
        section, _, name = path.partition(".")
        return lambda: parse_dsn(tomllib.loads(toml.read_text(encoding="utf-8-sig"))[section][name]).get_secret_value()
    return None


def _from_file(config_file: Path | None, environ: Mapping[str, str], problems: list[str]) -> dict[str, _Value]:
    path, is_explicit = _config_path(config_file, environ)
    if not is_explicit and not path.exists():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors write a byte order mark
    except OSError as error:
        source = "the command line" if config_file else "ROTA_CONFIG" if is_explicit else "the current folder"
        problems.append(f"{path} (from {source}): can't be read ({error.strerror})")
        return {}
    except ValueError as error:
        problems.append(f"{path}: is not valid TOML: {error}")
        return {}
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key in _SECTIONS and isinstance(value, Mapping):
            settings |= {f"{key}.{name}": setting for name, setting in value.items()}
        else:
            settings[key] = value
    return _check_paths(settings, str(path), problems)


def _from_environment(environ: Mapping[str, str], problems: list[str], warnings: list[Advice]) -> dict[str, _Value]:
    values: dict[str, _Value] = {}
    environ = {name: value for name, value in environ.items() if not _is_service_link(name, value)}
    for path in SETTINGS:
        set_names = [name for name in variables(path) if environ.get(name, "").strip()]
        for name in set_names[:1]:
            try:
                values[path] = _Value(_read_variable(path, name, environ[name].strip()), name)
            except (OSError, ValueError) as error:
                problems.append(
                    f"{name} (from the environment): can't be read ({getattr(error, 'strerror', 'no text')})"
                )
        warnings += [
            Advice(f"{name} is ignored because {set_names[0]} is set", "unset one of the two")
            for name in set_names[1:]
            if name.startswith("ROTA_")
        ]
    known = {name for path in SETTINGS for name in variables(path)}
    for name in sorted(name for name in environ if name.startswith("ROTA_") and name not in known | NO_SETTINGS):
        full_names = {other.removeprefix("ROTA_"): other for other in known if other.startswith("ROTA_")}
        if similar := get_close_matches(name.removeprefix("ROTA_"), full_names, n=1, cutoff=0.85):
            problems.append(f"{name} (from the environment): no such setting; did you mean {full_names[similar[0]]}?")
        else:
            remedy = "unset it, or use a setting from `rota config`"
            warnings.append(Advice(f"{name} is ignored because rota has no such setting", remedy))
    return values


def _is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes may have set this variable. It sets some in every pod for each Service of the namespace."""
    return bool(_SERVICE_LINK_NAME.search(name) or _SERVICE_LINK_VALUE.fullmatch(value.strip()))


def _check_paths(settings: Mapping[str, Any], source: str, problems: list[str]) -> dict[str, _Value]:
    for path in settings.keys() - SETTINGS:
        remedy = f"is a section; write [{path}] and its settings below" if path in _SECTIONS else _suggest(path)
        problems.append(f"{path} (from {source}): {remedy}")
    return {path: _Value(value, source) for path, value in settings.items() if path in SETTINGS}


def _suggest(path: str) -> str:
    """Return the error text for an unknown setting, with similar names."""
    section, dot, name = path.rpartition(".")
    siblings = [
        other.removeprefix(section + dot) for other in [*SETTINGS, *_SECTIONS] if other.rpartition(".")[0] == section
    ]
    others = {other.rpartition(".")[2]: other for other in SETTINGS}
    if similar := get_close_matches(name, siblings, n=1, cutoff=0.7):
        return f"no such setting; did you mean {section + dot + similar[0]}?"
    if similar := get_close_matches(name, others, n=1, cutoff=0.8):
        return f"no such setting; did you mean {others[similar[0]]}?"
    return f"no such setting; choose from {', '.join(siblings)}"


def _stop_timeout_warnings(config: Config, environ: Mapping[str, str], problems: list[str]) -> list[Advice]:
    text = environ.get("ROTA_STOP_TIMEOUT", "").strip()
    if text in {"", "infinity"}:
        return []
    try:
        stop = parse_duration(text)
    except ValueError as error:
        problems.append(f"ROTA_STOP_TIMEOUT = {text!r} (from the environment): {error}")
        return []
    if stop < timedelta(0):
        problems.append(f"ROTA_STOP_TIMEOUT = {text!r} (from the environment): write a duration that is not negative")
        return []
    needed = config.drain.timeout + config.drain.grace
    if needed <= stop:
        return []
    return [
        Advice(
            f"drain.timeout ({format_duration(config.drain.timeout)}) and drain.grace "
            f"({format_duration(config.drain.grace)}) together exceed ROTA_STOP_TIMEOUT ({text}). This daemon is "
            f"killed after that time, and its unfinished jobs wait until their leases expire",
            f"raise the stop timeout (TimeoutStopSec) to {format_duration(needed)} or more, or lower drain.timeout",
        )
    ]


def _libpq_dsn(environ: Mapping[str, str]) -> str | None:
    # asyncpg reads PGHOST and similar variables by itself, but looks at PGSERVICE only after it has read the service file.
    if service := environ.get("PGSERVICE"):
        return f"postgresql://?service={quote(service, safe='')}"
    return "postgresql://" if any(environ.get(name) for name in ("PGHOST", "PGDATABASE")) else None


def variables(path: str) -> list[str]:
    """Return the variables of a setting, in order of precedence."""
    names = dict.fromkeys([*_EXTRA_VARIABLES.get(path, ()), f"ROTA_{path.upper().replace('.', '_')}"])
    # ROTA_DATABASE_URL_FILE has precedence over DATABASE_URL, which may belong to the application.
    return [variant for name in names for variant in ((name, f"{name}_FILE") if path in _SECRETS else (name,))]


def _read_variable(path: str, name: str, value: str) -> str:
    return Path(value).read_text(encoding="utf-8").strip() if path in _SECRETS and name.endswith("_FILE") else value


def _remedy(fault: Any) -> str:
    if fault["type"] == "literal_error":
        return f"choose {fault['ctx']['expected']}"
    if fault["type"] == "string_pattern_mismatch" and fault["loc"][-1] == "url":
        return "write https://host/path without user and password. Use a header or a secret to authenticate"
    return str(fault["msg"].removeprefix("Value error, "))


def _masked_text(path: str, value: object) -> str:
    # Mask the whole URL: often the password itself makes it invalid, so its position is unknown.
    text = (
        "***"
        if path in _SECRETS
        else repr(value if isinstance(value, int | float) else _POSSIBLE_PASSWORD.sub("***", str(value)))
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
