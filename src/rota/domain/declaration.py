"""Schedules and limits declared in code: compare them with the stored ones and decide what to write. Nothing is written here."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal

from rota.domain.payload import encode, interval_text
from rota.domain.schedule import check_rule
from rota.domain.validation import check_declaration
from rota.errors import ConfigError, InvalidCron

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

StepKind = Literal["inserted", "updated", "noted", "unchanged", "newer_release", "not_ours", "undeclared", "refused"]
"""The result for one schedule or limit.

inserted       it was missing
updated        the declaration has changed since it was last applied: the changed columns are written
noted          it is as declared: only this release's name is written, so that older releases are recognised
unchanged      nothing to write
newer_release  left unchanged: a newer release has declared it
not_ours       left unchanged: one of that name exists that this app has not declared
undeclared     left unchanged: this app has declared it before, but its code no longer does; `--prune` removes it
refused        the database rejects it, or another session keeps it locked
"""

MAX_OLDER_RELEASES = 20
"""How many earlier releases are stored with a declaration."""

MAX_PAYLOAD_CHARACTERS = 8192
"""Of a longer payload, only the hash is stored with the declaration."""

_RELEASE_KEYS = {"release", "older"}
_PAYLOAD_KEYS = {"payload", "payload_sha256"}
_VERSION = re.compile(r"v?\d+(?:[._-]\d+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """One `@app.schedule`, or the limit of one `@app.handler`: the columns that it sets, as JSON values.

    All other columns have their defaults.
    """

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
        return {**self.columns, "payload": _parse_json(self.payload)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSchedule:
    """A schedule or limit in the database: the app that declared it, and the declaration as JSON text."""

    name: str
    declared_by: str | None
    declared: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result for one schedule or limit, and the values to write."""

    name: str
    what: StepKind
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
        columns={column: _json_value(name, column, value) for column, value in given.items() if value is not None},
        payload=payload,
        paused=paused,
    )


def declare_limit(
    handler: str, *, max_running: int | None, max_starts: int | None, per: timedelta | None
) -> Declaration | None:
    """Return the declaration of the limit `handler:NAME`, None if no value is set. The values are valid."""
    given = {"max_running": max_running, "max_starts": max_starts, "per": None if per is None else interval_text(per)}
    columns = {column: value for column, value in given.items() if value is not None}
    return Declaration(name=f"handler:{handler}", columns=columns) if columns else None


def reconcile(
    declarations: Iterable[Declaration],
    stored: Iterable[StoredSchedule],
    *,
    app: str,
    release: str | None,
    force: bool = False,
) -> list[Step]:
    """Decide what becomes of each declaration, and of each schedule that this app declared earlier. Ordered by name.

    Operators' edits survive: only columns that changed *in the declaration* are written. `force` also overwrites schedules that
    a newer release has declared, or that this app has not declared.
    """
    existing = {schedule.name: schedule for schedule in stored}
    wanted = {declaration.name: declaration for declaration in declarations}
    steps = [
        _step(declaration, existing.get(name), app=app, release=release, force=force)
        for name, declaration in wanted.items()
    ]
    steps += [
        _undeclared_step(schedule, release=release, force=force)
        for schedule in existing.values()
        if schedule.declared_by == app and schedule.name not in wanted
    ]
    return sorted(steps, key=lambda step: step.name)


def is_older(release: str | None, than: str | None, seen_before: Sequence[str] = ()) -> bool:
    """Return whether a release is known to be older than the release `than`, which came after those `seen_before`.

    Versions (`1.4.2`, `v12`, `2026-10-01`) are compared as numbers. Other names, such as a commit hash, have no order of their
    own: such a release is older if it is in `seen_before`. A release without a name is never older.
    """
    if release is None or than is None or release == than:
        return False
    if _VERSION.fullmatch(release) and _VERSION.fullmatch(than):
        return _version_numbers(release) < _version_numbers(than)
    return release in seen_before


def _step(wanted: Declaration, existing: StoredSchedule | None, *, app: str, release: str | None, force: bool) -> Step:
    new_columns = wanted.stored
    if existing is None:
        declared = _declared_json(new_columns, release, ())
        columns = {**wanted.columns, "name": wanted.name, "paused": wanted.paused}
        return Step(name=wanted.name, what="inserted", columns=columns, payload=wanted.payload, declared=declared)
    is_ours = existing.declared_by == app
    if not is_ours and not force:
        owner = f"app {existing.declared_by} declares it" if existing.declared_by else "it was not declared by code"
        return Step(name=wanted.name, what="not_ours", why=f"{owner}: rename or remove one of them, or sync --force")
    declared_before = _parse_json(existing.declared) if existing.declared else {}
    old_columns = {key: value for key, value in declared_before.items() if key not in _RELEASE_KEYS} if is_ours else {}
    last_release, older = (
        declared_before.get("release") if is_ours else None,
        declared_before.get("older", []) if is_ours else [],
    )
    changed = {
        key for key in old_columns.keys() | new_columns.keys() if _differ(old_columns.get(key), new_columns.get(key))
    }
    if not force and is_older(release, last_release, older):
        if not changed:
            return Step(name=wanted.name, what="unchanged")
        why = f"release {last_release} is newer than {release}; to go back: sync --force"
        return Step(name=wanted.name, what="newer_release", why=why)
    if not changed and is_ours and release in {None, last_release}:
        return Step(name=wanted.name, what="unchanged")
    if release is not None and last_release not in {None, release}:
        older = [*(earlier for earlier in older if earlier not in {release, last_release}), last_release]
    columns = {key: wanted.columns.get(key) for key in changed - _PAYLOAD_KEYS}
    return Step(
        name=wanted.name,
        what="updated" if changed or not is_ours else "noted",
        why=", ".join(sorted(changed)),
        columns=columns,
        payload=(wanted.payload or "{}") if _PAYLOAD_KEYS & changed else None,
        declared=_declared_json(new_columns, release if release is not None else last_release, older),
        expected=existing.declared,
    )


def _undeclared_step(existing: StoredSchedule, *, release: str | None, force: bool) -> Step:
    declared_before = _parse_json(existing.declared) if existing.declared else {}
    if not force and is_older(release, declared_before.get("release"), declared_before.get("older", [])):
        return Step(
            name=existing.name,
            what="newer_release",
            why=f"release {declared_before['release']} is newer and declares it",
        )
    return Step(name=existing.name, what="undeclared", why="the code no longer declares it: sync --prune removes it")


def _declared_json(columns: Mapping[str, Any], release: str | None, older: Sequence[str]) -> str:
    content: dict[str, Any] = {**columns}
    if release is not None:
        content["release"] = release
    if older:
        content["older"] = list(older)[-MAX_OLDER_RELEASES:]
    return json.dumps(content, ensure_ascii=False, default=_as_int_or_float)


def _json_value(name: str, column: str, value: Any) -> Any:
    match value:
        case timedelta():
            return interval_text(value)
        case datetime():
            if value.utcoffset() is None:
                raise ConfigError(f"schedule {name!r}: {column} carries no timezone; write datetime(…, tzinfo=UTC)")
            return value.astimezone(UTC).isoformat()
        case str():
            return value
        case _:
            return json.loads(encode(value))


def _parse_json(text: str) -> Any:
    # As decimals: jsonb turns 1e2 into 100, and keeps digits that a float would lose.
    return json.loads(text, parse_int=Decimal, parse_float=Decimal)


def _differ(left: Any, right: Any) -> bool:
    return bool(_with_exact_numbers(left) != _with_exact_numbers(right))


def _with_exact_numbers(value: Any) -> Any:
    return _parse_json(json.dumps(value, default=_as_int_or_float)) if not isinstance(value, str) else value


def _as_int_or_float(value: object) -> Any:
    assert isinstance(value, Decimal)  # noqa: S101  _parse_json() makes no other types
    return int(value) if value == value.to_integral_value() else float(value)


def _version_numbers(version: str) -> tuple[int, ...]:
    numbers = [int(digits) for digits in re.findall(r"\d+", version)]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
