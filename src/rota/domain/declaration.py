"""Schedules declared in code: compare them with the stored schedules and decide what to write. Nothing is written here."""

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
from rota.domain.validation import check_declaration
from rota.errors import ConfigError, InvalidCron

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

What = Literal["inserted", "updated", "noted", "unchanged", "newer_release", "not_ours", "undeclared", "refused"]
"""What becomes of a schedule.

inserted       it was missing
updated        the declaration has changed since it was last applied: the changed columns are written
noted          the schedule is as declared: only this release's name is written, so that older releases are recognised
unchanged      nothing to write
newer_release  left unchanged: a newer release has declared it
not_ours       left unchanged: a schedule of that name exists that this app has not declared
undeclared     left unchanged: this app has declared it before, but its code no longer does; `--prune` removes it
refused        the database rejects it, or another session keeps it locked
"""

MAX_OLDER_RELEASES = 20
"""How many earlier releases are stored with a declaration."""

MAX_PAYLOAD_CHARACTERS = 8192
"""Of a longer payload, only the hash is stored with the declaration."""

_KEYS = {"release", "older"}
_PAYLOAD = {"payload", "payload_sha256"}
_VERSION = re.compile(r"v?\d+(?:[._-]\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One `@app.schedule`: the columns that it sets, as JSON values. All other columns have their defaults."""

    name: str
    columns: Mapping[str, Any]
    payload: str | None = field(default=None, repr=False)
    """As JSON text, None for the default."""
    paused: bool = False
    """Used only for the insert. Later, operators pause and resume the schedule."""

    @property
    def stored(self) -> dict[str, Any]:
        """The value for the column `declared`. It contains a hash instead of a long payload."""
        if self.payload is None:
            return {**self.columns}
        if len(self.payload) > MAX_PAYLOAD_CHARACTERS:
            return {**self.columns, "payload_sha256": sha256(self.payload.encode()).hexdigest()}
        return {**self.columns, "payload": _read(self.payload)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A schedule in the database: the app that declared it, and the declaration as JSON text."""

    name: str
    declared_by: str | None
    declared: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What becomes of one schedule, and the values to write."""

    name: str
    what: What
    why: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)
    payload: str | None = None
    declared: str | None = None
    expected: str | None = None

    @property
    def writes(self) -> bool:
        """Whether this step writes to the database."""
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
    """Validate a declaration without the database, and return it with JSON values. `payload` is already JSON text.

    Raises ConfigError or InvalidCron with the schedule's name.
    """
    check_declaration(f"schedule {name!r}", cron=cron, every=every, **columns)
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
    """Decide what becomes of each declaration, and of each schedule that this app declared earlier. Ordered by name.

    Operators' edits survive: only columns that changed *in the declaration* are written. `force` also overwrites schedules that
    a newer release has declared, or that this app has not declared.
    """
    existing = {each.name: each for each in stored}
    wanted = {each.name: each for each in declarations}
    steps = [_step(each, existing.get(name), app=app, release=release, force=force) for name, each in wanted.items()]
    undeclared = [each for each in existing.values() if each.declared_by == app and each.name not in wanted]
    steps += [_undeclared_step(each, release=release, force=force) for each in undeclared]
    return sorted(steps, key=lambda step: step.name)


def is_older(release: str | None, than: str | None, seen_before: Sequence[str] = ()) -> bool:
    """Return whether a release is known to be older than the release `than`, which came after those `seen_before`.

    Versions (`1.4.2`, `v12`, `2026-10-01`) are compared as numbers. Other names, such as a commit hash, have no order of their
    own: such a release is older if it is in `seen_before`. A release without a name is never older.
    """
    if release is None or than is None or release == than:
        return False
    if _VERSION.fullmatch(release) and _VERSION.fullmatch(than):
        return _numbers(release) < _numbers(than)
    return release in seen_before


def _step(wanted: Declaration, existing: Stored | None, *, app: str, release: str | None, force: bool) -> Step:
    new_columns = wanted.stored
    if existing is None:
        declared = _declared(new_columns, release, ())
        columns = {**wanted.columns, "name": wanted.name, "paused": wanted.paused}
        return Step(name=wanted.name, what="inserted", columns=columns, payload=wanted.payload, declared=declared)
    ours = existing.declared_by == app
    if not ours and not force:
        whose = f"app {existing.declared_by} declares it" if existing.declared_by else "it was not declared by code"
        return Step(name=wanted.name, what="not_ours", why=f"{whose}: give one of them another name, or sync --force")
    declared_before = _read(existing.declared) if existing.declared else {}
    old_columns = {key: value for key, value in declared_before.items() if key not in _KEYS} if ours else {}
    last_release, older = (
        declared_before.get("release") if ours else None,
        declared_before.get("older", []) if ours else [],
    )
    changed = {
        key for key in old_columns.keys() | new_columns.keys() if _differ(old_columns.get(key), new_columns.get(key))
    }
    if not force and is_older(release, last_release, older):
        if not changed:
            return Step(name=wanted.name, what="unchanged")
        why = f"release {last_release} is newer than {release}; to go back: sync --force"
        return Step(name=wanted.name, what="newer_release", why=why)
    if not changed and ours and release in {None, last_release}:
        return Step(name=wanted.name, what="unchanged")
    if release is not None and last_release not in {None, release}:
        older = [*(each for each in older if each not in {release, last_release}), last_release]
    columns = {key: wanted.columns.get(key) for key in changed - _PAYLOAD}
    return Step(
        name=wanted.name,
        what="updated" if changed or not ours else "noted",
        why=", ".join(sorted(changed)),
        columns=columns,
        payload=(wanted.payload or "{}") if _PAYLOAD & changed else None,
        declared=_declared(new_columns, release if release is not None else last_release, older),
        expected=existing.declared,
    )


def _undeclared_step(existing: Stored, *, release: str | None, force: bool) -> Step:
    declared_before = _read(existing.declared) if existing.declared else {}
    if not force and is_older(release, declared_before.get("release"), declared_before.get("older", [])):
        return Step(
            name=existing.name,
            what="newer_release",
            why=f"release {declared_before['release']} is newer and declares it",
        )
    return Step(name=existing.name, what="undeclared", why="the code no longer declares it: sync --prune removes it")


def _declared(columns: Mapping[str, Any], release: str | None, older: Sequence[str]) -> str:
    kept: dict[str, Any] = {**columns}
    if release is not None:
        kept["release"] = release
    if older:
        kept["older"] = list(older)[-MAX_OLDER_RELEASES:]
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
    # As decimals: jsonb turns 1e2 into 100, and keeps digits that a float would lose.
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def _differ(one: Any, other: Any) -> bool:
    return bool(_exact(one) != _exact(other))


def _exact(value: Any) -> Any:
    return _read(json.dumps(value, default=_number)) if not isinstance(value, str) else value


def _number(value: object) -> Any:
    assert isinstance(value, Decimal)  # noqa: S101  _read() makes no other types
    return int(value) if value == value.to_integral_value() else float(value)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(each) for each in re.findall(r"\d+", version)]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
