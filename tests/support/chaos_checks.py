"""The evidence of a run of chaos.py, and the invariants that must hold after any faults."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TRANSITIONS = """
create table public.transitions (
    job_id bigint, fence_token bigint, kind text, handler text, unique_key text, delivery text,
    lease_expires_at timestamptz, at timestamptz
);
create function note_transition() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into public.transitions
        values (new.job_id, null, 'born', new.handler, new.unique_key, new.delivery, null, clock_timestamp());
    elsif tg_op = 'DELETE' then
        insert into public.transitions
        values (old.job_id, case old.state when 'running' then old.fence_token end, 'ended', old.handler, old.unique_key,
                old.delivery, old.lease_expires_at, clock_timestamp());
    elsif new.state = 'running' then
        insert into public.transitions
        values (new.job_id, new.fence_token, 'claimed', new.handler, new.unique_key, new.delivery,
                new.lease_expires_at, clock_timestamp());
    else
        insert into public.transitions
        values (old.job_id, old.fence_token, 'left', old.handler, old.unique_key, old.delivery,
                old.lease_expires_at, clock_timestamp());
    end if;
    return null;
end $$;
create trigger note_all after insert or delete on rota.jobs for each row execute function note_transition();
create trigger note_state after update on rota.jobs for each row when (old.state <> new.state)
execute function note_transition();
"""
"""Triggers that record each insert, claim, settlement and delete of a job in the same transaction."""


class Execution(NamedTuple):
    """A handler call as the witness recorded it, in seconds since 1970.

    `stopped` is None if its end was not recorded.
    """

    job_id: int
    fence_token: int
    handler: str
    pid: int
    started: float
    stopped: float | None


class Transition(NamedTuple):
    """A change of a job's row: born (inserted), claimed, left (no longer running), ended (deleted)."""

    job_id: int
    fence_token: int | None
    kind: str
    handler: str
    unique_key: str | None
    lease_expires: float | None
    at: float


class End(NamedTuple):
    """A row of the ledger or of the dead letters."""

    job_id: int
    outcome: str
    fence_token: int | None


T = TypeVar("T", Execution, Transition)


class Disturbance(NamedTuple):
    """A period in which no recovery can be expected."""

    begins: float
    ends: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything recorded during a run."""

    acknowledged: Sequence[int]
    """Ids of jobs whose INSERT was acknowledged."""
    transitions: Sequence[Transition]
    executions: Sequence[Execution]
    ends: Sequence[End]
    left_over: Sequence[str]
    """Rows left in rota.jobs, as text."""
    effects: Sequence[tuple[int, int]]
    """(job_id, step) of each row written in job.transaction()."""
    process_ends: Mapping[int, float]
    """pid -> time of its end."""
    killed: Sequence[tuple[int, float]]
    """(pid, time) of each SIGKILL of a daemon."""
    halted: frozenset[int]
    """Processes that were stopped with SIGSTOP for a while."""
    disturbances: Sequence[Disturbance] = field(default_factory=list)
    reaped_within: float
    """Seconds allowed between the end of a lease and its reaping."""


def find_violations(evidence: Evidence) -> Iterator[str]:
    """Yield every violation of an invariant."""
    for check in (
        every_job_ends_once,
        effects_are_exactly_once,
        executions_overlap_only_after_the_lease,
        nothing_is_settled_twice,
        at_most_once_jobs_start_once,
        tokens_increase,
        unique_keys_are_unique,
        jobs_of_killed_daemons_are_reaped_in_time,
    ):
        for count, violation in enumerate(check(evidence)):
            if count == 5:
                yield f"{check.__name__}: … and more"
                break
            yield f"{check.__name__}: {violation}"


def every_job_ends_once(evidence: Evidence) -> Iterator[str]:
    """Every job is in the ledger or among the dead letters exactly once, and none is left over."""
    born = {step.job_id for step in evidence.transitions if step.kind == "born"}
    for job_id in sorted(set(evidence.acknowledged) - born):
        yield f"job {job_id} was acknowledged and has disappeared"
    ends = Counter(end.job_id for end in evidence.ends)
    for job_id in sorted(born):
        if ends[job_id] != 1:
            yield f"job {job_id} has ended {ends[job_id]} times: {_history(evidence, job_id)}"
    for row in evidence.left_over:
        yield f"left over: {row}"


def effects_are_exactly_once(evidence: Evidence) -> Iterator[str]:
    """A write in job.transaction() exists once if the job succeeded, and never twice."""
    written = Counter(evidence.effects)
    for (job_id, step), count in written.items():
        if count > 1:
            yield f"effect {step} of job {job_id} is there {count} times: {_history(evidence, job_id)}"
    succeeded = {end.job_id for end in evidence.ends if end.outcome == "succeeded"}
    handlers = {step.job_id: step.handler for step in evidence.transitions}
    for job_id, handler in handlers.items():
        if handler == "transactional" and written[job_id, 0] != (job_id in succeeded):
            yield f"job {job_id}: {written[job_id, 0]} effects, succeeded: {job_id in succeeded}: {_history(evidence, job_id)}"
        if handler == "steps" and job_id in succeeded:
            missing = [step for step in range(3) if not written[job_id, step]]
            if missing:
                yield f"job {job_id} succeeded without its steps {missing}: {_history(evidence, job_id)}"


def executions_overlap_only_after_the_lease(evidence: Evidence) -> Iterator[str]:
    """A second execution begins only after the first has ended or its lease has expired.

    If the first process was never stopped and the handler is not a thread, the first execution must have ended.
    """
    leases = {
        (step.job_id, step.fence_token): step.lease_expires
        for step in evidence.transitions
        if step.kind in {"left", "ended"} and step.fence_token is not None
    }
    for job_id, executions in _by_job(evidence.executions).items():
        for first, second in pairwise(sorted(executions, key=lambda e: e.fence_token)):
            first_ended_at = min(first.stopped or float("inf"), evidence.process_ends.get(first.pid, float("inf")))
            if first_ended_at <= second.started:
                continue
            lease = leases.get((job_id, first.fence_token))
            if lease is None or lease > second.started:
                yield f"job {job_id} ran twice at once, under a valid lease ({lease}): {_history(evidence, job_id)}"
            elif first.pid not in evidence.halted and first.handler != "thread":
                yield f"job {job_id} ran twice at once, although the first could be interrupted: {_history(evidence, job_id)}"


def nothing_is_settled_twice(evidence: Evidence) -> Iterator[str]:
    """Each claim is settled at most once, and a succeeded job has the token of its last claim."""
    settled = Counter(
        (step.job_id, step.fence_token)
        for step in evidence.transitions
        if step.kind in {"left", "ended"} and step.fence_token is not None
    )
    for (job_id, token), count in settled.items():
        if count > 1:
            yield f"job {job_id}, token {token}: settled {count} times: {_history(evidence, job_id)}"
    last: dict[int, int] = {}
    for step in evidence.transitions:
        if step.kind == "claimed" and step.fence_token is not None:
            last[step.job_id] = max(last.get(step.job_id, 0), step.fence_token)
    for end in evidence.ends:
        if end.outcome == "succeeded" and end.fence_token != last.get(end.job_id):
            yield f"job {end.job_id} succeeded by token {end.fence_token}, not its last: {_history(evidence, end.job_id)}"


def at_most_once_jobs_start_once(evidence: Evidence) -> Iterator[str]:
    """A job with delivery = 'at_most_once' starts at most once."""
    for job_id, executions in _by_job(evidence.executions).items():
        if executions[0].handler == "once" and len(executions) > 1:
            yield f"job {job_id} began {len(executions)} times: {_history(evidence, job_id)}"


def tokens_increase(evidence: Evidence) -> Iterator[str]:
    """No token is issued twice, and a later claim of a job has a larger token."""
    claims = [step for step in evidence.transitions if step.kind == "claimed"]
    for token, count in Counter(step.fence_token for step in claims).items():
        if count > 1:
            yield f"token {token} was issued {count} times"
    for job_id, steps in _by_job(claims).items():
        for first, second in pairwise(sorted(steps, key=lambda step: step.at)):
            if (first.fence_token or 0) >= (second.fence_token or 0):
                yield f"job {job_id}: token {second.fence_token} after {first.fence_token}"


def unique_keys_are_unique(evidence: Evidence) -> Iterator[str]:
    """At most one live job has a given unique_key."""
    lives: dict[str, int] = {}
    for step in sorted(evidence.transitions, key=lambda step: step.at):
        if step.unique_key is None:
            continue
        if step.kind == "born":
            if step.unique_key in lives:
                yield f"jobs {lives[step.unique_key]} and {step.job_id} live with the key {step.unique_key}"
            lives[step.unique_key] = step.job_id
        elif step.kind == "ended":
            lives.pop(step.unique_key, None)


def jobs_of_killed_daemons_are_reaped_in_time(evidence: Evidence) -> Iterator[str]:
    """A job of a killed daemon is reaped soon after its lease has expired."""
    settled = {
        (step.job_id, step.fence_token): step
        for step in evidence.transitions
        if step.kind in {"left", "ended"} and step.fence_token is not None
    }
    for pid, killed_at in evidence.killed:
        for execution in evidence.executions:
            if execution.pid != pid or execution.stopped is not None or execution.started > killed_at:
                continue
            step = settled.get((execution.job_id, execution.fence_token))
            if step is None or step.lease_expires is None:
                yield f"job {execution.job_id} of the killed {pid} was never taken back"
                continue
            late = step.at - step.lease_expires
            allowed = evidence.reaped_within + sum(
                max(0.0, min(step.at, stretch.ends) - max(killed_at, stretch.begins))
                for stretch in evidence.disturbances
            )
            if late > allowed:
                yield (
                    f"job {execution.job_id} of the killed {pid} was taken back {late:.1f} s after its lease, "
                    f"allowed were {allowed:.1f}: {_history(evidence, execution.job_id)}"
                )


def _by_job(rows: Iterable[T]) -> Mapping[int, list[T]]:
    found: defaultdict[int, list[T]] = defaultdict(list)
    for row in rows:
        found[row.job_id].append(row)
    return found


def _history(evidence: Evidence, job_id: int) -> str:
    """Return everything recorded about one job, in order."""
    events = [
        (step.at, f"{step.kind} {step.fence_token or ''} lease {step.lease_expires}")
        for step in evidence.transitions
        if step.job_id == job_id
    ]
    for execution in evidence.executions:
        if execution.job_id == job_id:
            events.append((execution.started, f"started in {execution.pid} {execution.fence_token}"))
            events.append((execution.stopped or float("inf"), f"stopped in {execution.pid} {execution.fence_token}"))
    ends = [f"{end.outcome} {end.fence_token}" for end in evidence.ends if end.job_id == job_id]
    return "; ".join([f"{at:.3f} {what}" for at, what in sorted(events)] + ends)
