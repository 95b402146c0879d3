"""Schedules that code declares: what is stored, and what a start of the code makes of it. Decided here, written elsewhere."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from rota.domain.payload import encode, seconds
from rota.domain.schedule import check_rule
from rota.domain.validation import check
from rota.errors import ConfigError, InvalidCron

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

What = Literal["inserted", "updated", "noted", "unchanged", "newer_release", "not_ours", "undeclared", "refused"]
"""What becomes of a schedule.

inserted       it was missing
updated        its declaration has changed since it was last applied: what has changed in it is written
noted          it is as declared; that this release has seen it is written down, so that an older one is known as such
unchanged      nothing to write
newer_release  left alone: what stands there a newer release has declared
not_ours       left alone: somebody else made a schedule of that name
undeclared     left alone: an earlier declaration of this app, which its code no longer has; removed only when asked
refused        the database refuses it, or somebody keeps it locked
"""

REMEMBERED = 20
"""How many earlier releases are kept with a declaration."""

LONG = 8192
"""From how many characters on a payload is kept as its hash."""

_KEYS = {"release", "older"}
_PAYLOAD = {"payload", "payload_sha256"}
_VERSION = re.compile(r"v?\d+(?:[._-]\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One `@app.schedule`: the columns that it names, as JSON values. Whatever it doesn't name has its default."""

    name: str
    columns: Mapping[str, Any]
    payload: str | None = None
    """As JSON text, None for the default."""
    paused: bool = False
    """How it is inserted; later that is a matter of operators."""

    @property
    def stored(self) -> dict[str, Any]:
        """What is kept of it in the column `declared`; of a long payload, whether it is the same."""
        if self.payload is None:
            return {**self.columns}
        if len(self.payload) > LONG:
            return {**self.columns, "payload_sha256": sha256(self.payload.encode()).hexdigest()}
        return {**self.columns, "payload": _read(self.payload)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A schedule that is there: who declared it, and what was declared, as JSON text."""

    name: str
    declared_by: str | None
    declared: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What becomes of one schedule, and what to write for it."""

    name: str
    what: What
    why: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    payload: str | None = None
    declared: str | None = None
    expected: str | None = None

    @property
    def writes(self) -> bool:
        """Whether there is anything to write."""
        return self.what in {"inserted", "updated", "noted"}


def declare(
    name: str,
    *,
    cron: str | None,
    every: timedelta | None,
    payload: str | None,
    paused: bool,
    **columns: Any,
) -> Declaration:
    """Check what code declares as far as that can be done without the database, and write it as JSON; the payload is JSON already.

    Raises ConfigError and InvalidCron, which name the schedule.
    """
    check(f"schedule {name!r}", cron=cron, every=every, **columns)
    if (cron is None) is (every is None):
        raise ConfigError(f"schedule {name!r} needs either a cron expression or every")
    try:
        check_rule({**columns, "cron": cron})
    except InvalidCron as error:
        raise InvalidCron(f"schedule {name!r}: {error}") from error
    if every is not None and every < timedelta(seconds=1):
        raise ConfigError(f"schedule {name!r}: every is at least 1 second")
    given = {"cron": cron, "every": every, **columns}
    return Declaration(
        name=name,
        columns={column: _value(name, column, value) for column, value in given.items() if value is not None},
        payload=payload,
        paused=paused,
    )


def reconcile(
    declarations: Iterable[Declaration],
    stored: Iterable[Stored],
    *,
    app: str,
    release: str | None,
    force: bool = False,
) -> list[Step]:
    """Decide what becomes of each declaration, and of each schedule that this app declared once. In the order of their names.

    Operators' edits survive: only what has changed *in the declaration* is written. `force` also takes over what a newer
    release, or somebody else, has made.
    """
    there = {each.name: each for each in stored}
    wanted = {each.name: each for each in declarations}
    steps = [_step(each, there.get(name), app=app, release=release, force=force) for name, each in wanted.items()]
    left_over = [each for each in there.values() if each.declared_by == app and each.name not in wanted]
    steps += [_left_over(each, release=release, force=force) for each in left_over]
    return sorted(steps, key=lambda step: step.name)


def is_older(release: str | None, than: str | None, seen_before: Sequence[str] = ()) -> bool:
    """Tell whether a release is known to be older than another, which came after those `seen_before`.

    Versions (`1.4.2`, `v12`, `2026-10-01`) are compared as such. Of anything else, a commit's hash for example, nobody can
    tell but by the order in which they came: what was seen before the other one is older. Without a name, none is.
    """
    if release is None or than is None or release == than:
        return False
    if _VERSION.fullmatch(release) and _VERSION.fullmatch(than):
        return _numbers(release) < _numbers(than)
    return release in seen_before


def _step(wanted: Declaration, there: Stored | None, *, app: str, release: str | None, force: bool) -> Step:
    new = wanted.stored
    if there is None:
        declared = _declared(new, release, ())
        columns = {**wanted.columns, "name": wanted.name, "paused": wanted.paused}
        return Step(name=wanted.name, what="inserted", columns=columns, payload=wanted.payload, declared=declared)
    ours = there.declared_by == app
    if not ours and not force:
        whose = f"app {there.declared_by} declares it" if there.declared_by else "it was not declared by code"
        return Step(name=wanted.name, what="not_ours", why=f"{whose}: give one of them another name, or sync --force")
    kept = _read(there.declared) if there.declared else {}
    old = {key: value for key, value in kept.items() if key not in _KEYS} if ours else {}
    stood, older = kept.get("release") if ours else None, kept.get("older", []) if ours else []
    changed = {key for key in old.keys() | new.keys() if _differ(old.get(key), new.get(key))}
    if not force and is_older(release, stood, older):
        if not changed:
            return Step(name=wanted.name, what="unchanged")
        why = f"release {stood} is newer than {release}; to go back: sync --force"
        return Step(name=wanted.name, what="newer_release", why=why)
    if not changed and ours and release in {None, stood}:
        return Step(name=wanted.name, what="unchanged")
    if release is not None and stood not in {None, release}:
        older = [*(each for each in older if each not in {release, stood}), stood]
    columns = {key: wanted.columns.get(key) for key in changed - _PAYLOAD}
    return Step(
        name=wanted.name,
        what="updated" if changed or not ours else "noted",
        why=", ".join(sorted(changed)),
        columns=columns,
        payload=(wanted.payload or "{}") if _PAYLOAD & changed else None,
        declared=_declared(new, release if release is not None else stood, older),
        expected=there.declared,
    )


def _left_over(there: Stored, *, release: str | None, force: bool) -> Step:
    kept = _read(there.declared) if there.declared else {}
    if not force and is_older(release, kept.get("release"), kept.get("older", [])):
        return Step(name=there.name, what="newer_release", why=f"release {kept['release']} is newer and declares it")
    return Step(name=there.name, what="undeclared", why="the code no longer declares it: sync --prune removes it")


def _declared(columns: Mapping[str, Any], release: str | None, older: Sequence[str]) -> str:
    kept: dict[str, Any] = {**columns}
    if release is not None:
        kept["release"] = release
    if older:
        kept["older"] = list(older)[-REMEMBERED:]
    return json.dumps(kept, ensure_ascii=False, default=_number)


def _value(name: str, column: str, value: Any) -> Any:
    match value:
        case timedelta():
            return seconds(value)
        case datetime():
            if value.utcoffset() is None:
                raise ConfigError(f"schedule {name!r}: {column} carries no timezone; write datetime(…, tzinfo=UTC)")
            return value.astimezone(UTC).isoformat()
        case str():
            return value
        case _:
            return json.loads(encode(value))


def _read(text: str) -> Any:
    # As decimals, for the database writes 1e2 as 100, and keeps digits that a float would lose.
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def _differ(one: Any, other: Any) -> bool:
    return bool(_exact(one) != _exact(other))


def _exact(value: Any) -> Any:
    return _read(json.dumps(value, default=_number)) if not isinstance(value, str) else value


def _number(value: object) -> Any:
    assert isinstance(value, Decimal)  # noqa: S101  nothing else is made here
    return int(value) if value == value.to_integral_value() else float(value)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(each) for each in re.findall(r"\d+", version)]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
