"""`rota demo` as a real process: its exit code and its report are checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from processes import is_running
from rota.demo.fleet import MAX_STALL
from waiting import until

DEMO = [sys.executable, "-m", "rota.demo", "--json"]


@pytest.mark.timeout(270)
def test_the_demo_keeps_every_promise_and_leaves_nothing_behind(tmp_path: Path) -> None:
    demo, report = read_report(tmp_path)
    if not report["ok"] and report["stood_still_s"] > MAX_STALL:
        demo, report = read_report(tmp_path)  # a machine that stalls for that long breaks leases of three seconds

    assert "error" not in report, report
    broken = [f"{check['promise']}: {check['fact']}" for check in report["checks"] if not check["held"]]
    assert not broken, "\n".join(broken)
    assert report["ok"]
    assert demo.returncode == 0, demo.stderr
    assert report["seconds"] < 90

    ended = Counter((job["handler"], job["ended_as"]) for job in report["jobs"])
    assert ended == {
        ("email", "succeeded"): 52,
        ("transfer", "succeeded"): 12,
        ("report", "succeeded"): 3,
        ("charge", "discarded"): 1,
        ("webhook", "succeeded"): 1,
        ("import", "succeeded"): 1,
        ("embargo", "succeeded"): 1,
        ("digest", "succeeded"): 1,
        ("newsletter", "cancelled"): 1,
        ("thumbnail", "succeeded"): 1,
    }
    (charge,) = (job for job in report["jobs"] if job["handler"] == "charge")
    assert [each["daemon"] for each in charge["executions"]] == [report["killed"]]
    assert {letter["handler"]: letter["reason"] for letter in report["dead_letters"]} == {
        "charge": "lost",
        "import": "permanent",
        "thumbnail": "poison",
    }
    assert {event["event"] for event in report["refused"]} >= {"write.refused"}
    ran_again = {str(job["job_id"]) for job in report["jobs"] if len(job["executions"]) > 1}
    assert len(report["took_over_after_s"].keys() & ran_again) >= 3, (
        "a transfer of the killed daemon, a transfer and a report of the paused one; a claim may be lost before its call"
    )

    stopped = [life for life in report["daemons"] if life["end"] == "stopped"]
    assert [life["exit_code"] for life in stopped] == [0, 0, 0]
    assert not [life for life in report["daemons"] if is_running(life["pid"])]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupted_demo_ends_its_daemons_and_its_server(tmp_path: Path) -> None:
    demo = subprocess.Popen(DEMO, env=make_environment(tmp_path), stdout=subprocess.PIPE, text=True)
    try:
        children = until(lambda: list_children(demo.pid), within=30, what="a server and three daemons")
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=30)
    finally:
        demo.kill()

    assert demo.returncode == 130
    assert json.loads(output)["error"] == "interrupted"
    assert not [pid for pid in children if is_running(pid)]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_daemons_end_by_themselves_when_the_demo_is_killed(tmp_path: Path) -> None:
    demo = subprocess.Popen(DEMO, env=make_environment(tmp_path), stdout=subprocess.DEVNULL)
    try:
        children = until(lambda: list_children(demo.pid), within=30, what="a server and three daemons")
        until(lambda: all(is_ready(tmp_path, letter) for letter in "ABC"), within=30, what="daemons that are up")
    finally:
        demo.kill()
        demo.wait()

    until(lambda: not [pid for pid in children if is_running(pid)], within=20, what="the end of all of them")


def read_report(folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Return the report that the demo printed at its end."""
    demo = subprocess.run(DEMO, env=make_environment(folder), capture_output=True, text=True, timeout=120, check=False)
    return demo, json.loads(demo.stdout)


def make_environment(folder: Path) -> dict[str, str]:
    """A shell's environment with a temporary folder of the test, which must be empty at the end."""
    if os.geteuid() == 0:
        for place in (folder, *folder.parents):
            if place == Path(tempfile.gettempdir()):
                break
            place.chmod(0o755)
    return {**os.environ, "TMPDIR": str(folder)}


def is_ready(folder: Path, letter: str) -> bool:
    """Return whether the log says that the daemon is up."""
    return any("node.started" in log.read_text() for log in folder.glob(f"rota-demo-*/{letter}.log"))


def list_children(pid: int) -> list[int] | None:
    """Return the pids of the demo's server and daemons once all four run."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found] if len(found) == 4 else None
