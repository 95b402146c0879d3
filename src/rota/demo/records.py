"""The demo's records: executions from the journal, facts collected by the story, and results of the checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rota.db.pool import Connection
    from rota.demo.fleet import Daemon, Life


@dataclass(slots=True)
class Execution:
    """One call of a handler, from the journal. All instants are seconds on the machine's clock."""

    job_id: int
    handler: str
    fence_token: int
    life: str
    began_at: float
    ended_at: float | None
    """None while the handler runs."""
    how: str
    claimed_at: float = 0.0
    lease_ended_at: float = 0.0
    """When the lease of this claim expired, or would have expired if the job had not been settled before."""

    def overlaps(self, later: Execution) -> bool:
        """Whether this execution still ran when a later one began."""
        return self.ended_at is None or self.ended_at > later.began_at

    def as_json(self) -> dict[str, Any]:
        """Return the execution as it appears in the JSON report."""
        return {
            "daemon": self.life,
            "fence_token": self.fence_token,
            "began_at": round(self.began_at, 3),
            "ended_at": None if self.ended_at is None else round(self.ended_at, 3),
            "how": self.how,
        }


@dataclass(frozen=True, slots=True)
class HeldClaim:
    """A claim that a daemon held when it was killed or paused."""

    job_id: int
    handler: str
    fence_token: int

    def __str__(self) -> str:
        return f"{self.handler} {self.job_id}"


@dataclass(slots=True)
class Facts:
    """The observations of the story. The checks compare them with the database."""

    killed_daemon: str = ""
    killed_at: float = 0.0
    held_by_killed: Sequence[HeldClaim] = ()
    paused_daemon: str = ""
    paused_at: float = 0.0
    resumed_at: float = 0.0
    held_by_paused: Sequence[HeldClaim] = ()
    taken_over: dict[int, tuple[float, str, int]] = field(default_factory=dict)
    """job_id -> (time of the next claim, name of the daemon's process, fence token)"""
    refusals: Sequence[dict[str, Any]] = ()
    """Log events of the resumed daemon about writes with a stale token and lost leases."""
    stale_writes: float = 0.0
    poison_job_id: int = 0
    poison_deaths: list[tuple[float, str]] = field(default_factory=list)
    poison_losses: int = 0
    neighbour_job_ids: Sequence[int] = ()
    """Jobs that ran beside the poison job."""
    dead_letters: Sequence[dict[str, Any]] = ()
    redriven_job_ids: Sequence[int] = ()
    discarded_job_ids: Sequence[int] = ()
    running_at_stop: Sequence[int] = ()
    """Jobs that ran when SIGTERM was sent."""
    stop_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Check:
    """A promise of rota, whether it held, the figures, and their source."""

    promise: str
    passed: bool
    fact: str
    proof: str

    def as_json(self) -> dict[str, Any]:
        """Return the check as it appears in the JSON report."""
        return {"promise": self.promise, "held": self.passed, "fact": self.fact, "proof": self.proof}


def executions_from(journal: Iterable[Mapping[str, Any]], daemons: Sequence[Daemon]) -> list[Execution]:
    """Combine the journal's lines into executions. A handler without an end line ended with its process."""
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
        elif line["fence_token"] in found:
            execution = found[line["fence_token"]]
            execution.ended_at, execution.how = line["at"], line["how"]
    return sorted(found.values(), key=lambda each: each.fence_token)


def _life_of(pid: int, at: float, lives: Iterable[Life]) -> Life | None:
    matching = [life for life in lives if life.pid == pid and life.started_at <= at]
    return matching[-1] if matching else None


async def with_leases(db: Connection, executions: Sequence[Execution]) -> Sequence[Execution]:
    """Add the time of each claim and the end of its lease, as the trigger has recorded them."""
    claims = {
        row["fence_token"]: row
        for row in await db.fetch(
            "select fence_token, extract(epoch from min(seen_at))::float8 as claimed_at,"
            " extract(epoch from max(ends_at))::float8 as ends_at from demo.leases group by fence_token"
        )
    }
    for execution in executions:
        if (row := claims.get(execution.fence_token)) is not None:
            execution.claimed_at, execution.lease_ended_at = row["claimed_at"], row["ends_at"]
    return executions
