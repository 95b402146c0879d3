"""What the demo's parts hand each other: what the witnesses have written down, what is known in the end, what was checked."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rota.db.pool import Connection
    from rota.demo.fleet import Daemon, Life


@dataclass(slots=True)
class Execution:
    """One time that a handler was called, as it has noted itself. All instants are seconds on the machine's clock."""

    job_id: int
    handler: str
    fence_token: int
    life: str
    began_at: float
    ended_at: float | None
    """None: still at work."""
    how: str
    claimed_at: float = 0.0
    lease_ended_at: float = 0.0
    """When the lease of this claim ran out, or would have, had it not been given back before."""

    def overlaps(self, later: Execution) -> bool:
        """Whether this one was still at work when a later one began."""
        return self.ended_at is None or self.ended_at > later.began_at

    def facts(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {
            "daemon": self.life,
            "fence_token": self.fence_token,
            "began_at": round(self.began_at, 3),
            "ended_at": None if self.ended_at is None else round(self.ended_at, 3),
            "how": self.how,
        }


@dataclass(frozen=True, slots=True)
class Held:
    """A claim that a daemon held at some moment."""

    job_id: int
    handler: str
    fence_token: int

    def __str__(self) -> str:
        return f"{self.handler} {self.job_id}"


@dataclass(slots=True)
class Facts:
    """What is known in the end, and the checks are made of."""

    killed: str = ""
    killed_at: float = 0.0
    held_by_killed: Sequence[Held] = ()
    paused: str = ""
    paused_at: float = 0.0
    resumed_at: float = 0.0
    held_by_paused: Sequence[Held] = ()
    taken_over: dict[int, tuple[float, str, int]] = field(default_factory=dict)
    """job_id -> when it was claimed again, by which life, with which token."""
    refused: Sequence[dict[str, Any]] = ()
    """What the zombie's log says of its late writes."""
    stale_writes: float = 0.0
    poison: int = 0
    poison_deaths: list[tuple[float, str]] = field(default_factory=list)
    poison_losses: int = 0
    neighbours: Sequence[int] = ()
    dead_letters: Sequence[dict[str, Any]] = ()
    redriven: Sequence[int] = ()
    left_out: Sequence[int] = ()
    in_flight: Sequence[int] = ()
    stopped_in: float = 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """One promise: whether it held, the figures, and where they come from."""

    promise: str
    held: bool
    fact: str
    proof: str


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Read the objects in a file of JSON lines, as far as it is there; what else stands between them is left out."""
    found = []
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


def executions(journal: Iterable[Mapping[str, Any]], daemons: Sequence[Daemon]) -> list[Execution]:
    """Put beginnings and ends together. Where a process has died, its handlers ended with it."""
    lives = [life for daemon in daemons for life in daemon.lives]
    found: dict[int, Execution] = {}
    for line in journal:
        if line["what"] == "began":
            life = _life_of(line["pid"], line["at"], lives)
            execution = Execution(
                line["job_id"],
                line["handler"],
                line["fence_token"],
                life.name if life else f"pid {line['pid']}",
                line["at"],
                life.ended_at if life else None,
                "killed" if life and life.ended_at else "at work",
            )
            found[execution.fence_token] = execution
        elif (begun := found.get(line["fence_token"])) is not None:
            begun.ended_at, begun.how = line["at"], line["how"]
    return sorted(found.values(), key=lambda each: each.fence_token)


def _life_of(pid: int, at: float, lives: Iterable[Life]) -> Life | None:
    of_pid = [life for life in lives if life.pid == pid and life.started_at <= at]
    return of_pid[-1] if of_pid else None


async def with_leases(db: Connection, found: Sequence[Execution]) -> Sequence[Execution]:
    """Add what the trigger saw of each claim: when it was made, and until when its lease was last extended."""
    seen = {
        row["fence_token"]: row
        for row in await db.fetch(
            "select fence_token, extract(epoch from min(seen_at))::float8 as claimed_at,"
            " extract(epoch from max(ends_at))::float8 as ends_at from demo.leases group by fence_token"
        )
    }
    for execution in found:
        if (row := seen.get(execution.fence_token)) is not None:
            execution.claimed_at, execution.lease_ended_at = row["claimed_at"], row["ends_at"]
    return found
