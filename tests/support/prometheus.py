"""A Prometheus of the tests' own, which scrapes daemons and judges them by the rules of deploy/, only sooner."""

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

FOR = "2s"
"""How long each rule waits here before it fires, in place of what it says."""

RANGE = "8s"
"""What each range of a query spans here; more than a blocked loop or a restart."""


def find_prometheus() -> str | None:
    """Where the binary is."""
    return shutil.which("prometheus")


def hastened(rules: str) -> str:
    """The rules with their waiting times and ranges cut down. Nothing else of them changes: no threshold, no label."""
    quick, waits = re.subn(r"^( +for: )\S+$", rf"\g<1>{FOR}", rules, flags=re.MULTILINE)
    quick, ranges = re.subn(r"\[\d+[smhd]\]", f"[{RANGE}]", quick)
    assert waits > 10, "rules that wait"
    assert ranges > 3, "queries over ranges"
    return quick


def panels() -> dict[str, list[str]]:
    """The queries of the dashboard's panels, by the panel's title."""
    shown = json.loads((SHIPPED.parent / "grafana" / "dashboard.json").read_text())["panels"]
    return {panel["title"]: [each["expr"] for each in panel["targets"]] for panel in shown if panel["type"] != "row"}


def filled_in(query: str) -> str:
    """The query of a panel as Grafana sends it."""
    return query.replace("$__rate_interval", "1m").replace("$job", ".*")


@dataclass(slots=True)
class Prometheus:
    """A running one, and which alerts it has been seen firing, each with its labels."""

    url: str
    seen: list[dict[str, str]] = field(default_factory=list)

    def has_fired(self, name: str, /, **labels: str) -> bool:
        """Whether that alert has been seen, about what these labels say."""
        wanted = {"alertname": name, **labels}
        return any(wanted.items() <= alert.items() for alert in self.seen)

    def ask(self, query: str) -> list[Any]:
        """What a query yields now."""
        found: list[Any] = self._get(f"query?{urlencode({'query': query})}")["result"]
        return found

    def firing(self) -> set[str]:
        """The alerts that fire now, by name."""
        alerts = self._get("alerts")["alerts"]
        now = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
        self.seen += [labels for labels in now if labels not in self.seen]
        return {labels["alertname"] for labels in now}

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}", timeout=5) as answer:
            return json.load(answer)["data"]


@contextmanager
def prometheus(folder: Path, *, ports: Sequence[int]) -> Iterator[Prometheus]:
    """Start one that scrapes those ports and evaluates the rules each second."""
    binary = find_prometheus()
    assert binary is not None
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    scrape = re.sub(r"targets: \[.*\]", f"targets: [{targets}]", (SHIPPED / "scrape.yaml").read_text())
    (folder / "prometheus.yaml").write_text(scrape.replace("_interval: 15s", "_interval: 1s"))
    (folder / "alerts.yaml").write_text(hastened((SHIPPED / "alerts.yaml").read_text()))
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
