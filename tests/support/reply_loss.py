"""A proxy that loses replies: the server executes the statement, and the client gets no answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

READY = ord("Z")


class LossyProxy:
    """Forwards connections.

    It closes a connection with a marked statement after the server has answered the statement.
    """

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        query = parse_qs(parts.query)
        self._database = parts.path.lstrip("/")
        self._user = parts.username or query.get("user", ["postgres"])[0]
        self._host = query["host"][0] if "host" in query else (parts.hostname or "localhost")
        self._port = int(query["port"][0] if "port" in query else (parts.port or 5432))
        self._marked: tuple[bytes, int] | None = None
        self._silent = False
        self.lost_replies = 0
        """Replies lost so far."""
        self.dsn = ""

    def lose_replies_to(self, marker: str, *, times: int = 1, silent: bool = False) -> None:
        """Lose the replies to the next statements that contain `marker`. With `silent`, the connection stays open."""
        self._marked = (marker.encode(), times)
        self._silent = silent

    async def listen(self) -> asyncio.Server:
        """Accept connections on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        self.dsn = f"postgresql://{self._user}@127.0.0.1:{port}/{self._database}?sslmode=disable"
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._host.startswith("/"):
            server_reader, backward = await asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._port}")
        else:
            server_reader, backward = await asyncio.open_connection(self._host, self._port)
        swallow = asyncio.Event()
        try:
            with suppress(OSError, asyncio.IncompleteReadError, ExceptionGroup):
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._requests(reader, backward, swallow))
                    pumps.create_task(self._answers(server_reader, writer, swallow))
        finally:
            backward.transport.abort()
            writer.transport.abort()

    async def _requests(
        self, reader: asyncio.StreamReader, backward: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        statements: dict[bytes, bytes] = {}
        start = await reader.readexactly(4)
        backward.write(start + await reader.readexactly(int.from_bytes(start, "big") - 4))
        while True:
            head = await reader.readexactly(5)
            body = await reader.readexactly(int.from_bytes(head[1:], "big") - 4)
            text = b""
            match head[:1]:
                case b"P":
                    name, _, after_name = body.partition(b"\0")
                    statements[name] = after_name.partition(b"\0")[0]
                case b"B":
                    text = statements.get(body.split(b"\0")[1], b"")
                case b"Q":
                    text = body
                case _:
                    pass
            if text and self._marked is not None and self._marked[0] in text:
                self._marked = (self._marked[0], self._marked[1] - 1) if self._marked[1] > 1 else None
                swallow.set()
            backward.write(head + body)
            await backward.drain()

    async def _answers(
        self, server_reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallow: asyncio.Event
    ) -> None:
        while True:
            head = await server_reader.readexactly(5)
            body = await server_reader.readexactly(int.from_bytes(head[1:], "big") - 4)
            if not swallow.is_set():
                writer.write(head + body)
                await writer.drain()
            elif head[0] == READY:  # the statement is executed, and committed unless a transaction is open
                self.lost_replies += 1
                if not self._silent:
                    raise ConnectionAbortedError


@asynccontextmanager
async def lossy_proxy(dsn: str) -> AsyncIterator[LossyProxy]:
    """Run a proxy during the block; connect through its `.dsn`."""
    made = LossyProxy(dsn)
    server = await made.listen()
    try:
        yield made
    finally:
        server.close()
