"""Run a Prometheus that scrapes the daemons under test and evaluates the rules of deploy/ with shorter times."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from network_faults import free_port
from waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHIPPED = Path(__file__).parents[2] / "deploy" / "prometheus"

SHORT_FOR = "2s"
"""The `for:` of each rule in the tests."""

SHORT_RANGE = "8s"
"""The range of each query in the tests. It is longer than a blocked loop or a restart."""


def find_prometheus() -> str | None:
    """Return the path of the binary."""
    return shutil.which("prometheus")


def shorten_times(rules: str) -> str:
    """Return the rules with shorter waiting times and ranges. Thresholds and labels stay the same."""
    quick, waits = re.subn(r"^( +for: )\S+$", rf"\g<1>{SHORT_FOR}", rules, flags=re.MULTILINE)
    quick, ranges = re.subn(r"\[\d+[smhd]\]", f"[{SHORT_RANGE}]", quick)
    assert waits > 10, "the rules have waiting times"
    assert ranges > 3, "the queries have ranges"
    return quick


def panels() -> dict[str, list[str]]:
    """Return the queries of the dashboard by the title of their panel."""
    panels_json = json.loads((SHIPPED.parent / "grafana" / "dashboard.json").read_text())["panels"]
    return {
        panel["title"]: [each["expr"] for each in panel["targets"]] for panel in panels_json if panel["type"] != "row"
    }


def fill_in_variables(query: str) -> str:
    """Return a panel's query as Grafana sends it."""
    return query.replace("$__rate_interval", "1m").replace("$job", ".*")


@dataclass(slots=True)
class Prometheus:
    """A running Prometheus, and the alerts that have fired so far with their labels."""

    url: str
    seen: list[dict[str, str]] = field(default_factory=list)

    def has_fired(self, name: str, /, **labels: str) -> bool:
        """Return whether the alert has fired with these labels."""
        labels_of_alert = {"alertname": name, **labels}
        return any(labels_of_alert.items() <= alert.items() for alert in self.seen)

    def ask(self, query: str) -> list[Any]:
        """Return the current result of a query."""
        found: list[Any] = self._get(f"query?{urlencode({'query': query})}")["result"]
        return found

    def firing(self) -> set[str]:
        """Return the alerts that fire now, by name."""
        alerts = self._get("alerts")["alerts"]
        now = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        self.seen += [labels for labels in now if labels not in self.seen]
        return {labels["alertname"] for labels in now}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=5) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, *, ports: Sequence[int]) -> Iterator[Prometheus]:
    """Start a Prometheus that scrapes the ports and evaluates the rules each second."""
    binary = find_prometheus()
    assert binary is not None
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    scrape = re.sub(r"targets: \[.*\]", f"targets: [{targets}]", (SHIPPED / "scrape.yaml").read_text())
    (folder / "prometheus.yaml").write_text(scrape.replace("_interval: 15s", "_interval: 1s"))
    (folder / "alerts.yaml").write_text(shorten_times((SHIPPED / "alerts.yaml").read_text()))
    url = f"127.0.0.1:{free_port()}"
    log = folder / "prometheus.log"
    with ExitStack() as undo:
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address={url}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=undo.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        undo.callback(process.wait, 10)
        undo.callback(process.kill)

        def ready() -> bool:
            assert process.poll() is None, log.read_text()
            with socket.socket() as client:
                host, port = url.split(":")
                return client.connect_ex((host, int(port))) == 0 and "ready to receive" in log.read_text()

        until(ready, within=20, what="Prometheus")
        yield Prometheus(f"http://{url}")
