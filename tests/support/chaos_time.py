"""Kill daemons with skewed clocks while schedules fire, then check that each instant has exactly one fire.

Each daemon's clock is minutes ahead or behind (libfaketime). Every few seconds a daemon is killed, stopped or drained,
or all are killed at once. Afterwards each schedule must have one row of rota.fires per instant and no other rows, one
job per enqueued fire, and one end per job. The exit code is 1 if not; the output has the seed and the evidence. The
seed determines the faults, but not the exact moments at which they happen.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg

from chaos import pass_time, unexpected_output, write_line
from fake_clock import LIBFAKETIME
from processes import START_TIMEOUT_S, DaemonProcess, Daemons
from servers import durable_server, make_durable_template, memory_folder
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from asyncpg import Connection, Record


SKEW_S = 300
"""Largest skew of a daemon's clock in seconds, in both directions."""

LATEST_S = 30.0
"""Seconds within which each fire must be decided although daemons die. Much less than on_time_within, after which
it would count as missed."""

ENDED_WITHIN_S = 60.0

ENVIRON = {
    "ROTA_POLL_INTERVAL": "1s",
    "ROTA_DRAIN_TIMEOUT": "2s",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
}

# Intervals start at a whole second, so that each instant is known. The schedules differ in their overlap setting.
INSERT_SCHEDULES = """
insert into rota.schedules (name, handler, cron, every, overlap, payload, start_at)
select format('%s %s %s', kind, overlap, number), 'noop',
    case kind when 'second cron' then '* * * * * *' when 'minute cron' then '* * * * *' end,
    case kind when 'second interval' then interval '1 second' when 'minute interval' then interval '1 minute' end,
    overlap, '{}', date_trunc('second', now()) + interval '2 seconds'
from unnest(array['second cron', 'second interval', 'minute cron', 'minute interval']) as kind,
    unnest(array['allow', 'skip', 'queue_one', 'replace']) as overlap,
    generate_series(1, $1::int4) as number
returning start_at
"""

CREATE_INSERT_LOG = """
create table public.births (job_id bigint, schedule_id bigint, scheduled_for timestamptz);
create function note_birth() returns trigger language plpgsql as $$
begin
    insert into public.births values (new.job_id, new.schedule_id, new.scheduled_for);
    return null;
end $$;
create trigger note_birth after insert on rota.jobs for each row execute function note_birth()
"""

# The expected instants: whole seconds or minutes for cron, counted from start_at for intervals. An edit of a cron
# schedule writes one row for all undecided instants that were due.
EXPECTED_INSTANTS = """
select schedule.schedule_id, schedule.name, instant
from rota.schedules as schedule
cross join lateral generate_series(
    case when schedule.cron = '* * * * *' then date_trunc('minute', schedule.start_at + interval '1 minute - 1 microsecond')
        else schedule.start_at end,
    schedule.end_at - interval '1 microsecond',
    case when schedule.every = interval '1 minute' or schedule.cron = '* * * * *' then interval '1 minute'
        else interval '1 second' end
) as instant
"""
INSTANTS_WITHOUT_ONE_FIRE = f"""
select expected.name, expected.instant
from ({EXPECTED_INSTANTS}) as expected
left join rota.fires as fire on fire.schedule_id = expected.schedule_id
    and (fire.scheduled_for = expected.instant
         or expected.instant >= fire.missed_from
            and expected.instant <= case fire.disposition when 'skipped_edit' then fire.decided_at else fire.scheduled_for end)
group by expected.schedule_id, expected.name, expected.instant
having count(fire) <> 1
order by expected.instant
"""
UNEXPECTED_FIRES = f"""
select fire.name, fire.scheduled_for, fire.disposition
from rota.fires as fire
where not exists (select from ({EXPECTED_INSTANTS}) as expected
                  where expected.schedule_id = fire.schedule_id and expected.instant = fire.scheduled_for)
"""
FIRES_WITH_TWO_JOBS = """
select schedule_id, scheduled_for, count(*) from births group by 1, 2 having count(*) > 1
"""
FIRES_AND_JOBS_WITHOUT_EACH_OTHER = """
select fire.name, fire.scheduled_for, fire.job_id, birth.job_id as born
from (select * from rota.fires where disposition = 'enqueued') as fire
full join births as birth using (schedule_id, scheduled_for)
where fire.job_id is distinct from birth.job_id
"""
JOBS_WITHOUT_ONE_END = """
select birth.job_id, count(ended.job_id) as ends
from births as birth
left join (select job_id from rota.job_runs union all select job_id from rota.dead_letters) as ended using (job_id)
group by 1 having count(ended.job_id) <> 1
"""
SELECT_LATENESS = """
select fire.name, fire.scheduled_for, fire.decided_at - fire.scheduled_for as late
from rota.fires as fire
where fire.disposition not in ('enqueued', 'waiting') or fire.name like '%allow%' or fire.name like '%skip%'
order by late desc
"""
COUNT_DISPOSITIONS = "select disposition, count(*) from rota.fires group by 1 order by 2 desc"


@dataclass(slots=True)
class Fleet:
    """The running daemons, and counts of the faults."""

    daemons: Daemons
    dice: random.Random
    seats: list[DaemonProcess] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    faulty_ends: list[str] = field(default_factory=list)

    def launch(self) -> DaemonProcess:
        """Start a daemon with a skewed clock."""
        skew = self.dice.randint(-SKEW_S, SKEW_S)
        return self.daemons.launch(LD_PRELOAD=str(LIBFAKETIME or ""), FAKETIME=f"{skew:+d}s")

    async def kill(self, number: int) -> None:
        """Kill one daemon with SIGKILL and start another in its place."""
        self.seats[number].kill()
        self.seats[number] = self.launch()

    async def kill_all(self, _: int) -> None:
        """Kill all daemons at once and start new ones after a few seconds."""
        for daemon in self.seats:
            daemon.kill()
        await pass_time(self.dice.uniform(0, 5))
        self.seats = [self.launch() for _ in self.seats]

    async def halt(self, number: int) -> None:
        """Stop one daemon with SIGSTOP for longer than the others wait before they take over its schedules."""
        halted = self.seats[number]
        halted.send(signal.SIGSTOP)
        await pass_time(self.dice.uniform(1, 6))
        halted.send(signal.SIGCONT)

    async def drain(self, number: int) -> None:
        """Send SIGTERM to one daemon and start another in its place."""
        leaving = self.seats[number]
        leaving.send(signal.SIGTERM)
        self.seats[number] = self.launch()
        try:
            await eventually(lambda: not leaving.alive, within=20)
        except AssertionError:
            self.faulty_ends.append(f"{leaving.pid} did not end within 20 s of SIGTERM")
            leaving.kill()

    async def run_faults(self, until: float) -> None:
        """Cause a fault every few seconds."""
        while time.monotonic() < until:
            (fault,) = self.dice.choices([self.kill, self.halt, self.drain, self.kill_all], weights=[12, 3, 3, 1])
            self.done[fault.__name__] += 1
            await fault(self.dice.randrange(len(self.seats)))
            await pass_time(self.dice.uniform(1, 4))
            for number, daemon in enumerate(self.seats):
                if not daemon.alive:
                    code = daemon.popen.returncode
                    self.faulty_ends.append(
                        f"{daemon.pid} ended by itself with {code}:\n{daemon.output_text()[-3000:]}"
                    )
                    self.seats[number] = self.launch()


async def run(fleet: Fleet, dsn: str, *, daemons: int, schedules: int, seconds: float) -> list[str]:
    """Run the faults, let the schedules end, and return the violations."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(CREATE_INSERT_LOG)
        fleet.seats = [fleet.launch() for _ in range(daemons)]
        for daemon in fleet.seats:
            await asyncio.to_thread(daemon.wait_for, "node.started", within=START_TIMEOUT_S * 2)
        begins: datetime = (await conn.fetch(INSERT_SCHEDULES, schedules))[0]["start_at"]
        write_line(
            f"{schedules * 16} schedules from {begins:%H:%M:%S} on, {daemons} daemons, clocks {'' if LIBFAKETIME else 'not '}skewed"
        )
        await fleet.run_faults(time.monotonic() + seconds)
        # Setting an end in the future is an edit, after which no due instant may be missing.
        await conn.execute(
            "update rota.schedules set end_at = date_trunc('second', clock_timestamp()) + interval '3 seconds'"
        )
        await wait_until_schedules_end(conn)
        write_line("faults:", str(dict(fleet.done)), f"{len(fleet.daemons.started)} daemons in all")
        write_line("fires:", ", ".join(f"{row[1]} {row[0]}" for row in await conn.fetch(COUNT_DISPOSITIONS)))
        return [
            *fleet.faulty_ends,
            *unexpected_output(fleet.daemons.started),
            *[found async for found in find_violations(conn)],
        ]
    finally:
        await conn.close()


async def wait_until_schedules_end(conn: Connection[Record]) -> None:
    """Wait until every schedule and every job has ended."""

    async def is_over() -> bool:
        return not await conn.fetchval(
            """
            select exists (select from rota.schedules where next_fire_at is not null or last_fire_at is null)
                or exists (select from rota.schedule_clocks where next_fire_at = '-infinity')
                or exists (select from rota.jobs)
                or exists (select from rota.fires where disposition = 'waiting')
            """
        )

    try:
        await eventually(is_over, within=ENDED_WITHIN_S, what="the end of the last schedule's last job")
    except AssertionError:
        for row in await conn.fetch("select * from rota.schedule_clocks limit 5"):
            write_line(str(row))
        for row in await conn.fetch("select * from rota.jobs limit 5"):
            write_line(str(row))
        raise


async def find_violations(conn: Connection[Record]) -> Any:
    """Yield every violation, and print how late the fires were."""
    checks = {
        "an instant without exactly one row": INSTANTS_WITHOUT_ONE_FIRE,
        "a row beside the instants": UNEXPECTED_FIRES,
        "a fire with two jobs": FIRES_WITH_TWO_JOBS,
        "a fire without its job, or a job without its fire": FIRES_AND_JOBS_WITHOUT_EACH_OTHER,
        "a job that did not end exactly once": JOBS_WITHOUT_ONE_END,
    }
    for what, sql in checks.items():
        rows = await conn.fetch(sql)
        for row_text in first_few(rows):
            yield f"{what}: {row_text}"
    late = await conn.fetch(SELECT_LATENESS)
    if late:
        shown = [late[int(share * (len(late) - 1))]["late"].total_seconds() for share in (0.5, 0.01, 0)]
        write_line(
            f"{len(late)} fires decided late by: p50 {shown[0]:.3f} s, p99 {shown[1]:.3f} s, at most {shown[2]:.3f} s"
        )
    for row_text in first_few([row for row in late if row["late"] > timedelta(seconds=LATEST_S)]):
        yield f"decided late: {row_text}"


def first_few(rows: Sequence[Record]) -> Iterator[str]:
    """Yield the first five rows, and the total if there are more."""
    for row in rows[:5]:
        yield str(dict(row))
    if len(rows) > 5:
        yield f"… {len(rows)} in all"


def main() -> int:
    """Run one seed; return 0 if all invariants held."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options.add_argument("--minutes", type=float, default=1.0, help="duration of the faults, without the recovery")
    options.add_argument("--daemons", type=int, default=8)
    options.add_argument("--schedules", type=int, default=2, help="of each of sixteen kinds")
    given = options.parse_args()
    write_line(f"seed {given.seed}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-chaos-", dir=memory_folder())))
        folder.chmod(0o755)
        for name in ("template", "logs"):
            (folder / name).mkdir()
        make_durable_template(folder / "template")
        dsn = stack.enter_context(durable_server(folder / "template")).dsn
        daemons = stack.enter_context(Daemons(folder / "logs", dsn, app="process_app:app", environ=ENVIRON))
        fleet = Fleet(daemons, random.Random(given.seed))
        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            failures = runner.run(
                run(fleet, dsn, daemons=given.daemons, schedules=given.schedules, seconds=given.minutes * 60)
            )
    if failures:
        write_line(f"\nseed {given.seed}: {len(failures)} invariants broken", *(f"\n- {each}" for each in failures))
        return 1
    write_line(f"seed {given.seed}: every instant exactly once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
