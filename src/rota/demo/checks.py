"""Check each promise against the journal, the trigger's records and rota's own tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rota.demo.fleet import LEASE, REAP_INTERVAL
from rota.demo.records import Check
from rota.demo.screen import listed, plural

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from rota.db.pool import Connection
    from rota.demo.fleet import Daemon
    from rota.demo.records import Execution, Facts

MARGIN = 4.0
"""Seconds allowed in addition to lease and reap interval, for a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The input of the checks."""

    facts: Facts
    executions: Sequence[Execution]
    letters: Sequence[Mapping[str, Any]]
    daemons: Sequence[Daemon]

    def of(self, job_id: int) -> list[Execution]:
        """Return the executions of a job."""
        return [each for each in self.executions if each.job_id == job_id]


async def check_all(db: Connection, evidence: Evidence) -> list[Check]:
    """Check every promise."""
    return [
        await _check_jobs_ended_once(db),
        await _check_entries_are_unique(db),
        await _check_letters_count_once(db, evidence),
        _check_attempts_overlap_only_without_lease(evidence),
        _check_killed_jobs_ran_again_in_time(evidence),
        await _check_zombie_writes_refused(db, evidence),
        await _check_at_most_once(db, evidence),
        await _check_poison_is_dead(db, evidence),
        await _check_retry_snooze_cancel_and_unique_key(db, evidence),
        await _check_redrive_and_discard(db, evidence),
        await _check_graceful_stop(db, evidence),
        await _check_no_job_remains(db),
    ]


async def _check_jobs_ended_once(db: Connection) -> Check:
    row = await db.fetchrow(
        """select count(*) as jobs, count(*) filter (where ends = 1) as once from (
               select (select count(*) from rota.job_runs as run where run.job_id = inserted.job_id)
                    + (select count(*) from rota.dead_letters as dead where dead.job_id = inserted.job_id) as ends
               from demo.inserted
           ) as job"""
    )
    assert row is not None  # noqa: S101  an aggregate has one row
    outcomes = {r["outcome"]: r["jobs"] for r in await db.fetch(_OUTCOMES)}
    return Check(
        "Every job has ended exactly once",
        row["jobs"] == row["once"] > 0,
        f"{row['once']} of {row['jobs']} inserted: {', '.join(f'{n} {outcome}' for outcome, n in outcomes.items())}",
        "rows of demo.inserted that have exactly one row in rota.job_runs and rota.dead_letters together",
    )


_OUTCOMES = "select outcome, count(*) as jobs from rota.job_runs group by outcome order by 2 desc"


async def _check_entries_are_unique(db: Connection) -> Check:
    row = await db.fetchrow(
        """select count(*) as entries, count(distinct entry.job_id) as jobs,
               count(*) filter (where entry.fence_token = run.fence_token and run.outcome = 'succeeded') as settled
           from demo.entries as entry left join rota.job_runs as run using (job_id)"""
    )
    wanted = await db.fetchval(
        "select count(*) from rota.job_runs where outcome = 'succeeded' and handler in ('transfer', 'import', 'thumbnail')"
    )
    assert row is not None  # noqa: S101
    return Check(
        "An effect in job.transaction() happens exactly once",
        row["entries"] == row["jobs"] == row["settled"] == wanted > 0,
        f"{row['entries']} rows for {wanted} jobs, {row['settled']} with the token of the attempt that settled the job",
        "demo.entries, which has no unique index, join rota.job_runs using (job_id)",
    )


async def _check_letters_count_once(db: Connection, evidence: Evidence) -> Check:
    keys = {letter["key"] for letter in evidence.letters}
    delivered = {letter["job_id"] for letter in evidence.letters}
    succeeded = {
        row["job_id"]
        for row in await db.fetch(
            "select job_id from rota.job_runs where outcome = 'succeeded' and handler not in ('transfer', 'import', 'thumbnail')"
        )
    }
    repeated = len(evidence.letters) - len(keys)
    return Check(
        "An effect outside the database counts once, by its idempotency key",
        delivered == succeeded and len(keys) == len(succeeded),
        f"{len(evidence.letters)} deliveries, {len(keys)} keys, {len(succeeded)} jobs: {repeated or 'none'} were repeated, with "
        "the same key",
        "the mailbox file, compared with the succeeded jobs in rota.job_runs",
    )


def _check_attempts_overlap_only_without_lease(evidence: Evidence) -> Check:
    by_job: defaultdict[int, list[Execution]] = defaultdict(list)
    for execution in evidence.executions:
        by_job[execution.job_id].append(execution)
    overlaps = [
        (earlier, later)
        for runs in by_job.values()
        for number, earlier in enumerate(runs)
        for later in runs[number + 1 :]
        if earlier.overlaps(later)
    ]
    violations = [(earlier, later) for earlier, later in overlaps if later.claimed_at < earlier.lease_ended_at]
    gaps = [later.claimed_at - earlier.lease_ended_at for earlier, later in overlaps]
    if violations:
        job_ids = listed([earlier.job_id for earlier, _ in violations])
        summary = f"{plural(len(violations), 'overlap')} before the earlier lease expired, of jobs {job_ids}"
    elif overlaps:
        summary = f"{plural(len(overlaps), 'overlap')}, each claimed at least {min(gaps):.2f} s after the earlier lease expired"
    else:
        summary = "no overlap"
    return Check(
        "Attempts of a job overlap only after the earlier lease has expired",
        not violations,
        f"{len(evidence.executions)} executions: {summary}",
        "the handlers' journal, compared with demo.leases, where a trigger records every lease",
    )


def _check_killed_jobs_ran_again_in_time(evidence: Evidence) -> Check:
    facts = evidence.facts
    lost = [held for held in facts.held_by_killed if held.handler != "charge"]
    delays = [facts.taken_over[held.job_id][0] - facts.killed_at for held in lost if held.job_id in facts.taken_over]
    bound = LEASE + REAP_INTERVAL
    return Check(
        "A killed daemon's jobs run again within lease + reap interval",
        len(delays) == len(lost) > 0 and max(delays) <= bound + MARGIN,
        f"{plural(len(delays), 'job')} of {facts.killed_daemon}: after {', '.join(f'{s:.2f}' for s in sorted(delays))} s "
        f"(promised: {bound:g} s; the demo allows {MARGIN:g} s more on a busy machine)",
        "claims with a larger token in demo.leases, compared with the time of the kill -9",
    )


async def _check_zombie_writes_refused(db: Connection, evidence: Evidence) -> Check:
    facts = evidence.facts
    stale_tokens = [held.fence_token for held in facts.held_by_paused]
    stale_rows = await db.fetchval(
        """select (select count(*) from demo.entries where fence_token = any($1))
                + (select count(*) from rota.job_runs where fence_token = any($1))""",
        stale_tokens,
    )
    settled_again = await db.fetchval(
        "select count(*) from rota.job_runs where job_id = any($1) and fence_token > all($2) and outcome = 'succeeded'",
        [held.job_id for held in facts.held_by_paused],
        stale_tokens,
    )
    writes = sum(event["event"] == "write.refused" for event in facts.refusals)
    lost = sum(event["event"] == "lease.lost" for event in facts.refusals)
    return Check(
        "A zombie's late writes are refused",
        writes > 0 and stale_rows == 0 and settled_again == len(stale_tokens) > 0 and facts.stale_writes == writes,
        f"{facts.paused_daemon} held {plural(len(stale_tokens), 'token')}: {writes} write.refused, {lost} lease.lost, {stale_rows} "
        f"rows with a stale token; {settled_again} of {len(stale_tokens)} jobs settled with a larger one",
        f"{facts.paused_daemon}'s log and /metrics, demo.entries, rota.job_runs",
    )


async def _check_at_most_once(db: Connection, evidence: Evidence) -> Check:
    jobs = [row["job_id"] for row in await db.fetch("select job_id from demo.inserted where handler = 'charge'")]
    executions = sum(len(evidence.of(job_id)) for job_id in jobs)
    reasons = [row["reason"] for row in evidence.facts.dead_letters if row["handler"] == "charge"]
    return Check(
        "An at-most-once job began once",
        len(jobs) == executions == 1 and reasons == ["lost"] and list(evidence.facts.discarded_job_ids) == jobs,
        f"{plural(executions, 'execution')} of {plural(len(jobs), 'job')}; then a dead letter ({listed(reasons)}), which "
        "redrive_many() skipped",
        "the handlers' journal, rota.dead_letters",
    )


async def _check_poison_is_dead(db: Connection, evidence: Evidence) -> Check:
    facts = evidence.facts
    reasons = [row["reason"] for row in facts.dead_letters if row["job_id"] == facts.poison_job_id]
    succeeded = await db.fetchval(
        "select count(*) from rota.job_runs where job_id = any($1) and outcome = 'succeeded'", facts.neighbour_job_ids
    )
    return Check(
        "A job that kills its daemons becomes a dead letter, and its neighbours succeed",
        reasons == ["poison"] and facts.poison_losses == 3 and len(facts.poison_deaths) in {3, 4} and succeeded == 12,
        f"dead after {facts.poison_losses} losses, which killed {listed([life for _, life in facts.poison_deaths])}; "
        f"{succeeded} of {len(facts.neighbour_job_ids)} neighbours succeeded",
        "rota.dead_letters, rota.job_runs, the exit codes of the processes",
    )


async def _check_retry_snooze_cancel_and_unique_key(db: Connection, evidence: Evidence) -> Check:
    rows = {
        row["handler"]: row
        for row in await db.fetch(
            """select handler, count(*) as jobs, min(attempts) as attempts, min(outcome) as outcome,
                   (select count(*) from rota.attempts where job_id = min(run.job_id) and outcome = 'lost') as losses
               from rota.job_runs as run where handler in ('webhook', 'embargo', 'newsletter', 'digest') group by handler"""
        )
    }
    calls = Counter(each.handler for each in evidence.executions)
    actual = {h: (row["jobs"], row["attempts"], row["outcome"], calls[h]) for h, row in rows.items()}
    expected = {
        "webhook": (1, 3, "succeeded", 3),
        "embargo": (1, 1, "succeeded", 2),
        "newsletter": (1, 0, "cancelled", 0),
        "digest": (1, 1, "succeeded", 1),
    }
    passed = actual.keys() == expected.keys() and all(
        _agrees(actual[handler], expected[handler], losses=rows[handler]["losses"]) for handler in expected
    )
    success = "webhook took 3 attempts, embargo 2 calls but 1 attempt, newsletter never began, digest is one job"
    return Check(
        "Retry, snooze, cancel and unique_key work",
        passed,
        success
        if actual == expected
        else f"(jobs, attempts, outcome, calls): {actual}; without a lost claim {expected}",
        "attempts and outcome in rota.job_runs, compared with the handlers' journal",
    )


def _agrees(actual: tuple[int, int, str, int], expected: tuple[int, int, str, int], *, losses: int) -> bool:
    """Return whether they are equal. At-least-once: each lost claim may change the attempts and the calls by one."""
    (jobs, attempts, outcome, calls), (expected_jobs, expected_attempts, expected_outcome, expected_calls) = (
        actual,
        expected,
    )
    return (
        (jobs, outcome) == (expected_jobs, expected_outcome)
        and abs(attempts - expected_attempts) <= losses
        and abs(calls - expected_calls) <= losses
    )


async def _check_redrive_and_discard(db: Connection, evidence: Evidence) -> Check:
    facts = evidence.facts
    reasons = sorted(row["reason"] for row in facts.dead_letters)
    succeeded = await db.fetchval(
        "select count(*) from rota.job_runs where job_id = any($1) and outcome = 'succeeded'",
        list(facts.redriven_job_ids),
    )
    discarded = await db.fetchval(
        "select count(*) from rota.job_runs where job_id = any($1) and outcome = 'discarded'",
        list(facts.discarded_job_ids),
    )
    return Check(
        "Dead letters wait for a person; redrive and discard work",
        reasons == ["lost", "permanent", "poison"] and succeeded == 2 and discarded == 1,
        f"dead as {listed(reasons)}; {succeeded} redriven and succeeded, {discarded} discarded",
        "rota.dead_letters before, rota.job_runs after",
    )


async def _check_graceful_stop(db: Connection, evidence: Evidence) -> Check:
    facts = evidence.facts
    codes = [daemon.life.exit_code for daemon in evidence.daemons]
    rows = await db.fetch(
        "select attempts, outcome from rota.job_runs where job_id = any($1)", list(facts.running_at_stop)
    )
    finished = sum(row["outcome"] == "succeeded" and row["attempts"] == 1 for row in rows)
    return Check(
        "A graceful stop loses no job",
        set(codes) == {0} and finished == len(facts.running_at_stop) > 0,
        f"{finished} of {len(facts.running_at_stop)} running jobs finished at their first attempt; exit codes {listed(codes)}",
        "rota.job_runs: attempts and outcome, the exit codes of the processes",
    )


async def _check_no_job_remains(db: Connection) -> Check:
    row = await db.fetchrow(
        "select (select count(*) from rota.jobs) as jobs, (select count(*) from rota.dead_letters) as dead,"
        " (select count(*) from rota.cancel_requests) as requests"
    )
    assert row is not None  # noqa: S101
    return Check(
        "No job is running or waiting",
        not any(row.values()),
        f"{row['jobs']} rows in rota.jobs, {row['dead']} dead letters, {row['requests']} cancel requests",
        "select count(*) from rota.jobs, rota.dead_letters, rota.cancel_requests",
    )
