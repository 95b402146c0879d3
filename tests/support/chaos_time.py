"""Kill daemons whose clocks are minutes apart, while schedules fire each second and each minute: every instant exactly once.

Each daemon's clock is set ahead or back by some minutes (libfaketime), and every few seconds one is killed with SIGKILL, held
still, told to drain, or all are killed at once. Afterwards each schedule's instants are counted one by one: a row of rota.fires for
each and none beside them, one job for each fire that was enqueued, one end for each job. Exit code 1, with the seed and the
evidence, where a law was broken. What happens follows from the seed; at which moment exactly it strikes does not.
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

from chaos import noise, pass_time, say
from fake_clock import LIBFAKETIME
from processes import START_TIMEOUT_S, DaemonProcess, Daemons
from servers import durable_server, make_durable_template, memory_folder
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

    from asyncpg import Connection, Record


SKEW_S = 300
"""Seconds by which a daemon's clock is off at most, either way."""

LATEST_S = 30.0
"""Seconds after its instant by which a fire must have been decided, while daemons die: far from on_time_within, after which
it would count as missed."""

ENDED_WITHIN_S = 60.0

ENVIRON = {
    "ROTA_POLL_INTERVAL": "1s",
    "ROTA_DRAIN_TIMEOUT": "2s",
    "FAKETIME_DONT_FAKE_MONOTONIC": "1",
}

# Beats from a whole second on, so that each instant is known beforehand; who may run beside whom differs.
SCHEDULES = """
insert into rota.schedules (name, handler, cron, every, overlap, payload, start_at)
select format('%s %s %s', kind, overlap, number), 'noop',
    case kind when 'second cron' then '* * * * * *' when 'minute cron' then '* * * * *' end,
    case kind when 'second beat' then interval '1 second' when 'minute beat' then interval '1 minute' end,
    overlap, '{}', date_trunc('second', now()) + interval '2 seconds'
from unnest(array['second cron', 'second beat', 'minute cron', 'minute beat']) as kind,
    unnest(array['allow', 'skip', 'queue_one', 'replace']) as overlap,
    generate_series(1, $1::int4) as number
returning start_at
"""

BIRTHS = """
create table public.births (job_id bigint, schedule_id bigint, scheduled_for timestamptz);
create function note_birth() returns trigger language plpgsql as $$
begin
    insert into public.births values (new.job_id, new.schedule_id, new.scheduled_for);
    return null;
end $$;
create trigger note_birth after insert on rota.jobs for each row execute function note_birth()
"""

# What ought to be there: cron instants are whole seconds or minutes, beats count from start_at. An edit of a cron schedule writes
# one row for all that was due by then and not decided.
EXPECTED = """
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
MISSED = f"""
select expected.name, expected.instant
from ({EXPECTED}) as expected
left join rota.fires as fire on fire.schedule_id = expected.schedule_id
    and (fire.scheduled_for = expected.instant
         or expected.instant >= fire.missed_from
            and expected.instant <= case fire.disposition when 'skipped_edit' then fire.decided_at else fire.scheduled_for end)
group by expected.schedule_id, expected.name, expected.instant
having count(fire) <> 1
order by expected.instant
"""
UNEXPECTED = f"""
select fire.name, fire.scheduled_for, fire.disposition
from rota.fires as fire
where not exists (select from ({EXPECTED}) as expected
                  where expected.schedule_id = fire.schedule_id and expected.instant = fire.scheduled_for)
"""
TWICE = """
select schedule_id, scheduled_for, count(*) from births group by 1, 2 having count(*) > 1
"""
UNBORN = """
select fire.name, fire.scheduled_for, fire.job_id, birth.job_id as born
from (select * from rota.fires where disposition = 'enqueued') as fire
full join births as birth using (schedule_id, scheduled_for)
where fire.job_id is distinct from birth.job_id
"""
ENDS = """
select birth.job_id, count(ended.job_id) as ends
from births as birth
left join (select job_id from rota.job_runs union all select job_id from rota.dead_letters) as ended using (job_id)
group by 1 having count(ended.job_id) <> 1
"""
LATE = """
select fire.name, fire.scheduled_for, fire.decided_at - fire.scheduled_for as late
from rota.fires as fire
where fire.disposition not in ('enqueued', 'waiting') or fire.name like '%allow%' or fire.name like '%skip%'
order by late desc
"""
DISPOSITIONS = "select disposition, count(*) from rota.fires group by 1 order by 2 desc"


@dataclass(slots=True)
class Fleet:
    """The daemons that should be running, and what was done to them."""

    daemons: Daemons
    dice: random.Random
    seats: list[DaemonProcess] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    faulty_ends: list[str] = field(default_factory=list)

    def launch(self) -> DaemonProcess:
        """Start a daemon whose clock is off."""
        skew = self.dice.randint(-SKEW_S, SKEW_S)
        return self.daemons.launch(LD_PRELOAD=str(LIBFAKETIME or ""), FAKETIME=f"{skew:+d}s")

    async def kill(self, number: int) -> None:
        """End one with SIGKILL, and start another in its place."""
        self.seats[number].kill()
        self.seats[number] = self.launch()

    async def kill_all(self, _: int) -> None:
        """End all of them at once: nobody is up for as long as a start takes, and a bit."""
        for daemon in self.seats:
            daemon.kill()
        await pass_time(self.dice.uniform(0, 5))
        self.seats = [self.launch() for _ in self.seats]

    async def halt(self, number: int) -> None:
        """Hold one still, beyond the moment at which the others take its schedules, with whatever it had just decided."""
        halted = self.seats[number]
        halted.send(signal.SIGSTOP)
        await pass_time(self.dice.uniform(1, 6))
        halted.send(signal.SIGCONT)

    async def drain(self, number: int) -> None:
        """Tell one to stop, and start another in its place."""
        leaving = self.seats[number]
        leaving.send(signal.SIGTERM)
        self.seats[number] = self.launch()
        try:
            await eventually(lambda: not leaving.alive, within=20)
        except AssertionError:
            self.faulty_ends.append(f"{leaving.pid} did not end within 20 s of SIGTERM")
            leaving.kill()

    async def suffer(self, until: float) -> None:
        """Do something to one of them every few seconds."""
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
    """Let it go on for so long, heal it, and return what should not have happened."""
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(BIRTHS)
        fleet.seats = [fleet.launch() for _ in range(daemons)]
        for daemon in fleet.seats:
            await asyncio.to_thread(daemon.wait_for, "node.started", within=START_TIMEOUT_S * 2)
        begins: datetime = (await conn.fetch(SCHEDULES, schedules))[0]["start_at"]
        say(
            f"{schedules * 16} schedules from {begins:%H:%M:%S} on, {daemons} daemons, clocks {'' if LIBFAKETIME else 'not '}skewed"
        )
        await fleet.suffer(time.monotonic() + seconds)
        # An end that lies ahead is an edit after which nothing that was due may be missing either.
        await conn.execute(
            "update rota.schedules set end_at = date_trunc('second', clock_timestamp()) + interval '3 seconds'"
        )
        await healed(conn)
        say("done to them:", str(dict(fleet.done)), f"{len(fleet.daemons.started)} daemons in all")
        say("fires:", ", ".join(f"{row[1]} {row[0]}" for row in await conn.fetch(DISPOSITIONS)))
        return [*fleet.faulty_ends, *noise(fleet.daemons.started), *[found async for found in violations(conn)]]
    finally:
        await conn.close()


async def healed(conn: Connection[Record]) -> None:
    """Return when every schedule is at its end, and every job has come to its."""

    async def over() -> bool:
        return not await conn.fetchval(
            """
            select exists (select from rota.schedules where next_fire_at is not null or last_fire_at is null)
                or exists (select from rota.schedule_clocks where next_fire_at = '-infinity')
                or exists (select from rota.jobs)
                or exists (select from rota.fires where disposition = 'waiting')
            """
        )

    try:
        await eventually(over, within=ENDED_WITHIN_S, what="the end of the last schedule's last job")
    except AssertionError:
        for row in await conn.fetch("select * from rota.schedule_clocks limit 5"):
            say(str(row))
        for row in await conn.fetch("select * from rota.jobs limit 5"):
            say(str(row))
        raise


async def violations(conn: Connection[Record]) -> Any:
    """Yield what should not have happened, and tell how late fires were."""
    checks = {
        "an instant without exactly one row": MISSED,
        "a row beside the instants": UNEXPECTED,
        "a fire with two jobs": TWICE,
        "a fire without its job, or a job without its fire": UNBORN,
        "a job that did not end exactly once": ENDS,
    }
    for what, sql in checks.items():
        rows = await conn.fetch(sql)
        for told in first_few(rows):
            yield f"{what}: {told}"
    late = await conn.fetch(LATE)
    if late:
        shown = [late[int(share * (len(late) - 1))]["late"].total_seconds() for share in (0.5, 0.01, 0)]
        say(f"{len(late)} fires decided late by: p50 {shown[0]:.3f} s, p99 {shown[1]:.3f} s, at most {shown[2]:.3f} s")
    for told in first_few([row for row in late if row["late"] > timedelta(seconds=LATEST_S)]):
        yield f"decided late: {told}"


def first_few(rows: Sequence[Record]) -> Iterator[str]:
    """Show five, and say how many there are."""
    for row in rows[:5]:
        yield str(dict(row))
    if len(rows) > 5:
        yield f"… {len(rows)} in all"


def main() -> int:
    """Run one seed; 0 if all laws held."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options.add_argument("--minutes", type=float, default=1.0, help="how long faults strike; healing comes on top")
    options.add_argument("--daemons", type=int, default=8)
    options.add_argument("--schedules", type=int, default=2, help="of each of sixteen kinds")
    given = options.parse_args()
    say(f"seed {given.seed}")
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
            wrong = runner.run(
                run(fleet, dsn, daemons=given.daemons, schedules=given.schedules, seconds=given.minutes * 60)
            )
    if wrong:
        say(f"\nseed {given.seed}: {len(wrong)} laws or promises broken", *(f"\n- {each}" for each in wrong))
        return 1
    say(f"seed {given.seed}: every instant exactly once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
