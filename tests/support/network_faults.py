"""A TCP proxy that can freeze, delay and refuse connections to a server, and a network namespace that can be cut off."""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import socket
import subprocess
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAME = re.compile(rb"application_name\x00([^\x00]*)\x00")


class FaultyProxy:
    """Forwards a TCP address to the Unix socket in `dsn`, on a thread of its own.

    Frozen connections are neither forwarded nor closed, as if packets were dropped. Connections are distinguished by
    their application_name.
    """

    def __init__(self, dsn: str, *, host: str = "127.0.0.1") -> None:
        parts = urlsplit(dsn)
        query = parse_qs(parts.query)
        self._socket = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"
        self._database = parts.path.lstrip("/")
        self._host = host
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="link")
        self._listening: socket.socket | None = None
        self._frozen: Callable[[str], bool] = _matches_nothing
        self._slowed: tuple[Callable[[str], bool], float] = (_matches_nothing, 0.0)
        self._refusal: bytes | None = None
        self._moved = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def dsn(self) -> str:
        """Return the DSN that connects through the proxy."""
        return f"postgresql://postgres@{self._host}:{self._port}/{self._database}"

    def __enter__(self) -> Self:
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self._run_on_loop(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def listen(self) -> None:
        """Accept connections, after refuse() on the same port."""
        self._run_on_loop(self._listen())

    def refuse(self) -> None:
        """Abort all connections and close the port, so that the kernel refuses new ones."""
        self._run_on_loop(self._close())

    def answer(self, sqlstate: str, message: str) -> None:
        """Abort all connections and answer new ones with this error."""
        fields = b"SFATAL\0VFATAL\0C" + sqlstate.encode() + b"\0M" + message.encode() + b"\0\0"
        self._run_on_loop(self._close())
        self._refusal = b"E" + (len(fields) + 4).to_bytes(4, "big") + fields
        self.listen()

    def heal(self) -> None:
        """Forward all connections again, without delay."""
        self._refusal = None
        self._slowed = (_matches_nothing, 0.0)
        self.freeze(_matches_nothing)
        self.listen()

    def freeze(self, which: Callable[[str], bool]) -> None:
        """Stop forwarding in both directions on old and new connections whose name matches."""
        self._frozen = which
        self._loop.call_soon_threadsafe(self._moved.set)

    def slow(self, which: Callable[[str], bool], seconds: float) -> None:
        """Delay the server's answers on connections whose name matches."""
        self._slowed = (which, seconds)

    def _run_on_loop(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)  # type: ignore[arg-type]  # always a coroutine

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.run_until_complete(asyncio.sleep(0))  # transports close in the next turn of the loop

    async def _listen(self) -> None:
        if self._listening is None:
            self._listening = socket.create_server((self._host, self._port))
            self._listening.setblocking(False)
            self._port = self._listening.getsockname()[1]
            self._loop.add_reader(self._listening, self._accept, self._listening)

    async def _close(self) -> None:
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for writer in self._writers:
            writer.transport.abort()
        for serving in self._serving:
            serving.cancel()

    def _accept(self, listening: socket.socket) -> None:
        # asyncio's server leaves a connection open that it accepts in the turn in which it is closed.
        with suppress(BlockingIOError):
            connected, _ = listening.accept()
            serving = self._loop.create_task(self._serve(connected))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
            serving.add_done_callback(lambda _: connected.close())

    async def _serve(self, connected: socket.socket) -> None:
        with ExitStack() as undo, suppress(OSError, EOFError):
            reader, writer = await asyncio.open_connection(sock=connected)
            self._hold(writer, undo)
            if self._refusal is not None:
                await _refuse(reader, writer, self._refusal)
                return
            onward, backward = await asyncio.open_unix_connection(self._socket)
            self._hold(backward, undo)
            name = [""]
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, backward, name, answers=False))
                pumps.create_task(self._pump(onward, writer, name, answers=True))

    def _hold(self, writer: asyncio.StreamWriter, undo: ExitStack) -> None:
        self._writers.add(writer)
        undo.callback(writer.close)
        undo.callback(self._writers.discard, writer)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, name: list[str], *, answers: bool
    ) -> None:
        try:
            while data := await source.read(65536):
                if not name[0] and (found := NAME.search(data)):
                    name[0] = found[1].decode()
                which, seconds = self._slowed
                if answers and which(name[0]):
                    with suppress(TimeoutError):
                        async with asyncio.timeout(seconds):
                            await asyncio.Event().wait()
                while self._frozen(name[0]):
                    self._moved.clear()
                    await self._moved.wait()
                target.write(data)
                await target.drain()
        except OSError:
            return
        finally:
            target.close()


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusal: bytes) -> None:
    """Answer the request for encryption with no, then send the error."""
    length = int.from_bytes(await reader.readexactly(4), "big")
    words = await reader.readexactly(length - 4)
    if length == 8 and int.from_bytes(words, "big") == 80877103:
        writer.write(b"N")
        length = int.from_bytes(await reader.readexactly(4), "big")
        await reader.readexactly(length - 4)
    writer.write(refusal)
    await writer.drain()


def _matches_nothing(_: str) -> bool:
    return False


def is_listener(name: str) -> bool:
    """Match the connections on which daemons listen."""
    return name.endswith("listener")


def is_heartbeat(name: str) -> bool:
    """Match the connections on which daemons extend leases."""
    return name.endswith("heartbeat")


def free_port() -> int:
    """Return an unused port that the kernel gives to no other process that asks for any port."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(lowest // 2, lowest), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port in a hundred tries")


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatedNetwork:
    """A network namespace connected to the main one by one virtual cable."""

    name: str
    cable: str
    address: str
    """Address of the main namespace, as seen from inside."""

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """Return the words that run a command inside the namespace."""
        return ("ip", "netns", "exec", self.name)

    def unreachable_address(self) -> str:
        """Return an address whose packets are dropped silently."""
        card = self.cable[:-1] + "b"
        _ip("-n", self.name, "route", "add", "203.0.113.0/24", "dev", card)
        _ip("-n", self.name, "neigh", "add", "203.0.113.1", "lladdr", "02:00:00:00:00:99", "dev", card)
        return "203.0.113.1"

    def add_host(self) -> str:
        """Return a second address of the main namespace, which go_dark() can cut off alone."""
        _ip("addr", "add", "203.0.113.2/32", "dev", self.cable)
        _ip("-n", self.name, "route", "add", "203.0.113.2/32", "dev", self.cable[:-1] + "b")
        return "203.0.113.2"

    def go_dark(self, host: str) -> None:
        """Drop all packets from and to this address silently."""
        card = self.cable[:-1] + "b"
        _ip("-n", self.name, "neigh", "replace", host, "lladdr", "02:00:00:00:00:99", "nud", "permanent", "dev", card)
        _ip("addr", "del", f"{host}/32", "dev", self.cable)

    def cut(self) -> None:
        """Drop all packets silently."""
        _ip("link", "set", self.cable, "down")

    def reconnect(self) -> None:
        """Restore the connection."""
        _ip("link", "set", self.cable, "up")


def reason_namespaces_unavailable() -> str | None:
    """Return why no namespace can be created here; None if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the package iproute2"
    name = f"rota-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are not allowed here: {tried.stderr.strip()}"
    _ip("netns", "del", name)
    return None


@contextmanager
def isolated_network() -> Iterator[IsolatedNetwork]:
    """Create a network namespace with documentation addresses for the block."""
    number = os.getpid() % 60
    name, outer_device, inner_device = (
        f"rota-{os.getpid()}",
        f"rota{os.getpid() % 100000}a",
        f"rota{os.getpid() % 100000}b",
    )
    outer_address, inner_address = f"198.51.100.{number * 4 + 1}", f"198.51.100.{number * 4 + 2}"
    with ExitStack() as undo:
        _ip("netns", "add", name)
        undo.callback(_ip, "netns", "del", name)
        _ip("link", "add", outer_device, "type", "veth", "peer", "name", inner_device, "netns", name)
        _ip("addr", "add", f"{outer_address}/30", "dev", outer_device)
        _ip("link", "set", outer_device, "up")
        _ip("-n", name, "addr", "add", f"{inner_address}/30", "dev", inner_device)
        _ip("-n", name, "link", "set", inner_device, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield IsolatedNetwork(name=name, cable=outer_device, address=outer_address)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
