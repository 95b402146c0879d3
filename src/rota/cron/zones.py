"""Load time zones by name: from the tzdata package first, then from the system's files."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.resources import files
from zoneinfo import ZoneInfo, available_timezones

from rota.errors import ConfigError, InvalidCron


@cache
def zone(name: str) -> ZoneInfo:
    """Return the timezone of that exact name from the tzdata package, else from the system. Raises InvalidCron.

    zoneinfo alone would read the system's files first, which are often years old, so two nodes could compute different fires.
    Only names in the lists of zones are opened as files.
    """
    if not isinstance(name, str):
        raise TypeError(f"a timezone is given by its name, not as {type(name).__name__}")
    if name in _packaged_zones():
        with files("tzdata.zoneinfo").joinpath(*name.split("/")).open("rb") as file:
            return ZoneInfo.from_file(file, key=name)
    if name in _system_zones():
        return ZoneInfo(name)
    if not name:
        raise InvalidCron("the timezone is empty; write a name such as `Europe/Vienna`, or `UTC`")
    zones = {zone_name.casefold(): zone_name for zone_name in _packaged_zones()}
    likely = get_close_matches(name[:60].casefold(), zones, n=1, cutoff=0.75)
    hint = f"; did you mean `{zones[likely[0]]}`?" if likely else "; write a name such as `Europe/Vienna`, or `UTC`"
    raise InvalidCron(f"there is no timezone {name[:60]!r}{hint}")


def tzdata_version() -> str:
    """Return the release of the zone data, such as `2026a`. Nodes with different releases may compute different fires."""
    try:
        return str(import_module("tzdata").IANA_VERSION)
    except ModuleNotFoundError as error:
        # Without tzdata, a machine without zone files would know only UTC, and old files would give other fires.
        raise ConfigError(
            "the package tzdata is missing, without which no timezone can be trusted: install it"
        ) from error


@cache
def _packaged_zones() -> frozenset[str]:
    tzdata_version()
    return frozenset(files("tzdata").joinpath("zones").read_text(encoding="utf-8").split())


@cache
def _system_zones() -> frozenset[str]:
    return frozenset(available_timezones()) - {"localtime"}  # differs from machine to machine
