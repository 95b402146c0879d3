"""What must hold after any faults: the evidence of a run of tests/chaos.py, and the laws it is held against."""

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
"""What writes down, in the transaction that does it, how jobs come, are claimed, and leave."""


class Execution(NamedTuple):
    """A handler at work, as the witness saw it; instants in seconds since 1970. `stopped` is None if it never said so."""

    job_id: int
    fence_token: int
    handler: str
    pid: int
    started: float
    stopped: float | None


class Transition(NamedTuple):
    """A change of a job's row: born, claimed, left (running no more), ended (row deleted)."""

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
    """A stretch in which nobody could be expected to recover anything."""

    begins: float
    ends: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known after a run."""

    acknowledged: Sequence[int]
    """Jobs whose INSERT was answered."""
    transitions: Sequence[Transition]
    executions: Sequence[Execution]
    ends: Sequence[End]
    left_over: Sequence[str]
    """Rows that still stand in rota.jobs, as text."""
    effects: Sequence[tuple[int, int]]
    """(job_id, step) of each row written in job.transaction()."""
    process_ends: Mapping[int, float]
    """pid -> when it had ended."""
    killed: Sequence[tuple[int, float]]
    """(pid, instant) of each SIGKILL of a daemon."""
    halted: frozenset[int]
    """Processes that were held still for a while."""
    disturbances: Sequence[Disturbance] = field(default_factory=list)
    reaped_within: float
    """Seconds from the end of a lease to its being taken back."""


def violations(seen: Evidence) -> Iterator[str]:
    """Say what should not have happened; nothing, if all is well."""
    for check in (
        every_job_ends_once,
        effects_are_exactly_once,
        executions_overlap_only_after_the_lease,
        nothing_is_settled_twice,
        at_most_once_is_that,
        tokens_grow,
        unique_keys_are_unique,
        the_dead_are_taken_over_in_time,
    ):
        for count, violation in enumerate(check(seen)):
            if count == 5:
                yield f"{check.__name__}: … and more"
                break
            yield f"{check.__name__}: {violation}"


def every_job_ends_once(seen: Evidence) -> Iterator[str]:
    """Every job stands in the ledger or among the dead letters, once, and none is left or unheard of."""
    born = {step.job_id for step in seen.transitions if step.kind == "born"}
    for job_id in sorted(set(seen.acknowledged) - born):
        yield f"job {job_id} was acknowledged and is gone"
    ends = Counter(end.job_id for end in seen.ends)
    for job_id in sorted(born):
        if ends[job_id] != 1:
            yield f"job {job_id} has ended {ends[job_id]} times: {_story(seen, job_id)}"
    for row in seen.left_over:
        yield f"still there: {row}"


def effects_are_exactly_once(seen: Evidence) -> Iterator[str]:
    """What a handler wrote in job.transaction() is there once where the job succeeded, and never twice."""
    written = Counter(seen.effects)
    for (job_id, step), count in written.items():
        if count > 1:
            yield f"effect {step} of job {job_id} is there {count} times: {_story(seen, job_id)}"
    succeeded = {end.job_id for end in seen.ends if end.outcome == "succeeded"}
    handlers = {step.job_id: step.handler for step in seen.transitions}
    for job_id, handler in handlers.items():
        if handler == "transactional" and written[job_id, 0] != (job_id in succeeded):
            yield f"job {job_id}: {written[job_id, 0]} effects, succeeded: {job_id in succeeded}: {_story(seen, job_id)}"
        if handler == "steps" and job_id in succeeded:
            missing = [step for step in range(3) if not written[job_id, step]]
            if missing:
                yield f"job {job_id} succeeded without its steps {missing}: {_story(seen, job_id)}"


def executions_overlap_only_after_the_lease(seen: Evidence) -> Iterator[str]:
    """A second execution of a job begins when the first has ended or its lease has expired, never else.

    Where neither a stop of the process nor a thread kept the first from it, it has even ended before the second begins.
    """
    leases = {
        (step.job_id, step.fence_token): step.lease_expires
        for step in seen.transitions
        if step.kind in {"left", "ended"} and step.fence_token is not None
    }
    for job_id, executions in _by_job(seen.executions).items():
        for first, second in pairwise(sorted(executions, key=lambda e: e.fence_token)):
            over = min(first.stopped or float("inf"), seen.process_ends.get(first.pid, float("inf")))
            if over <= second.started:
                continue
            lease = leases.get((job_id, first.fence_token))
            if lease is None or lease > second.started:
                yield f"job {job_id} ran twice at once, under a living lease ({lease}): {_story(seen, job_id)}"
            elif first.pid not in seen.halted and first.handler != "thread":
                yield f"job {job_id} ran twice at once, though the first could have been told: {_story(seen, job_id)}"


def nothing_is_settled_twice(seen: Evidence) -> Iterator[str]:
    """Each claim is settled at most once, and what ended in success ended by its last claim."""
    settled = Counter(
        (step.job_id, step.fence_token)
        for step in seen.transitions
        if step.kind in {"left", "ended"} and step.fence_token is not None
    )
    for (job_id, token), count in settled.items():
        if count > 1:
            yield f"job {job_id}, token {token}: settled {count} times: {_story(seen, job_id)}"
    last: dict[int, int] = {}
    for step in seen.transitions:
        if step.kind == "claimed" and step.fence_token is not None:
            last[step.job_id] = max(last.get(step.job_id, 0), step.fence_token)
    for end in seen.ends:
        if end.outcome == "succeeded" and end.fence_token != last.get(end.job_id):
            yield f"job {end.job_id} succeeded by token {end.fence_token}, not its last: {_story(seen, end.job_id)}"


def at_most_once_is_that(seen: Evidence) -> Iterator[str]:
    """A job with delivery = 'at_most_once' begins at most once."""
    for job_id, executions in _by_job(seen.executions).items():
        if executions[0].handler == "once" and len(executions) > 1:
            yield f"job {job_id} began {len(executions)} times: {_story(seen, job_id)}"


def tokens_grow(seen: Evidence) -> Iterator[str]:
    """No token is given twice, and a later claim of a job has the larger one."""
    claims = [step for step in seen.transitions if step.kind == "claimed"]
    for token, count in Counter(step.fence_token for step in claims).items():
        if count > 1:
            yield f"token {token} was issued {count} times"
    for job_id, steps in _by_job(claims).items():
        for first, second in pairwise(sorted(steps, key=lambda step: step.at)):
            if (first.fence_token or 0) >= (second.fence_token or 0):
                yield f"job {job_id}: token {second.fence_token} after {first.fence_token}"


def unique_keys_are_unique(seen: Evidence) -> Iterator[str]:
    """Of the jobs of one unique_key at most one lives."""
    lives: dict[str, int] = {}
    for step in sorted(seen.transitions, key=lambda step: step.at):
        if step.unique_key is None:
            continue
        if step.kind == "born":
            if step.unique_key in lives:
                yield f"jobs {lives[step.unique_key]} and {step.job_id} live with the key {step.unique_key}"
            lives[step.unique_key] = step.job_id
        elif step.kind == "ended":
            lives.pop(step.unique_key, None)


def the_dead_are_taken_over_in_time(seen: Evidence) -> Iterator[str]:
    """What a killed daemon was running is taken from it when its lease has expired, and by then a sweep has come by."""
    settled = {
        (step.job_id, step.fence_token): step
        for step in seen.transitions
        if step.kind in {"left", "ended"} and step.fence_token is not None
    }
    for pid, killed_at in seen.killed:
        for execution in seen.executions:
            if execution.pid != pid or execution.stopped is not None or execution.started > killed_at:
                continue
            step = settled.get((execution.job_id, execution.fence_token))
            if step is None or step.lease_expires is None:
                yield f"job {execution.job_id} of the killed {pid} was never taken back"
                continue
            late = step.at - step.lease_expires
            allowed = seen.reaped_within + sum(
                max(0.0, min(step.at, stretch.ends) - max(killed_at, stretch.begins)) for stretch in seen.disturbances
            )
            if late > allowed:
                yield (
                    f"job {execution.job_id} of the killed {pid} was taken back {late:.1f} s after its lease, "
                    f"allowed were {allowed:.1f}: {_story(seen, execution.job_id)}"
                )


def _by_job(rows: Iterable[T]) -> Mapping[int, list[T]]:
    found: defaultdict[int, list[T]] = defaultdict(list)
    for row in rows:
        found[row.job_id].append(row)
    return found


def _story(seen: Evidence, job_id: int) -> str:
    """All that is known of one job, in order."""
    told = [
        (step.at, f"{step.kind} {step.fence_token or ''} lease {step.lease_expires}")
        for step in seen.transitions
        if step.job_id == job_id
    ]
    for execution in seen.executions:
        if execution.job_id == job_id:
            told.append((execution.started, f"started in {execution.pid} {execution.fence_token}"))
            told.append((execution.stopped or float("inf"), f"stopped in {execution.pid} {execution.fence_token}"))
    ends = [f"{end.outcome} {end.fence_token}" for end in seen.ends if end.job_id == job_id]
    return "; ".join([f"{at:.3f} {what}" for at, what in sorted(told)] + ends)
