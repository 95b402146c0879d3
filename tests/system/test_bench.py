"""`rota bench` measures what it reports, and leaves the server as it was."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from rota.bench.database import with_database_name
from rota.bench.latency import percentile
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from servers import Server


def run_bench(*arguments: str) -> dict[str, Any]:
    """Run a bench to its end and return its JSON result."""
    command = [sys.executable, "-m", "rota.bench", *arguments, "--json"]
    bench = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert bench.returncode == 0, bench.stderr
    figures: dict[str, Any] = json.loads(bench.stdout)
    return figures


def list_bench_databases(server: Server) -> Sequence[str]:
    async def ask() -> Sequence[str]:
        connection = await asyncpg.connect(server.dsn)
        try:
            rows = await connection.fetch(r"select datname from pg_database where datname like 'rota\_bench\_%'")
            return [row["datname"] for row in rows]
        finally:
            await connection.close()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(ask())


def test_drain_counts_every_job_and_leaves_no_database_behind(server: Server) -> None:
    figures = run_bench("drain", "--dsn", server.dsn, "--jobs", "3000", "--daemons", "2", "--slots", "100")

    assert figures["jobs"] == 3000
    assert figures["jobs_per_second"] == pytest.approx(3000 / figures["seconds"], rel=0.01)
    assert figures["ratio_to_floor"] == pytest.approx(
        figures["jobs_per_second"] / figures["floor_per_second"], rel=0.01
    )
    assert 0 < figures["commits_per_job"] < 2
    assert 0 < figures["statements_per_job"] < 2
    assert figures["wal_bytes_per_job"] > 100
    assert figures["rss_mb"] > 10
    assert figures["dead_tuples"] >= 0
    assert list_bench_databases(server) == []


def test_latency_is_measured_from_before_the_insert(server: Server) -> None:
    """Leaving out the insert's own commit would hide part of the delay. The client may hear of the commit after the start."""
    figures = run_bench("latency", "--dsn", server.dsn, "--rate", "100", "--seconds", "2")
    assert figures["jobs"] == 200
    assert (
        0
        < figures["insert_p50_ms"] / 2
        <= figures["start_p50_ms"]
        <= figures["start_p99_ms"]
        <= figures["start_max_ms"]
    )
    assert list_bench_databases(server) == []


def test_an_urgent_job_starts_within_a_poll_behind_a_backlog(server: Server) -> None:
    """The group `default` is always full and `*` is always free; neither may hide an urgent queue of the other."""
    figures = run_bench("priority", "--dsn", server.dsn, "--jobs", "5000", "--milliseconds", "60", "--probes", "10")
    assert (figures["jobs"], figures["probes"]) == (5000, 10)
    assert 0 < figures["start_p50_ms"] <= figures["start_p99_ms"] <= 1200
    assert 0 < figures["equal_p50_ms"] <= figures["equal_p99_ms"] <= 1200


def test_invented_names_add_no_time_series(server: Server) -> None:
    """Ten thousand unregistered handlers and queues must not enlarge a scrape."""
    figures = run_bench("scrape", "--dsn", server.dsn, "--jobs", "100000", "--names", "10000")
    assert figures["scrape_series"] < 500
    assert figures["scrape_p50_ms"] < 100
    assert figures["scrape_bytes"] > 1000
    assert figures["sample_ms"] > 0


def test_fleet_measures_each_number_of_daemons(server: Server) -> None:
    one_daemon, two_daemons = run_bench("fleet", "--dsn", server.dsn, "--jobs", "1000", "--daemons", "1,2")["rows"]
    assert (one_daemon["daemons"], two_daemons["daemons"], one_daemon["gain"]) == (1, 2, 1)
    assert two_daemons["gain"] == pytest.approx(
        two_daemons["jobs_per_second"] / one_daemon["jobs_per_second"], rel=0.01
    )
    assert one_daemon["daemon_us"] > 0
    assert one_daemon["server_us"] > 0
    assert list_bench_databases(server) == []


def test_prune_deletes_history_during_the_drains(server: Server) -> None:
    (row,) = run_bench("prune", "--dsn", server.dsn, "--jobs", "500", "--expired", "1500", "--rounds", "1")["rows"]
    assert row["ratio"] == pytest.approx(row["while_pruning"] / row["jobs_per_second"], rel=0.01)
    assert row["rows_pruned"] > 0
    assert row["rows_pruned"] + row["rows_left"] == 4 * 1500
    assert list_bench_databases(server) == []


def test_growth_measures_every_curve(server: Server) -> None:
    """Each curve has its own setup, and any of them may fail alone."""
    few = [word for option in ("--handlers", "--queues", "--idle") for word in (option, "2")]
    rows = run_bench("growth", "--dsn", server.dsn, "--jobs", "300", "--sizes", "500", *few)["rows"]
    assert [(row["curve"], row["size"]) for row in rows] == [
        ("future jobs", 500),
        ("due backlog", 500),
        ("ledger rows", 500),
        ("handlers", 2),
        ("queues", 2),
        ("idle daemons", 2),
    ]
    assert all(row["wal_bytes"] > 100 and row["buffers"] > 1 for row in rows)
    assert list_bench_databases(server) == []


def test_numbers_that_no_fleet_can_have_are_rejected() -> None:
    command = [sys.executable, "-m", "rota.bench", "fleet", "--daemons", "1,no", "--dsn", "postgresql://h"]
    bench = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (bench.returncode, "'1,no'" in bench.stderr) == (2, True)


def test_floor_runs_without_a_daemon(server: Server) -> None:
    """It is the baseline that daemons are compared with."""
    figures = run_bench("floor", "--dsn", server.dsn, "--jobs", "2000")
    assert figures["floor_per_second"] == pytest.approx(2000 / figures["seconds"], rel=0.01)
    assert "daemons" not in figures


def test_a_spike_ends_when_every_fire_and_its_job_are_done(server: Server) -> None:
    figures = run_bench(
        "spike", "--dsn", server.dsn, "--schedules", "20000", "--due", "2000", "--daemons", "2", "--slots", "100"
    )

    assert (figures["jobs"], figures["schedules"], figures["daemons"]) == (2000, 20_000, 2)
    assert figures["jobs_per_second"] == pytest.approx(2000 / figures["seconds"], rel=0.01)
    assert 0 < figures["lateness_p50_ms"] <= figures["lateness_p99_ms"] <= figures["seconds"] * 1000
    assert figures["lateness_p50_ms"] <= figures["start_p50_ms"] <= figures["start_max_ms"] <= figures["seconds"] * 1000
    assert figures["fires_per_second"] >= figures["jobs_per_second"]
    assert 0 < figures["statements_per_job"] < 1
    assert list_bench_databases(server) == []


def test_searching_stored_schedules_costs_the_same_for_any_number_of_them(server: Server) -> None:
    """The cost must depend on what is due, not on what is stored."""
    figures = run_bench("stored", "--dsn", server.dsn, "--schedules", "10000", "--seconds", "2")
    assert figures["schedules"] == 10_000
    assert figures["look_pages"] <= figures["look_pages_at_few"] + 4
    assert figures["look_ms"] < figures["look_ms_at_few"] * 5 + 5
    assert figures["idle_statements_per_second"] > 0
    assert list_bench_databases(server) == []


def test_without_a_server_the_message_names_both_options() -> None:
    """A missing variable must not make the bench use an embedded or production server."""
    command = [sys.executable, "-m", "rota.bench", "floor"]
    bench = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert bench.returncode == 2
    assert "DATABASE_URL" in bench.stderr
    assert "--embedded" in bench.stderr
    assert "Traceback" not in bench.stderr


def test_a_rate_that_inserts_no_job_is_rejected() -> None:
    command = [
        sys.executable,
        "-m",
        "rota.bench",
        "latency",
        "--rate",
        "0.1",
        "--seconds",
        "1",
        "--dsn",
        "postgresql://h",
    ]
    bench = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)

    assert (bench.returncode, "Raise --rate" in bench.stderr) == (2, True)


def test_an_interrupted_bench_ends_its_daemons_and_drops_its_database(server: Server) -> None:
    command = [sys.executable, "-m", "rota.bench", "latency", "--dsn", server.dsn, "--seconds", "600"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        if not children.exists():
            run.kill()
            pytest.skip("this system doesn't tell a process's children")

        def list_processes_of_run() -> list[int]:
            return [int(pid) for pid in children.read_text(encoding="ascii").split()]

        daemons = until(list_processes_of_run, within=30, what="the bench's daemon")
        run.send_signal(signal.SIGTERM)
        run.wait(timeout=60)
    assert run.returncode != 0
    assert list_bench_databases(server) == []
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in daemons), what="the end of the bench's daemon")


def test_percentiles_are_measured_values() -> None:
    """An interpolated p99 would be a delay that no job had."""
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [50, 99, 100]
    assert percentile([7.0], 99) == 7


@pytest.mark.parametrize(
    ("dsn", "expected"),
    [
        ("postgresql://u:p@h:1/d?sslmode=require", "postgresql://u:p@h:1/b?sslmode=require"),
        ("postgres://h", "postgres://h/b"),
        ("postgresql://", "postgresql:///b"),
        ("postgresql://?service=s", "postgresql:///b?service=s"),
        ("postgresql://postgres@/postgres?host=/run/p&port=5", "postgresql://postgres@/b?host=/run/p&port=5"),
    ],
)
def test_only_the_database_name_of_the_url_is_replaced(dsn: str, expected: str) -> None:
    """Server, user and options stay the same."""
    assert with_database_name(dsn, "b") == expected


def test_enqueue_compares_its_inserts_with_a_copy_of_the_same_run(server: Server) -> None:
    figures = run_bench("enqueue", "--dsn", server.dsn, "--jobs", "2000")
    assert figures["jobs"] == 2000
    assert figures["ratio_to_copy"] == pytest.approx(
        figures["enqueued_per_second"] / figures["copied_per_second"], rel=0.01
    )
    assert figures["enqueued_per_second"] == pytest.approx(2000 / figures["seconds"], rel=0.01)
