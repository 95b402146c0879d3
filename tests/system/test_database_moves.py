"""Daemons find the server that accepts writes: dark hosts, failover, new passwords, cut links."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from command_line import Shell
from network_faults import FaultyProxy, isolated_network, reason_namespaces_unavailable
from processes import Daemons
from rota.config.database_url import DatabaseUrl
from rota.db.blocking import ANSWER_SECONDS, BlockingPool, Login
from rota.db.connecting import close_connection, open_connection
from servers import standby_of
from waiting import eventually, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fleets import Fleet
    from servers import DurableServer

NAMESPACES_UNAVAILABLE = reason_namespaces_unavailable()


@contextmanager
def silent_host() -> Iterator[str]:
    """A host that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def with_hosts(dsn: str, *hosts: str, query: str = "") -> str:
    """The same URL with these hosts."""
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"postgres@{','.join(hosts)}", query=query))


def host_of(proxy: FaultyProxy) -> str:
    return urlsplit(proxy.dsn).netloc.rpartition("@")[2]


async def test_a_silent_first_host_costs_each_connection_only_its_share_of_the_timeout(
    fleet: Fleet, tmp_path: Path
) -> None:
    """This covers the start, pools, transactions of threads and processes, the heartbeat, the listener and commands."""
    pytest.importorskip("psycopg")
    with silent_host() as dark, FaultyProxy(fleet.dsn) as proxy:
        url = with_hosts(fleet.dsn, dark, host_of(proxy))
        started_at = time.monotonic()
        daemon = fleet.daemons.start(dsn=url)
        daemon.wait_for("listener.up")
        assert time.monotonic() - started_at < 12

        async_job = await fleet.enqueue("transactional", {"seconds": 2})
        thread_job = await fleet.enqueue("transactional thread", {"seconds": 0})
        await fleet.wait_for_state(async_job, "succeeded")
        await fleet.wait_for_state(thread_job, "succeeded")
        assert daemon.unexpected_output() == []

        quick = with_hosts(fleet.dsn, dark, host_of(proxy), query="connect_timeout=2&target_session_attrs=read-write")
        listed = await Shell(tmp_path, {"DATABASE_URL": quick})("status")
        assert (listed.code, listed.err) == (0, "")

        started_at = time.monotonic()
        conn = await open_connection(DatabaseUrl(quick))
        assert time.monotonic() - started_at < 4, "connect_timeout is the limit of each host"
        conn.terminate()


@pytest.mark.skipif(NAMESPACES_UNAVAILABLE is not None, reason=str(NAMESPACES_UNAVAILABLE))
async def test_a_first_host_that_drops_packets_is_skipped(fleet: Fleet) -> None:
    """The packets go to a network interface that does not exist, so they are neither refused nor unreachable."""
    with isolated_network() as network, FaultyProxy(fleet.dsn, host=network.address) as proxy:
        url = with_hosts(fleet.dsn, f"{network.unreachable_address()}:5432", host_of(proxy), query="connect_timeout=2")
        started_at = time.monotonic()
        daemon = fleet.daemons.start(dsn=url, within=network.command_prefix, WITNESS_DSN="")
        daemon.wait_for("listener.up")
        assert time.monotonic() - started_at < 10


async def test_a_running_daemon_switches_hosts_when_the_first_one_stops_answering(fleet: Fleet) -> None:
    """The first host still accepts connections and data."""
    with FaultyProxy(fleet.dsn) as first, FaultyProxy(fleet.dsn) as second:
        daemon = fleet.daemons.start(dsn=with_hosts(fleet.dsn, host_of(first), host_of(second)), WITNESS_DSN="")
        daemon.wait_for("listener.up")
        first.freeze(lambda _: True)
        job = await fleet.enqueue("noop")
        await fleet.wait_for_state(job, "succeeded", within=10)
        assert daemon.alive


@pytest.mark.skipif(NAMESPACES_UNAVAILABLE is not None, reason=str(NAMESPACES_UNAVAILABLE))
async def test_a_running_daemon_switches_hosts_when_packets_to_the_first_one_are_dropped(fleet: Fleet) -> None:
    """Running jobs continue: their leases are extended and their outcomes written on the second host."""
    with (
        isolated_network() as network,
        FaultyProxy(fleet.dsn, host=network.add_host()) as first,
        FaultyProxy(fleet.dsn, host=network.address) as second,
    ):
        url = with_hosts(fleet.dsn, host_of(first), host_of(second))
        daemon = fleet.daemons.start(dsn=url, within=network.command_prefix, WITNESS_DSN="", ROTA_LEASE="30s")
        daemon.wait_for("listener.up")
        running = await fleet.enqueue("work", {"seconds": 8})
        await fleet.wait_for_state(running, "running")
        network.go_dark(host_of(first).partition(":")[0])
        job = await fleet.enqueue("noop")
        await fleet.wait_for_state(job, "succeeded", within=10)
        await fleet.wait_for_state(running, "succeeded")
        assert await fleet.value("select attempts from rota.job_runs where job_id = $1", running) == 1


async def test_daemons_wait_while_no_server_accepts_writes(
    restartable_fleet: Fleet, own_server: DurableServer, durable_server: Callable[..., DurableServer]
) -> None:
    """During a failover, neither server does for a while. A running and a starting daemon recover without a restart."""
    other = durable_server(default_transaction_read_only="on")
    with FaultyProxy(own_server.dsn) as first, FaultyProxy(other.dsn) as second:
        url = with_hosts(own_server.dsn, host_of(first), host_of(second), query="target_session_attrs=read-write")
        daemon = restartable_fleet.daemons.start(dsn=url, WITNESS_DSN="")

        await restartable_fleet.execute("alter system set default_transaction_read_only = on")
        own_server.restart()
        daemon.wait_for("service.failed", service="dispatcher")
        starting = restartable_fleet.daemons.launch(dsn=url, arguments=(), WITNESS_DSN="")
        starting.wait_for("database.awaited", within=20)
        assert daemon.alive

        admin = await asyncpg.connect(own_server.dsn, server_settings={"default_transaction_read_only": "off"})
        await admin.execute("alter system reset default_transaction_read_only")
        await admin.execute("select pg_reload_conf()")
        job = await admin.fetchval("insert into rota.jobs (handler) values ('noop') returning job_id")
        starting.wait_for("node.started", within=20)

        async def is_done() -> bool:
            return bool(await admin.fetchval("select exists (select from rota.job_runs where job_id = $1)", job))

        await eventually(is_done, within=20)
        assert daemon.alive
        await admin.close()


async def test_new_connections_after_a_password_change_use_the_new_password(
    restartable_fleet: Fleet, own_server: DurableServer, tmp_path: Path
) -> None:
    """The password file is read again when a login fails, by every kind of connection."""
    pytest.importorskip("psycopg")
    hba = own_server.postgres.data / "pg_hba.conf"
    hba.write_text("local all shop scram-sha-256\n" + hba.read_text())
    await restartable_fleet.execute("create role shop superuser login password 'first'")
    await restartable_fleet.execute("select pg_reload_conf()")
    parts = urlsplit(own_server.dsn)
    file = tmp_path / "url"
    file.write_text(urlunsplit(parts._replace(netloc=f"shop:first@{parts.netloc.rpartition('@')[2]}")))
    daemon = restartable_fleet.daemons.start(
        dsn="", ROTA_DATABASE_URL_FILE=str(file), ROTA_DATABASE_HANDLER_POOL_SIZE="3"
    )
    running = await restartable_fleet.enqueue("work", {"seconds": 4})
    await restartable_fleet.wait_for_execution(running)

    await restartable_fleet.execute("alter role shop password 'second'")
    file.write_text(urlunsplit(parts._replace(netloc=f"shop:second@{parts.netloc.rpartition('@')[2]}")) + "\n")
    await restartable_fleet.fetch("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'shop'")

    jobs = [
        await restartable_fleet.enqueue(name, {"seconds": 0})
        for name in ("transactional", "transactional thread", "noop")
    ]
    for job in [running, *jobs]:
        await restartable_fleet.wait_for_state(job, "succeeded")

    assert daemon.metric("rota_listener_up") == 1
    assert len(await restartable_fleet.executions(running)) == 1
    assert daemon.unexpected_output() == []


async def test_closing_connections_over_a_cut_link_does_not_hang(fleet: Fleet) -> None:
    """The other end accepts data and never answers."""
    pytest.importorskip("psycopg")
    with FaultyProxy(fleet.dsn) as proxy:
        conn = await open_connection(proxy.dsn)
        pool = BlockingPool(Login(DatabaseUrl(proxy.dsn), {}), 1)
        started_at = time.monotonic()
        with pool.connection():
            proxy.freeze(lambda _: True)
            await close_connection(conn)
            assert time.monotonic() - started_at < 4
            with pytest.raises(OSError, match=r"^$"):
                await open_connection(proxy.dsn, limit=0.5)

        assert time.monotonic() - started_at < 4 + ANSWER_SECONDS
        assert conn.is_closed()


async def test_no_id_is_issued_twice_after_the_promotion_of_a_lagging_standby(
    restartable_fleet: Fleet, own_server: DurableServer, tmp_path: Path
) -> None:
    """Clients insert concurrently on the new primary before any daemon has connected there."""
    daemon = restartable_fleet.daemons.start(WITNESS_DSN="")
    await restartable_fleet.wait_for_state(await restartable_fleet.enqueue("noop"), "succeeded")
    daemon.kill()
    insert = """
        insert into rota.jobs (handler, run_at)
        select 'noop', '2030-01-01' from generate_series(1, 100) returning job_id, rota.caller()
    """
    schedule = "insert into rota.schedules (name, handler, every) values ($1, 'noop', '1 day') returning schedule_id"

    with standby_of(own_server) as standby:
        lost = {row[0] for _ in range(2) for row in await restartable_fleet.fetch(insert)}
        lost_schedule = await restartable_fleet.value(schedule, "lost")
        await restartable_fleet.execute("select rota.pause_queue('default')")
        lost_audit = await restartable_fleet.value("select max(audit_id) from rota.audit")
        lost_token = await restartable_fleet.value("select nextval('rota.fence_tokens')")
        own_server.kill()

        async with AsyncExitStack() as stack:
            clients = []
            for _ in range(3):
                conn = await asyncpg.connect(standby.dsn)
                stack.callback(conn.terminate)
                clients.append(conn)
            await clients[0].execute("select pg_promote()")
            # A client's open transaction must block neither other clients nor daemons.
            await clients[0].execute("begin")
            first = [row[0] for row in await clients[0].fetch(insert)]
            rows_by_client = await asyncio.gather(clients[1].fetch(insert), clients[2].fetch(insert))
            job_ids = first + [row[0] for rows in rows_by_client for row in rows]
            assert len(set(job_ids)) == len(job_ids) == 300
            assert not lost & set(job_ids)
            assert min(job_ids) > max(lost) + 2**23
            assert max(job_ids) < max(lost) + 2**25, "the sequence is raised once"
            assert await clients[1].fetchval(schedule, "new") > lost_schedule + 2**23
            await clients[1].execute("select rota.pause_queue('default')")
            assert await clients[1].fetchval("select max(audit_id) from rota.audit") > lost_audit + 2**23
            with Daemons(tmp_path, standby.dsn, app="process_app:app") as daemons:
                daemons.start(WITNESS_DSN="")
                await clients[0].execute("commit")
                assert await clients[1].fetchval("select nextval('rota.fence_tokens')") > lost_token


async def test_a_daemon_does_not_return_to_an_older_primary(
    restartable_fleet: Fleet, own_server: DurableServer
) -> None:
    """After the failover, the old primary comes back with its own history and accepts writes."""
    query = "target_session_attrs=read-write&connect_timeout=2"
    with standby_of(own_server) as standby, FaultyProxy(own_server.dsn) as old, FaultyProxy(standby.dsn) as new:
        url = with_hosts(own_server.dsn, host_of(old), host_of(new), query=query)
        daemon = restartable_fleet.daemons.start(dsn=url, WITNESS_DSN="")
        daemon.wait_for("listener.up")
        promoted = await asyncpg.connect(standby.dsn)
        old.refuse()
        await promoted.execute("select pg_promote()")
        insert = "insert into rota.jobs (handler) values ('noop') returning job_id"
        done = "select exists (select from rota.job_runs where job_id = $1)"
        job = await promoted.fetchval(insert)
        await eventually(lambda: promoted.fetchval(done, job), within=20)
        daemon.wait_for("database.moved", timeline=2)

        old.heal()
        stray = await restartable_fleet.enqueue("noop")
        checked = await Shell(daemon.log.parent, {"DATABASE_URL": url})("check", "--json")
        assert "two primaries" in [finding["check"] for finding in checked.json["findings"]]

        # While the new primary is away, the daemon must wait instead of using the old one.
        refused = len(daemon.events("service.failed", kind="NoServerFits"))
        new.refuse()
        until(lambda: len(daemon.events("service.failed", kind="NoServerFits")) > refused, what="a refused old primary")
        new.heal()
        job = await promoted.fetchval(insert)
        await eventually(lambda: promoted.fetchval(done, job), within=25)
        assert await restartable_fleet.state(stray) == "due"
        assert daemon.unexpected_output() == []
        promoted.terminate()
