"""The files of deploy/, read by the tools that use them and compared with the code."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import distributions
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

import pytest
from packaging.specifiers import SpecifierSet

from fleets import Fleet
from pages import page
from prometheus import fill_in_variables, panels
from rota import config
from rota.config import load, parse_duration
from rota.daemon.service_health import EVENT_DRIVEN_SERVICES
from rota.observability.telemetry import Telemetry, make_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from servers import DurableServer

DEPLOY = Path(__file__).parents[2] / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
UNIT = DEPLOY / "systemd" / "rota@.service"


def find_tool(name: str) -> str:
    """Return the path of a program; skip the test if it is not installed."""
    if tool_path := shutil.which(name):
        return tool_path
    pytest.skip(f"{name} is not installed here")


def run_tool(*command: str | Path, stdin: str = "") -> str:
    """Run a command that must succeed and return its output."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def unit_settings(name: str) -> list[str]:
    """All values of a setting of the unit file."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def test_systemd_accepts_the_unit_without_a_warning(tmp_path: Path) -> None:
    """A misspelt setting would only be reported in the journal, and would not be in force."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "rota").symlink_to(shutil.which("true") or "/bin/true")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/rota/%i", str(venv)))
    assert run_tool(find_tool("systemd-analyze"), "verify", "--man=no", copy) == ""


def test_every_pinned_package_installs_on_the_oldest_supported_python() -> None:
    """Debian 12 has Python 3.11.2. A pin made on a later patch release may need that one."""
    pinned = {
        name.lower()
        for name in re.findall(r"^([^=#]+)==", (DEPLOY / "constraints.txt").read_text("utf-8"), re.MULTILINE)
    }
    required = {
        each.metadata["Name"].lower(): each.metadata["Requires-Python"] or ""
        for each in distributions()
        if each.metadata["Name"].lower() in pinned
    }
    assert len(required) > 50
    assert [name for name, pythons in required.items() if not SpecifierSet(pythons).contains("3.11.0")] == []


def test_the_units_stop_timeout_covers_the_drain() -> None:
    environment = dict(line.split("=", 1) for line in unit_settings("Environment"))
    (stop,) = unit_settings("TimeoutStopSec")
    assert environment["ROTA_STOP_TIMEOUT"] == stop
    assert load(environ={"ROTA_STOP_TIMEOUT": stop}).warnings == ()
    drain = load(environ={}).drain
    assert parse_duration(stop) >= drain.timeout + drain.grace + timedelta(seconds=10)


def test_sigterm_reaches_the_daemon_directly() -> None:
    """A shell as the main process would keep the signal to itself."""
    (start,) = unit_settings("ExecStart")
    assert start.split() == ["/opt/rota/%i/bin/rota", "run"]
    assert unit_settings("KillMode") == ["mixed"]
    assert unit_settings("Type") == ["notify"]


async def test_a_daemon_reports_ready_status_and_stopping_to_systemd(fleet: Fleet, tmp_path: Path) -> None:
    """Without READY=1, the start would time out."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(address))
        systemd.settimeout(30)
        (tmp_path / "url").write_text(fleet.dsn)
        node = fleet.daemons.start(
            NOTIFY_SOCKET=str(address),
            WATCHDOG_USEC="200000",
            DATABASE_URL="",
            ROTA_DATABASE_URL_FILE=str(tmp_path / "url"),
        )
        ready = systemd.recv(1000).decode()
        assert re.fullmatch(r"READY=1\nSTATUS=up: 20 slots for \d+ handlers", ready)
        assert systemd.recv(1000) == b"WATCHDOG=1"
        assert node.stop() == 0

        systemd.setblocking(False)
        heard: list[str] = []
        while "STOPPING" not in (heard or [""])[-1]:
            heard.append(systemd.recv(1000).decode())
        assert heard[-1] == "STOPPING=1\nSTATUS=draining"


def exported_metrics() -> dict[str, tuple[str, ...]]:
    """Return metric -> labels of all metrics that a daemon exports, with the names of a scrape."""
    registry = Telemetry(make_logger(level="error", format="json")).registry
    tool_path = {}
    for collector in registry._collector_to_names:
        (family,) = collector.collect()
        labels = getattr(collector, "_labelnames", None)
        if labels is None:
            labels = collector._family[2]  # type: ignore[attr-defined]  # our own histogram
        tool_path[family.name + ("_total" if family.type == "counter" else "")] = tuple(labels)
    return tool_path


def named_in(text: str) -> set[str]:
    """The metrics that a query or a file names; of a histogram's series, the histogram."""
    series = set(re.findall(r"\brota_[a-z_]+\b", text))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in series}


def test_the_readme_lists_every_metric_with_its_labels() -> None:
    table = page("reference").partition("## Metrics")[2]
    listed = re.findall(r"`(rota_\w+)(?:\{([\w,]+)\})?`", table)
    assert {name: tuple(filter(None, labels.split(","))) for name, labels in listed} == exported_metrics()


def test_alerts_use_metrics_that_exist() -> None:
    """An alert on a missing metric never fires."""
    rules = (PROMETHEUS / "alerts.yaml").read_text()
    expressions = "\n".join(re.findall(r"^ +expr: (.*(?:\n {10}.*)*)", rules, re.MULTILINE))
    assert len(named_in(expressions)) > 10
    assert named_in(rules) - exported_metrics().keys() == set()
    (left_out,) = re.findall(r'service!~"([^"]+)"', rules)
    assert set(left_out.split("|")) == EVENT_DRIVEN_SERVICES


def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    """A rule that does not parse disables all rules of its file."""
    run_tool(find_tool("promtool"), "check", "rules", PROMETHEUS / "alerts.yaml")
    run_tool(find_tool("promtool"), "check", "config", PROMETHEUS / "scrape.yaml")


def test_each_alert_fires_in_its_test_case() -> None:
    run_tool(find_tool("promtool"), "test", "rules", PROMETHEUS / "alerts_test.yaml")
    alerts = set(re.findall(r"alert: (\w+)", (PROMETHEUS / "alerts.yaml").read_text()))
    tested_alerts = re.findall(r'labels: \'ALERTS\{alertname="(\w+)"', (PROMETHEUS / "alerts_test.yaml").read_text())
    assert set(tested_alerts) == alerts


async def test_promtool_accepts_the_metrics_of_a_daemon(fleet: Fleet) -> None:
    promtool = find_tool("promtool")
    node = fleet.daemons.start()
    await fleet.wait_for_state(await fleet.enqueue("noop"), "succeeded")
    assert run_tool(promtool, "check", "metrics", stdin=node.get("metrics")[1]) == ""


def test_the_dashboard_conforms_to_grafanas_schema() -> None:
    """Grafana silently drops unknown fields and draws overlapping panels over each other."""
    shown = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    assert shown["uid"]
    assert len(shown["uid"]) <= 40
    assert shown["title"]
    assert 36 <= shown["schemaVersion"] <= 42, "what Grafana 9 to 12 read"
    assert {"time", "refresh", "templating", "annotations", "panels"} <= shown.keys()

    variables = {each["name"]: each["type"] for each in shown["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query"}

    source = {"type": "prometheus", "uid": "${datasource}"}
    ids: set[int] = set()
    occupied: set[tuple[int, int]] = set()
    for panel in shown["panels"]:
        assert panel["id"] not in ids, "Grafana shows the wrong panel by its link"
        ids.add(panel["id"])
        place = panel["gridPos"]
        assert place.keys() == {"x", "y", "w", "h"}
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        cells = set(product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])))
        assert not cells & occupied, f"{panel['title']} lies over another panel"
        occupied |= cells
        if panel["type"] == "row":
            assert (panel["collapsed"], panel["panels"]) == (False, [])
            continue
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["title"]
        assert panel["datasource"] == source
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert references == sorted(set(references)), "each query has a letter of its own"
        for target in panel["targets"]:
            assert target["datasource"] == source
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= {*variables, "__rate_interval"}, panel["title"]
            assert set(re.findall(r"\{\{(.*?)\}\}", target["legendFormat"])) <= labels_of(target["expr"]), panel[
                "title"
            ]


def labels_of(expression: str) -> set[str]:
    """Return the labels that the series of an expression keep."""
    groups = re.findall(r"by \(([^)]*)\)", expression)
    if groups:
        return set(groups[0].split(", "))
    return {"job", "instance"}.union(*(exported_metrics()[name] for name in named_in(expression)))


def test_the_dashboard_shows_every_metric_and_only_existing_ones() -> None:
    shown = named_in("\n".join(chain(*panels().values())))
    assert shown == exported_metrics().keys()


def test_the_dashboard_groups_by_labels_that_exist() -> None:
    """Grouping by a missing label would merge all series into one."""
    everywhere = {"job", "instance", "le"}
    for title, expressions in panels().items():
        for expression in expressions:
            labels = everywhere.union(*(exported_metrics()[name] for name in named_in(expression)))
            used = {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(", ")}
            assert used <= labels, title


def test_prometheus_parses_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    """Grafana shows `no data` for a query that does not parse."""
    promtool = find_tool("promtool")
    rules = [
        {"record": f"panel:{number}", "expr": fill_in_variables(expression)}
        for number, expression in enumerate(chain(*panels().values()))
    ]
    file = tmp_path / "queries.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    run_tool(promtool, "check", "rules", file)


COMPOSE = (DEPLOY / "docker" / "compose.yaml").read_text()
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()


def test_containers_get_enough_time_to_drain() -> None:
    """By default, Docker kills after ten seconds."""
    environment = dict(re.findall(r"^    (ROTA_\w+): (\S+)$", COMPOSE, re.MULTILINE))
    assert load(environ={**environment, "ROTA_APP": ""}).warnings == ()
    daemon = COMPOSE.partition("x-daemon:")[2].partition("services:")[0]
    assert f"stop_grace_period: {environment['ROTA_STOP_TIMEOUT']}\n" in daemon


def test_the_image_runs_rota_as_an_ordinary_user_and_without_a_shell() -> None:
    """A shell as the first process would not pass SIGTERM on."""
    instructions = re.findall(r"^([A-Z]+) (.*(?:\\\n.*)*)", DOCKERFILE, re.MULTILINE)
    last_stage = instructions[[name for name, _ in instructions].index("FROM", 1) :]
    assert ("USER", "10001:10001") in last_stage
    for name, value in instructions:
        if name in {"RUN", "CMD", "ENTRYPOINT"}:
            assert isinstance(json.loads(value), list)
    assert dict(last_stage)["ENTRYPOINT"] == '["rota"]'


def test_the_image_copies_files_that_exist_and_pins_its_versions() -> None:
    """No test builds the image."""
    root = DEPLOY.parent
    ignore_lines = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().split()
    for sources in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE):
        for source in sources.split():
            assert (root / source).exists()
            assert f"!{source}" in ignore_lines
    for place in re.findall(r"^      - (\.\S*?):", COMPOSE, re.MULTILINE):
        assert (DEPLOY / "docker" / place).exists()
    services = COMPOSE.partition("\nservices:")[2]
    targets = re.findall(r'"(rota-\d+):9843"', (PROMETHEUS / "scrape.yaml").read_text())
    assert targets == re.findall(r"^  (rota-\d+):", services, re.MULTILINE)


async def test_the_logins_of_the_containers_can_run_a_daemon(
    restartable_fleet: Fleet, own_server: DurableServer
) -> None:
    """They have only the rights of logins.sql and `rota migrate --roles`."""
    await restartable_fleet.execute((DEPLOY / "docker" / "logins.sql").read_text())
    run_tool(sys.executable, "-m", "rota", "migrate", "--roles", "--dsn", own_server.dsn)
    await restartable_fleet.execute("grant insert on executions, effects to rota_daemon")
    login = re.sub(r"//[^@/]*@?", "//daemon:daemon@", own_server.dsn, count=1)
    node = restartable_fleet.daemons.start(dsn=login)
    await restartable_fleet.wait_for_state(await restartable_fleet.enqueue("noop"), "succeeded")
    assert node.stop() == 0
    assert node.events(level="error") == []


GUIDE = page("operations")


def test_the_guide_names_existing_settings_alerts_and_metrics() -> None:
    assert named_in(GUIDE) & {"rota_oldest_snapshot_seconds", "rota_dead_tuples"} <= exported_metrics().keys()
    alerts = set(re.findall(r"alert: (\w+)", (PROMETHEUS / "alerts.yaml").read_text()))
    assert set(re.findall(r"\bRota[A-Z]\w+", GUIDE)) <= alerts
    for path in re.findall(r"`((?:systemd|docker|prometheus|grafana)/[^`\s]*)`", GUIDE):
        assert (DEPLOY / path).exists(), path
    variables = set(re.findall(r"\bROTA_[A-Z_]+\b", GUIDE + UNIT.read_text() + COMPOSE + DOCKERFILE))
    known = {name for path in config.SETTINGS for name in config.variables(path)} | config.NO_SETTINGS
    assert {"ROTA_DATABASE_URL_FILE", "ROTA_DIRECT_URL_FILE"} <= variables <= known


def test_the_guide_counts_a_daemons_connections_correctly() -> None:
    database = load(environ={}).database
    assert f"which is {database.pool_size + database.handler_pool_size + 2} for each daemon by default" in page(
        "tuning"
    )


async def test_a_daemon_finds_the_primary_among_the_hosts_of_its_url(
    durable_server: Callable[..., DurableServer], tmp_path: Path
) -> None:
    """The search continues after a host that is unreachable or read-only."""
    primary = durable_server()
    standby = durable_server(default_transaction_read_only="on")
    hosts = [dict(parse_qsl(urlsplit(server.dsn).query)) for server in (standby, primary)]
    places = ",".join(each["host"] for each in hosts), ",".join(each.get("port", "5432") for each in hosts)
    login = urlsplit(primary.dsn)
    url = f"postgresql://{login.netloc}{login.path}?host={places[0]}&port={places[1]}&target_session_attrs=read-write"

    async with Fleet(primary.dsn, tmp_path) as fleet:
        fleet.daemons.start(dsn=url)
        await fleet.wait_for_state(await fleet.enqueue("noop"), "succeeded")


async def test_a_publication_for_all_tables_stops_no_daemon(fleet: Fleet) -> None:
    """PostgreSQL rejects deletes from a published table without a key."""
    await fleet.execute("create publication everything for all tables")
    node = fleet.daemons.start()
    await fleet.wait_for_state(await fleet.enqueue("noop"), "succeeded")
    await fleet.execute("select rota.rotate_ledger(interval '1 hour')")
    await fleet.execute("drop publication everything")
    assert node.stop() == 0
    assert node.unexpected_output() == []
