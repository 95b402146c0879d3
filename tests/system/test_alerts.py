"""Each alert of deploy/ fires for its cause and clears afterwards, with real daemons, a real server and a real Prometheus.

The rules are the shipped ones with the same thresholds; only their `for:` is seconds instead of minutes. Slow causes are
prepared: rows are back-dated, and libfaketime lets one machine sleep for long and gives the server an old clock.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import AsyncExitStack
from importlib.resources import files
from typing import TYPE_CHECKING

import asyncpg
import pytest

from fake_clock import LIBFAKETIME, clock_environment, server_with_fake_clock
from fleets import Fleet
from network_faults import FaultyProxy, free_port
from processes import SOURCE, TESTS
from prometheus import SHIPPED, fill_in_variables, find_prometheus, panels, prometheus
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from processes import DaemonProcess
    from prometheus import Prometheus
    from servers import DurableServer


def other_zones(folder: Path) -> str:
    """Create an import path for Python with zone data of another release."""
    package = folder / "zones" / "tzdata"
    shutil.copytree(str(files("tzdata")), package)
    (package / "__init__.py").write_text('IANA_VERSION = "2019c"\n')
    return os.pathsep.join([str(package.parent), str(TESTS), str(SOURCE)])


class Installation:
    """Three daemons: `sturdy` keeps running, `doomed` is killed, `cut off` loses its database."""

    def __init__(self, fleet: Fleet, folder: Path, proxy: FaultyProxy) -> None:
        self.fleet = fleet
        self.folder = folder
        self.link = proxy
        self.ports = {name: free_port() for name in ("sturdy", "doomed", "cut off")}
        self.clock = folder / "clock"
        self.clock.write_text("+0\n")

    def start(self, name: str, *, dsn: str | None = None, **environ: str) -> DaemonProcess:
        """Start one of the daemons, always on the same port."""
        return self.fleet.daemons.start(dsn=dsn, within=(), ROTA_HTTP_PORT=str(self.ports[name]), **environ)

    def alerts(self) -> dict[str, dict[str, str]]:
        """The alerts that must fire, with the instances they name."""
        instances = {name: {"instance": f"127.0.0.1:{port}"} for name, port in self.ports.items()}
        all_nodes = {"job": "rota"}
        return {
            "RotaGone": {},
            "RotaDaemonDown": instances["doomed"],
            "RotaNodeLost": all_nodes,
            "RotaHousekeepingFailing": all_nodes | {"piece": "ledger_drop"},
            "RotaLagging": {"queue": "slow"},
            "RotaDeadLetters": {"queue": "default"},
            "RotaDeadLettersForgotten": all_nodes,
            "RotaLeasesNotReaped": all_nodes,
            "RotaServiceStalled": instances["cut off"] | {"service": "dispatcher"},
            "RotaUnclaimable": all_nodes,
            "RotaUnserved": all_nodes,
            "RotaLimitsStalled": {"queue": "default"},
            "RotaSchedulesOverdue": all_nodes,
            "RotaSchedulesInvalid": all_nodes,
            "RotaLockWait": instances["sturdy"],
            "RotaListenerDown": instances["cut off"],
            "RotaSampleTooOld": instances["cut off"],
            "RotaLeasesLost": all_nodes,
            "RotaFailing": {"handler": "raises_payload"},
            "RotaLoopBlocked": instances["sturdy"],
            "RotaLoopCrashing": instances["sturdy"] | {"loop": "reaper"},
            "RotaSnapshotHeld": all_nodes,
            "RotaPausedForLong": {"kind": "handler", "name": "flaky"},
            "RotaReleasesMixed": all_nodes,
        }

    async def lock_a_schedule(self, holder: asyncpg.Connection[asyncpg.Record]) -> None:
        """Lock the row of a due schedule in an open transaction, so that no scheduler can decide it."""
        await self.fleet.execute(
            "insert into rota.schedules (name, handler, every) values ('locked', 'noop', '1 hour')"
        )
        await self.fleet.execute("update rota.schedule_clocks set next_fire_at = now() - interval '1 minute'")
        await holder.execute("begin")
        await holder.execute("select from rota.schedule_clocks for no key update")

    async def depend_on_an_old_partition(self) -> None:
        """Create a view on an expired ledger partition, as if the partition could not be dropped for hours."""
        await self.fleet.execute(
            "create table rota.job_runs_20200101 partition of rota.job_runs "
            "for values from ('2020-01-01 00:00:00+00') to ('2020-01-02 00:00:00+00')"
        )
        await self.fleet.execute("create view report as select * from rota.job_runs_20200101")
        await self.fleet.execute(
            "insert into rota.housekeeping (piece, succeeded_at) values ('ledger_drop', now() - interval '2 hours') "
            "on conflict (piece) do update set succeeded_at = excluded.succeeded_at"
        )

    async def start_all(self) -> None:
        """Start all three daemons, `doomed` with zone data of its own."""
        self.sturdy = self.start("sturdy", ROTA_QUEUES="default:20,slow:1")
        self.doomed = self.start("doomed", ROTA_QUEUES="doomed:5", PYTHONPATH=other_zones(self.folder))
        self.cut_off = self.start("cut off", dsn=self.link.dsn, ROTA_QUEUES="far:5", **clock_environment(self.clock))

    async def break_everything(self, holder: asyncpg.Connection[asyncpg.Record]) -> None:
        """Cause every alert at once."""
        fleet = self.fleet
        await fleet.enqueue("blocks_in_coroutine", {"seconds": 3})
        await fleet.enqueue("cancels_loop", {"loop": "reaper"})
        for _ in range(40):
            await fleet.enqueue("raises_payload", backoff_base="1s", backoff_cap="1s", max_attempts=1000)
        self.buried = await fleet.enqueue("raises_permanent")
        await fleet.enqueue("nop")  # misspelt on purpose
        await fleet.enqueue("noop", queue="nowhere")
        await fleet.execute("select rota.set_limit('closed', 0)")
        await fleet.enqueue("noop", limit_key="closed")
        await fleet.execute("select rota.pause_handler('flaky', 'look into it')")
        await fleet.execute(
            "insert into rota.schedules (name, handler, cron, timezone) values ('typo', 'noop', '@daily', 'Europe/Berlim')"
        )
        await fleet.execute(
            "insert into rota.schedules (name, handler, every, expect_success_within)"
            " values ('steady', 'noop', '1 second', '1 hour')"
        )
        self.busy = await fleet.enqueue("work", {"seconds": 600}, queue="slow")
        await fleet.wait_for_execution(self.busy)
        waiting = await fleet.enqueue("work", queue="slow")
        await fleet.execute(
            "update rota.jobs set run_at = run_at - interval '6 min', created_at = created_at - interval '6 min'"
            " where job_id = $1",
            waiting,
        )
        lost = [await fleet.enqueue("work", {"seconds": 600}, queue="doomed") for _ in range(2)]
        for job in lost:
            await fleet.wait_for_execution(job)
        await holder.execute("select from rota.jobs where job_id = $1 for no key update", lost[0])
        self.doomed.kill()
        self.link.refuse()
        self.clock.write_text("+400\n")
        await fleet.wait_for_state(self.buried, "dead")
        await fleet.execute(
            "update rota.dead_letters set finished_at = finished_at - interval '8 days' where job_id = $1", self.buried
        )

    async def mend_everything(self, *holders: asyncpg.Connection[asyncpg.Record]) -> None:
        """Remove the cause of every alert."""
        fleet = self.fleet
        for holder in holders:
            await holder.execute("rollback")
        await fleet.execute("drop view report")
        self.link.heal()
        self.start("doomed", ROTA_QUEUES="doomed:5")
        # The new daemon has replaced one of the two silent ones, perhaps the one that returns.
        await fleet.execute(
            "select rota.forget_node(node_id) from (select node_id, pid from rota.nodes union all"
            " select node_id, pid from rota.lost_nodes) as node where pid = $1",
            self.doomed.pid,
        )
        await fleet.execute("select rota.discard($1, 'seen')", self.buried)
        await fleet.execute("select rota.resume_handler('flaky')")
        await fleet.execute("delete from rota.schedules")
        await fleet.execute("select rota.cancel(job_id) from rota.jobs")


async def wait_for_alerts(server: Prometheus, fact: Callable[[set[str]], object], *, within: float, what: str) -> None:
    """Wait until exactly the expected alerts fire."""
    try:
        await eventually(lambda: fact(server.firing()), within=within, what=what)
    except AssertionError as error:
        raise AssertionError(f"{error}\nfiring: {sorted(server.firing())}\nseen: {server.seen}") from None


@pytest.mark.timeout(200)
@pytest.mark.skipif(find_prometheus() is None, reason="the package prometheus is not installed")
@pytest.mark.skipif(LIBFAKETIME is None, reason="the package libfaketime is not installed")
async def test_every_alert_fires_for_its_cause_and_clears_when_the_cause_is_removed(
    durable_server: Callable[..., DurableServer], tmp_path: Path
) -> None:
    """A rule that was only tested with made-up series may watch a metric that no daemon exports."""
    async with AsyncExitStack() as stack:
        dsn, clock = stack.enter_context(server_with_fake_clock(durable_server()))
        fleet = await stack.enter_async_context(Fleet(dsn, tmp_path))
        # A report that has been open for forty minutes.
        reader = await asyncpg.connect(dsn)
        stack.callback(reader.terminate)
        await reader.execute("begin isolation level repeatable read; select")
        clock.write_text("+0\n")
        installation = Installation(fleet, tmp_path, stack.enter_context(FaultyProxy(dsn)))
        server = stack.enter_context(prometheus(tmp_path, ports=list(installation.ports.values())))
        await wait_for_alerts(server, lambda now: "RotaGone" in now, within=20, what="RotaGone, without a daemon")
        holder = await asyncpg.connect(dsn)
        stack.callback(holder.terminate)
        await installation.lock_a_schedule(holder)
        await installation.depend_on_an_old_partition()
        await installation.start_all()
        await wait_for_alerts(server, lambda now: "RotaReleasesMixed" in now, within=20, what="RotaReleasesMixed")
        await installation.break_everything(holder)
        expected = installation.alerts()
        await holder.execute("savepoint before; lock table rota.attempts in access exclusive mode")
        instance = f"127.0.0.1:{installation.ports['sturdy']}"
        await wait_for_alerts(
            server, lambda _: server.has_fired("RotaLockWait", instance=instance), within=30, what="RotaLockWait"
        )
        await holder.execute("rollback to before")
        assert expected.keys() == set(re.findall(r"- alert: (\w+)", (SHIPPED / "alerts.yaml").read_text()))

        def have_all_fired(_: set[str]) -> bool:
            return all(server.has_fired(name, **labels) for name, labels in expected.items())

        await wait_for_alerts(server, have_all_fired, within=60, what="every alert")
        empty = {
            title: query
            for title, queries in panels().items()
            for query in queries
            if not server.ask(fill_in_variables(query))
        }
        assert not empty, "every panel of the dashboard shows something while all this goes on"
        await installation.mend_everything(holder, reader)
        await wait_for_alerts(server, lambda now: not now, within=60, what="no alert")
