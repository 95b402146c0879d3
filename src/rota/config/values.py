"""Parse and format single values: durations, whole numbers, URLs, queues. Every error says what to write instead."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, PlainValidator, SecretStr, StringConstraints

_UNITS = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)\s*")
_HOST = r"(?:\[[^\]@/?#]*\]|[^:,@/?#\[\]]*)(?::\d+)?"
_QUERY_PAIR = r"[^#&=%]+=[^#&]*"
_DSN = re.compile(
    r"(?P<start>postgres(?:ql)?://)(?:(?P<user>[^:@/?#]*)(?P<password>:[^@/?#]*)?@)?"
    rf"(?P<location>{_HOST}(?:,{_HOST})*(?:/[^?#]*)?)(?:\?(?P<query>{_QUERY_PAIR}(?:&{_QUERY_PAIR})*)?)?"
)
_LIBPQ_ONLY_PARAMETERS = {
    "fallback_application_name",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "load_balance_hosts",
    "channel_binding",
    "gssencmode",
    "gssdelegation",
    "sslcertmode",
    "sslcompression",
    "sslsni",
}
"""URL parameters that only libpq knows. asyncpg would send them to the server, which rejects them."""

_UNSUPPORTED_SECURITY = {
    "channel_binding": "require",
    "gssencmode": "require",
    "sslcertmode": "require",
    "require_auth": "",
    "requirepeer": "",
}
"""Parameter -> the value with which it requires a protection that the driver lacks; an empty string means any value."""

_SESSION_ATTRIBUTES = ("any", "read-write", "read-only", "primary", "standby", "prefer-standby")

_PASSWORD_PARAMETER = re.compile(r"(?i)((?:^|&)[^=&]*password[^=&]*=)[^&]*")


def parse_duration(value: object) -> timedelta:
    """Parse `30s`, `1h30m`, or a number of seconds. Raises ValueError with an example of the format."""
    if isinstance(value, timedelta):
        return value
    text = str(value).strip()
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            if re.fullmatch(rf"(?:{_DURATION_PART.pattern})+", text):
                return timedelta(
                    seconds=sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text))
                )
            return timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        pass
    raise ValueError("write a duration such as 500ms, 30s, 5m, 1h or 7d")


def format_duration(value: timedelta) -> str:
    """Format a duration for `parse_duration`, in the largest unit that divides it."""
    milliseconds, remainder = divmod(value, timedelta(milliseconds=1))
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if not remainder and milliseconds and milliseconds % size == 0:
            return f"{milliseconds // size}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"


def mask_dsn(dsn: str) -> str:
    """Replace the passwords in a PostgreSQL URL by ***. Any other text becomes ***."""
    if not (parts := _DSN.fullmatch(dsn)):
        return "***"
    start, user, password, location, query = parts.group("start", "user", "password", "location", "query")
    login = "" if user is None else f"{user}{':***' if password else ''}@"
    return f"{start}{login}{location}" + ("?" + _PASSWORD_PARAMETER.sub(r"\1***", query) if query else "")


def duration_between(low: str, high: str, *, zero_is_forever: bool = False) -> BeforeValidator:
    """Return a validator for durations from `low` to `high`. With `zero_is_forever`, 0 is valid, too, and becomes None."""

    def check(value: object) -> timedelta | None:
        duration = parse_duration(value)
        if zero_is_forever and not duration:
            return None
        if not parse_duration(low) <= duration <= parse_duration(high):
            raise ValueError(f"choose {low} to {high}{', or 0 for ever' if zero_is_forever else ''}")
        return duration

    return BeforeValidator(check)


def whole_number(low: int, high: int) -> BeforeValidator:
    """Return a validator for whole numbers from `low` to `high`."""

    def check(value: object) -> int:
        if isinstance(value, int | str) and not isinstance(value, bool):
            text = str(value).strip()
            if re.fullmatch(r"[+-]?[0-9]{1,9}", text) and low <= int(text) <= high:
                return int(text)
        raise ValueError(f"choose a whole number from {low} to {high}")

    return BeforeValidator(check)


def parse_dsn(value: object) -> SecretStr:
    """Validate a PostgreSQL URL, and remove parameters that only libpq knows. Raises ValueError with the format."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else str(value).strip()
    if not (parts := _DSN.fullmatch(text)):
        raise ValueError(
            "write postgresql://user:password@host:5432/database?name=value, with @ : / ? # in a password as %40 and so on"
        )
    _check_hosts(parts["location"].partition("/")[0].split(","))
    return SecretStr(_without_libpq_parameters(text, parts["query"]) if parts["query"] else text)


def _check_hosts(hosts: list[str]) -> None:
    """Raise ValueError for hosts that the driver would reject, or would take for localhost."""
    if len(hosts) > 1 and not all(re.sub(r":\d*$", "", host) for host in hosts):
        raise ValueError("name a host before and after each comma")
    for host in hosts:
        port = re.search(r":(\d+)$", host)
        if port and not (len(port[1]) <= 5 and 1 <= int(port[1]) <= 65535):
            raise ValueError("choose a port from 1 to 65535")


def _without_libpq_parameters(dsn: str, query: str) -> str:
    """Remove parameters that only libpq knows. Raises ValueError if the connection would lose a protection that they require."""
    pairs = [(pair, *pair.split("=", 1)) for pair in query.split("&")]
    for _, name, value in pairs:
        if name in _UNSUPPORTED_SECURITY and _UNSUPPORTED_SECURITY[name] in {"", value}:
            parameter = f"{name}={_UNSUPPORTED_SECURITY[name]}" if _UNSUPPORTED_SECURITY[name] else name
            raise ValueError(f"the driver does not support {parameter}: remove it, and use sslmode=verify-full")
        if name == "target_session_attrs" and value not in _SESSION_ATTRIBUTES:
            raise ValueError(f"choose {', '.join(_SESSION_ATTRIBUTES)} for target_session_attrs")
        if name == "connect_timeout" and not re.fullmatch(r"[0-9]{1,6}", value):
            raise ValueError("write connect_timeout as a whole number of seconds")
    remaining_query = "&".join(pair for pair, name, _ in pairs if name not in _LIBPQ_ONLY_PARAMETERS)
    return dsn[: -len(query)].removesuffix("?") + (f"?{remaining_query}" if remaining_query else "")


def slots_by_queue(value: object) -> Mapping[str, int]:
    """Parse `name:slots,name:slots`, or a table. Raises ValueError with the format.

    At least one queue must have a slot, because a daemon without slots would never claim a job.
    """
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
    if not any(queues.values()):
        raise ValueError("give at least one queue a slot, as in default:10 (in the file, default = 10)")
    return MappingProxyType(queues)


Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


def _split_names(value: object) -> object:
    return [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value


Names = Annotated[frozenset[Name], BeforeValidator(_split_names)]
"""A list of names, or a text with commas between them."""
Dsn = Annotated[SecretStr, BeforeValidator(parse_dsn)]
Queues = Annotated[Mapping[str, int], PlainValidator(slots_by_queue), PlainSerializer(dict)]
RetentionPeriod = Annotated[timedelta | None, duration_between("1h", "36500d", zero_is_forever=True)]
