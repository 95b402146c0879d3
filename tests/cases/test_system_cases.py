"""Public failures of such systems that need real processes to be shown, by their ids."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from fake_clock import LIBFAKETIME
from fleets import Fleet
from processes import frozen
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from processes import DaemonProcess
    from servers import Database

LEASE_S = 3.0
REAP_S = 0.5


@pytest.fixture
async def fleet(database: Database, tmp_path: Path) -> AsyncIterator[Fleet]:
    """A migrated, empty database on the run's server, with no daemon yet."""
    async with Fleet(database.dsn, tmp_path) as made:
        yield made


async def test_b57_a_restarted_process_does_not_keep_its_predecessors_lease_alive(fleet: Fleet) -> None:
    """A lease belongs to an incarnation: host name and seat are the same, the node is another."""
    first = fleet.daemons.start()
    job = await fleet.enqueue("work", {"seconds": 60})
    await fleet.wait_for_execution(job)
    held = await fleet.job(job)
    first.kill()

    second = fleet.daemons.start()

    _, after = await fleet.wait_for_execution(job, 2, within=LEASE_S + REAP_S + 5)
    assert after["pid"] == second.pid
    row = await fleet.job(job)
    assert row is not None
    assert held is not None
    assert row["leased_by"] != held["leased_by"]
    hosts = await fleet.fetch("select host from rota.nodes")
    assert {found["host"] for found in hosts} == {socket.gethostname()}


async def test_b59_a_holder_held_still_is_told_by_its_first_refused_extension(fleet: Fleet) -> None:
    """Nobody else may even exist: that the lease has run out and was taken back is enough to interrupt the handler."""
    daemon = fleet.daemons.start()
    job = await fleet.enqueue("work", {"seconds": 60})
    (began,) = await fleet.wait_for_execution(job)
    with frozen(daemon):
        waited = time.monotonic()
        await eventually(lambda: time.monotonic() > waited + LEASE_S + 0.5)

    daemon.wait_for("lease.lost", within=3)

    executions = await fleet.wait_for_execution(job, 2)
    assert executions[0]["reason"] == "lease_lost"
    assert executions[0]["stopped_at"] is not None
    assert executions[1]["fence_token"] > began["fence_token"]


@pytest.mark.skipif(LIBFAKETIME is None, reason="the package libfaketime is not installed")
async def test_b61_clocks_that_differ_change_nothing(fleet: Fleet) -> None:
    """One node is an hour ahead, one ten minutes behind: nothing is reaped early, nothing starts early or late."""
    library = str(LIBFAKETIME)
    ahead = fleet.daemons.start(LD_PRELOAD=library, FAKETIME="+1h", FAKETIME_DONT_FAKE_MONOTONIC="1")
    behind = fleet.daemons.start(LD_PRELOAD=library, FAKETIME="-10m", FAKETIME_DONT_FAKE_MONOTONIC="1")
    assert wall_clock(ahead) - wall_clock(behind) > timedelta(minutes=69).total_seconds(), "the clocks differ in fact"
    long = [await fleet.enqueue("work", {"seconds": 7}) for _ in range(6)]  # more than two leases
    await fleet.execute(
        """
        insert into rota.jobs (handler, run_at)
        select 'work', now() + n % 80 * interval '0.1 second' from generate_series(1, 1000) as n
        """
    )

    await fleet.wait_until_empty(within=60)

    rows = await fleet.fetch(
        """
        select run.job_id, run.outcome, run.attempts, run.scheduled_for, execution.started_at, execution.pid
        from rota.job_runs as run join executions as execution using (job_id)
        """
    )
    assert len(rows) == len(long) + 1000, "each ran once"
    assert {(row["outcome"], row["attempts"]) for row in rows} == {("succeeded", 1)}
    assert {row["pid"] for row in rows} == {ahead.pid, behind.pid}
    assert all(row["started_at"] >= row["scheduled_for"] for row in rows), "nothing early"
    late = max(row["started_at"] - row["scheduled_for"] for row in rows)
    assert late < timedelta(minutes=1), (
        "nothing late: the clock that is nearest would add ten minutes, a busy machine seconds"
    )
    for daemon in (ahead, behind):
        assert daemon.metric("rota_reaped_total") == 0
        assert daemon.metric("rota_leases_lost_total") == 0


def wall_clock(daemon: DaemonProcess) -> float:
    """What time the daemon believes it is, by its log."""
    from datetime import datetime

    return datetime.fromisoformat(daemon.wait_for("node.started")["timestamp"]).timestamp()


async def test_b75_after_the_drain_deadline_every_job_has_been_given_back(fleet: Fleet) -> None:
    """Twenty handlers that need a minute, a drain of one second: interrupted, released by fenced writes, free to be claimed."""
    daemon = fleet.daemons.start(ROTA_DRAIN_TIMEOUT="1s")
    jobs = [await fleet.enqueue("work", {"seconds": 60}) for _ in range(20)]
    await eventually(lambda: fleet.value("select count(*) = 20 from executions"), what="twenty executions")

    assert daemon.stop(within=6) == 0

    rows = await fleet.fetch("select state, attempt, releases, leased_by, run_at <= now() as due from rota.jobs")
    assert [tuple(row) for row in rows] == [("scheduled", 0, 1, None, True)] * 20
    told = await fleet.fetch("select distinct outcome from rota.attempts")
    assert [row["outcome"] for row in told] == ["interrupted"]
    sessions = await fleet.value("select count(*) from pg_stat_activity where application_name like 'rota %'")
    assert sessions == 0, "no session, hence no lock, stays behind"
    fleet.daemons.start()
    await fleet.wait_for_execution(jobs[-1], 2, within=10)


async def test_b97_rows_of_short_lived_nodes_do_not_pile_up(fleet: Fleet) -> None:
    """Ten thousand nodes that died without a word, and a few that come and go: only the living have a row."""
    await fleet.execute(
        """
        insert into rota.nodes (node_id, host, pid, rota_version, app, handlers, queues, slots, state, seen_at)
        select gen_random_uuid(), 'autoscaled-' || n, 1, '0', 'processes', '{work}', '{default}', '{}', 'running',
            now() - interval '2 minutes'
        from generate_series(1, 10000) as n
        """
    )
    for _ in range(3):
        assert fleet.daemons.start().stop() == 0
    killed = fleet.daemons.start()
    killed.kill()

    living = fleet.daemons.start()
    job = await fleet.enqueue("work")
    await fleet.wait_for_state(job, "succeeded", within=3)

    async def few() -> bool:
        return bool(await fleet.value("select count(*) <= 2 from rota.nodes"))

    await eventually(few, within=10, what="two rows: the living one's, and the one's that was killed a moment ago")
    assert living.alive
    await fleet.execute("update rota.nodes set seen_at = seen_at - interval '2 minutes' where pid = $1", killed.pid)
    fleet.daemons.start()  # each looks at its start, and twice a minute
    await eventually(lambda: fleet.value("select count(*) = 2 from rota.nodes"), within=10, what="the living ones")


async def test_b99_memory_stays_where_it_is_over_a_hundred_thousand_jobs(fleet: Fleet) -> None:
    """A job that is done leaves nothing behind in the daemon, neither it nor its task, its claim or its labels."""
    daemon = fleet.daemons.start(ROTA_QUEUES="default:200")

    async def through(jobs: int) -> int:
        await fleet.execute("insert into rota.jobs (handler) select 'noop' from generate_series(1, $1)", jobs)
        await fleet.wait_until_empty(within=90)
        return daemon.rss()

    await through(20_000)
    warm = await through(10_000)
    after = max([await through(50_000), await through(50_000)])

    assert after < warm * 1.10, f"{warm / 2**20:.1f} MB, then {after / 2**20:.1f} MB"


async def test_b99_memory_stays_where_it_is_over_tens_of_thousands_of_fires(fleet: Fleet) -> None:
    """A fire that is over leaves nothing behind in the daemon, neither its decision nor its job's end."""
    await fleet.execute(
        """
        insert into rota.schedules (name, handler, cron)
        select 's' || n, 'noop', format('%s %s 1 1 *', n % 60, n % 24) from generate_series(1, 4000) as n
        """
    )
    daemon = fleet.daemons.start(ROTA_QUEUES="default:200")

    async def fire(times: int) -> int:
        for _ in range(times):
            before = await fleet.value("select count(*) from rota.fires")
            await fleet.execute("update rota.schedule_clocks set next_fire_at = now() where next_fire_at > now()")
            fired = partial(fleet.value, "select count(*) >= $1 + 4000 from rota.fires", before)
            await eventually(fired, within=30)
            await fleet.wait_until_empty()
        return daemon.rss()

    await eventually(lambda: fleet.value("select bool_and(next_fire_at > now()) from rota.schedule_clocks"), within=30)
    await fire(4)
    warm = await fire(2)
    after = max([await fire(4), await fire(4)])

    assert after < warm * 1.10, f"{warm / 2**20:.1f} MB, then {after / 2**20:.1f} MB"


async def test_b105_pages_are_for_this_machine_alone_and_change_nothing(fleet: Fleet) -> None:
    """By default nobody from elsewhere reaches them, and nobody from here can do anything with them but look."""
    daemon = fleet.daemons.start()
    assert urlsplit(daemon.url).hostname == "127.0.0.1"
    assert listening(daemon.pid) == {("127.0.0.1", urlsplit(daemon.url).port)}

    for page in ("metrics", "healthz", "readyz", "", "jobs", "api", "cancel"):
        known = page in {"metrics", "healthz", "readyz"}
        assert daemon.get(page)[0] == (200 if known else 404)
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            assert daemon.get(page, method=method)[0] == 405, f"{method} /{page}"
    job = await fleet.enqueue("raises_payload", {"password": "S3CRET-canary"}, max_attempts=1)
    await fleet.wait_for_state(job, "dead")
    until(lambda: daemon.metric("rota_settled_total") > 0)
    assert "S3CRET" not in daemon.get("metrics")[1]


def listening(pid: int) -> set[tuple[str, int | None]]:
    """Where that process listens, by its own sockets."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = str(descriptor.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found: set[tuple[str, int | None]] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                address, port = words[1].split(":")
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                packed = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                found.add((socket.inet_ntop(family, packed), int(port, 16)))
    return found
