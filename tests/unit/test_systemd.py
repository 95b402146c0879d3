"""Messages to systemd, over a real datagram socket."""

from __future__ import annotations

import os
import socket
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from rota.runtime.systemd import notify, watchdog_interval

if TYPE_CHECKING:
    from pathlib import Path


def test_a_message_reaches_the_socket_on_the_file_system(tmp_path: Path) -> None:
    """Without READY=1 systemd kills a Type=notify unit at its start timeout."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        systemd.settimeout(5)
        assert notify("READY=1", {"NOTIFY_SOCKET": address})
        assert systemd.recv(100) == b"READY=1"


def test_a_leading_at_sign_means_the_abstract_namespace() -> None:
    """Containers get an abstract socket, written with @ in place of the kernel's NUL."""
    name = f"rota-{uuid.uuid4()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{name}")
        systemd.settimeout(5)
        assert notify("WATCHDOG=1", {"NOTIFY_SOCKET": f"@{name}"})
        assert systemd.recv(100) == b"WATCHDOG=1"


def test_without_systemd_nothing_is_sent_and_nothing_fails(tmp_path: Path) -> None:
    assert not notify("READY=1", {})
    assert not notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "nobody")})


def test_a_full_notify_socket_does_not_block_the_loop(tmp_path: Path) -> None:
    """The main loop feeds the watchdog."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(address)
        sent = [notify("WATCHDOG=1", {"NOTIFY_SOCKET": address}) for _ in range(20_000)]
    assert sent[0]
    assert not sent[-1]


@pytest.mark.parametrize(
    ("environ", "interval"),
    [
        ({"WATCHDOG_USEC": "30000000"}, timedelta(seconds=15)),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, timedelta(seconds=15)),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_interval_is_half_of_the_timeout(environ: dict[str, str], interval: timedelta | None) -> None:
    """Variables meant for another process are ignored."""
    assert watchdog_interval(environ) == interval
