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
        await _ended_once(db),
        await _entries_count_once(db),
        await _letters_count_once(db, evidence),
        _never_two_under_a_lease(evidence),
        _ran_again_in_time(evidence),
        await _zombie_refused(db, evidence),
        await _at_most_once(db, evidence),
        await _poison_is_dead(db, evidence),
        await _difficult_ones(db, evidence),
        await _redriven(db, evidence),
        await _stopped_gracefully(db, evidence),
        await _nothing_left(db),
    ]


async def _ended_once(db: Connection) -> Check:
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
        "rows of demo.inserted with one row in rota.job_runs or rota.dead_letters together",
    )


_OUTCOMES = "select outcome, count(*) as jobs from rota.job_runs group by outcome order by 2 desc"


async def _entries_count_once(db: Connection) -> Check:
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


async def _letters_count_once(db: Connection, evidence: Evidence) -> Check:
    keys: defaultdict[str, set[int]] = defaultdict(set)
    for letter in evidence.letters:
        keys[letter["key"]].add(letter["job_id"])
    counted = {job_id for jobs in keys.values() for job_id in jobs}
    wanted = {
        row["job_id"]
        for row in await db.fetch(
            "select job_id from rota.job_runs where outcome = 'succeeded' and handler not in ('transfer', 'import', 'thumbnail')"
        )
    }
    again = len(evidence.letters) - len(keys)
    return Check(
        "An effect outside counts once, by its idempotency key",
        counted == wanted and len(keys) == len(wanted),
        f"{len(evidence.letters)} deliveries, {len(keys)} keys, {len(wanted)} jobs: {again or 'none'} came twice, with "
        "the same key",
        "the mailbox file, against the jobs that rota.job_runs calls succeeded",
    )


def _never_two_under_a_lease(evidence: Evidence) -> Check:
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
    bad = [(earlier, later) for earlier, later in overlaps if later.claimed_at < earlier.lease_ended_at]
    gaps = [later.claimed_at - earlier.lease_ended_at for earlier, later in overlaps]
    summary = (
        f"{plural(len(overlaps), 'overlap')}, all of zombies, the new claim {min(gaps):.2f} s or more after the old lease "
        "had expired"
        if overlaps and not bad
        else f"{plural(len(bad), 'overlap')} under a living lease: jobs {listed([earlier.job_id for earlier, _ in bad])}"
        if bad
        else "no overlap at all"
    )
    return Check(
        "Attempts of a job overlap only where the earlier lease had expired",
        not bad,
        f"{len(evidence.executions)} executions: {summary}",
        "the handlers' journal, against a trigger's record of every lease in demo.leases",
    )


def _ran_again_in_time(evidence: Evidence) -> Check:
    facts = evidence.facts
    lost = [held for held in facts.held_by_killed if held.handler != "charge"]
    delays = [facts.taken_over[held.job_id][0] - facts.killed_at for held in lost if held.job_id in facts.taken_over]
    bound = LEASE + REAP_INTERVAL
    return Check(
        "A killed daemon's jobs run again within lease + reap interval",
        len(delays) == len(lost) > 0 and max(delays) <= bound + MARGIN,
        f"{plural(len(delays), 'job')} of {facts.killed_daemon}: after {', '.join(f'{s:.2f}' for s in sorted(delays))} s "
        f"(promised {bound:g} s, {MARGIN:g} s more allowed here for a busy machine)",
        "demo.leases: claims with a larger token, against the moment of the kill -9",
    )


async def _zombie_refused(db: Connection, evidence: Evidence) -> Check:
    facts = evidence.facts
    refused = {event["job_id"] for event in facts.refusals if event["event"] == "write.refused"}
    stale = [held.fence_token for held in facts.held_by_paused]
    written = await db.fetchval(
        """select (select count(*) from demo.entries where fence_token = any($1))
                + (select count(*) from rota.job_runs where fence_token = any($1))""",
        stale,
    )
    later = await db.fetchval(
        "select count(*) from rota.job_runs where job_id = any($1) and fence_token > all($2) and outcome = 'succeeded'",
        [held.job_id for held in facts.held_by_paused],
        stale,
    )
    writes = sum(event["event"] == "write.refused" for event in facts.refusals)
    lost = sum(event["event"] == "lease.lost" for event in facts.refusals)
    return Check(
        "A zombie's late writes are refused",
        bool(refused) and written == 0 and later == len(stale) > 0 and facts.stale_writes == writes,
        f"{facts.paused_daemon} held {plural(len(stale), 'token')}: {writes} write.refused, {lost} lease.lost, {written} rows with "
        f"a stale token; {later} of {len(stale)} jobs settled with a larger one",
        f"{facts.paused_daemon}'s log and /metrics, demo.entries, rota.job_runs",
    )


async def _at_most_once(db: Connection, evidence: Evidence) -> Check:
    jobs = [row["job_id"] for row in await db.fetch("select job_id from demo.inserted where handler = 'charge'")]
    begun = sum(len(evidence.of(job_id)) for job_id in jobs)
    reasons = [row["reason"] for row in evidence.facts.dead_letters if row["handler"] == "charge"]
    return Check(
        "A job that runs at most once began once",
        len(jobs) == begun == 1 and reasons == ["lost"] and list(evidence.facts.discarded_job_ids) == jobs,
        f"{plural(begun, 'beginning')} for {plural(len(jobs), 'job')}; then a dead letter ({listed(reasons)}), which "
        "redrive_many() left alone",
        "the handlers' journal, rota.dead_letters",
    )


async def _poison_is_dead(db: Connection, evidence: Evidence) -> Check:
    facts = evidence.facts
    reasons = [row["reason"] for row in facts.dead_letters if row["job_id"] == facts.poison_job_id]
    succeeded = await db.fetchval(
        "select count(*) from rota.job_runs where job_id = any($1) and outcome = 'succeeded'", facts.neighbour_job_ids
    )
    return Check(
        "A job that kills its daemons becomes a dead letter, and its neighbours succeed",
        reasons == ["poison"] and facts.poison_losses == 3 and len(facts.poison_deaths) in {3, 4} and succeeded == 12,
        f"dead at loss {facts.poison_losses}, having killed {listed([life for _, life in facts.poison_deaths])}; "
        f"{succeeded} of {len(facts.neighbour_job_ids)} neighbours succeeded",
        "rota.dead_letters, rota.job_runs, the exit codes of the processes",
    )


async def _difficult_ones(db: Connection, evidence: Evidence) -> Check:
    rows = {
        row["handler"]: row
        for row in await db.fetch(
            "select handler, min(job_id) as job_id, count(*) as jobs, min(attempts) as attempts, min(outcome) as outcome"
            " from rota.job_runs where handler in ('webhook', 'embargo', 'newsletter', 'digest') group by handler"
        )
    }
    calls = Counter(each.handler for each in evidence.executions)
    found = {h: (row["jobs"], row["attempts"], row["outcome"], calls[h]) for h, row in rows.items()}
    wanted = {
        "webhook": (1, 3, "succeeded", 3),
        "embargo": (1, 1, "succeeded", 2),
        "newsletter": (1, 0, "cancelled", 0),
        "digest": (1, 1, "succeeded", 1),
    }
    expected = "webhook took 3 attempts, embargo was called twice and used 1, newsletter never began, digest is one job"
    return Check(
        "Retry, snooze, cancel and unique_key do what they say",
        found == wanted,
        expected if found == wanted else f"(jobs, attempts, outcome, calls): {found}, not {wanted}",
        "rota.job_runs: attempts and outcome, against the handlers' journal",
    )


async def _redriven(db: Connection, evidence: Evidence) -> Check:
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


async def _stopped_gracefully(db: Connection, evidence: Evidence) -> Check:
    facts = evidence.facts
    codes = [daemon.life.exit_code for daemon in evidence.daemons]
    rows = await db.fetch(
        "select attempts, outcome from rota.job_runs where job_id = any($1)", list(facts.running_at_stop)
    )
    whole = sum(row["outcome"] == "succeeded" and row["attempts"] == 1 for row in rows)
    return Check(
        "A graceful stop loses nothing",
        set(codes) == {0} and whole == len(facts.running_at_stop) > 0,
        f"{whole} of {len(facts.running_at_stop)} running jobs finished at their first attempt; exit codes {listed(codes)}",
        "rota.job_runs: attempts and outcome, the exit codes of the processes",
    )


async def _nothing_left(db: Connection) -> Check:
    row = await db.fetchrow(
        "select (select count(*) from rota.jobs) as jobs, (select count(*) from rota.dead_letters) as dead,"
        " (select count(*) from rota.cancel_requests) as requests"
    )
    assert row is not None  # noqa: S101
    return Check(
        "Nothing is left running or waiting",
        not any(row.values()),
        f"{row['jobs']} rows in rota.jobs, {row['dead']} dead letters, {row['requests']} cancel requests",
        "select count(*) from rota.jobs, rota.dead_letters, rota.cancel_requests",
    )
