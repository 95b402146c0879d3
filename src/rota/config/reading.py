"""From the command line, the environment and the file to the tree; every fault at once, each with where it came from."""

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

from rota.config.sections import Advice, Config, leaves
from rota.config.values import format_duration, parse_dsn, parse_duration
from rota.errors import ConfigError

_LOGIN_IN_TEXT = re.compile(r"(?i)(?<=://)(?![^/@\s:]*(:\d+)?(/[^@]*)?$).*|(?<=password=).*")
"""The part that may be a password in a setting that is not secret: someone pasted a database URL into the wrong variable."""

_SERVICE_LINK_NAME = re.compile(r"(_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)$")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://\S+:\d+")

SETTINGS = [path for path, _ in leaves(Config())]
"""The path of each, as in `lease.duration`."""

_SECTIONS = list(dict.fromkeys(path.partition(".")[0] for path in SETTINGS if "." in path))
_SECRETS = {"database.url", "database.direct_url"}
_OTHER_NAMES = {  # first come, first served
    "database.url": ("ROTA_DATABASE_URL", "DATABASE_URL"),
    "database.direct_url": ("ROTA_DIRECT_URL",),
    "lease.duration": ("ROTA_LEASE",),
}
NO_SETTINGS = {"ROTA_CONFIG", "ROTA_DATA_DIR", "ROTA_STOP_TIMEOUT", "ROTA_PG_BIN"}
"""Variables that are read elsewhere."""


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
    config._readers = {  # noqa: SLF001
        path: reader
        for path in _SECRETS & given.keys()
        if (reader := _url_reader(path, given[path].source, config_file, environ)) is not None
    }
    return config


def _config_path(config_file: Path | None, environ: Mapping[str, str]) -> tuple[Path, bool]:
    """Return the configuration file and whether it was named; else it need not exist."""
    named = config_file or environ.get("ROTA_CONFIG", "").strip()
    return Path(named or "rota.toml"), bool(named)


def _url_reader(
    path: str, source: str, config_file: Path | None, environ: Mapping[str, str]
) -> Callable[[], str] | None:
    """Return a function that reads a database URL again from its file; None where it did not come from a file."""
    toml, _ = _config_path(config_file, environ)
    if source.endswith("_FILE"):
        file = Path(environ[source].strip())
        return lambda: parse_dsn(file.read_text(encoding="utf-8").strip()).get_secret_value()
    if source == str(toml):
        section, _, name = path.partition(".")
        return lambda: parse_dsn(tomllib.loads(toml.read_text(encoding="utf-8-sig"))[section][name]).get_secret_value()
    return None


def _from_file(config_file: Path | None, environ: Mapping[str, str], problems: list[str]) -> dict[str, _Given]:
    path, named = _config_path(config_file, environ)
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
    environ = {name: value for name, value in environ.items() if not _is_service_link(name, value)}
    for path in SETTINGS:
        present = [name for name in variables(path) if environ.get(name, "").strip()]
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
    known = {name for path in SETTINGS for name in variables(path)}
    for name in sorted(name for name in environ if name.startswith("ROTA_") and name not in known | NO_SETTINGS):
        short = {other.removeprefix("ROTA_"): other for other in known if other.startswith("ROTA_")}
        if close := get_close_matches(name.removeprefix("ROTA_"), short, n=1, cutoff=0.85):
            problems.append(f"{name} (from the environment): no such setting; did you mean {short[close[0]]}?")
        else:
            remedy = "unset it, or choose one that `rota config` shows"
            warnings.append(Advice(f"{name} is ignored, for rota has no such setting", remedy))
    return given


def _is_service_link(name: str, value: str) -> bool:
    """Return whether Kubernetes may have set this variable, as it does in every pod for each Service of the namespace."""
    return bool(_SERVICE_LINK_NAME.search(name) or _SERVICE_LINK_VALUE.fullmatch(value.strip()))


def _known(settings: Mapping[str, Any], source: str, problems: list[str]) -> dict[str, _Given]:
    for path in settings.keys() - SETTINGS:
        remedy = f"is a section; write [{path}] and its settings below" if path in _SECTIONS else _meant(path)
        problems.append(f"{path} (from {source}): {remedy}")
    return {path: _Given(value, source) for path, value in settings.items() if path in SETTINGS}


def _meant(path: str) -> str:
    section, dot, name = path.rpartition(".")
    beside = [
        other.removeprefix(section + dot) for other in [*SETTINGS, *_SECTIONS] if other.rpartition(".")[0] == section
    ]
    elsewhere = {other.rpartition(".")[2]: other for other in SETTINGS}
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
    if stop < timedelta(0):
        problems.append(f"ROTA_STOP_TIMEOUT = {told!r} (from the environment): write a duration that is not negative")
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


def variables(path: str) -> list[str]:
    """Return the variables of a setting, the nearest first."""
    names = dict.fromkeys([*_OTHER_NAMES.get(path, ()), f"ROTA_{path.upper().replace('.', '_')}"])
    # Each beside its file: rota's own, in a file, is still nearer than the application's DATABASE_URL.
    return [each for name in names for each in ((name, f"{name}_FILE") if path in _SECRETS else (name,))]


def _said(path: str, name: str, value: str) -> str:
    return Path(value).read_text(encoding="utf-8").strip() if path in _SECRETS and name.endswith("_FILE") else value


def _remedy(fault: Any) -> str:
    if fault["type"] == "literal_error":
        return f"choose {fault['ctx']['expected']}"
    if fault["type"] == "string_pattern_mismatch" and fault["loc"][-1] == "url":
        return "write https://host/path, without user and password: a header or secret says who we are"
    return str(fault["msg"].removeprefix("Value error, "))


def _shown(path: str, value: object) -> str:
    # A refused URL is often broken by its very password, so which part of it is secret can't be known.
    text = (
        "***"
        if path in _SECRETS
        else repr(value if isinstance(value, int | float) else _LOGIN_IN_TEXT.sub("***", str(value)))
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
