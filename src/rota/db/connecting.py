"""Open and close asyncpg connections within a time limit, trying all hosts of the URL."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import asyncpg
from asyncpg import connect_utils
from asyncpg.connect_utils import SessionAttribute

from rota.config.database_url import DatabaseUrl
from rota.db.sessions import UNACKNOWLEDGED_SECONDS
from rota.runtime.forks import close_in_child

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    Target = DatabaseUrl | str | None
    Address = str | tuple[str, int]

CONNECT_SECONDS = 9.0
"""Limit for opening a connection, for all hosts together. Shorter than a pool's limit, so that this error is raised."""

CLOSE_SECONDS = 2.0
"""Limit for closing. Over a dead network link, closing would never return."""

FIRST_TRY_SECONDS = 2.0
"""With several hosts, each gets this long at first. If none answers, each gets an equal share of the remaining time."""

UNRESPONSIVE_SECONDS = 30.0
"""For this long, a host that did not answer is tried last."""

_unresponsive_until: dict[Address, float] = {}


class NoServerFits(OSError):
    """Servers answered, but none accepts writes or matches target_session_attrs: a fail-over may be under way."""


FAILED = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""The errors that a connection attempt raises. OSError includes TimeoutError."""

LOGIN_REFUSED = (
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)

UNFIT = (NoServerFits, asyncpg.TargetServerAttributeNotMatched, asyncpg.ReadOnlySQLTransactionError)

WORTH_WAITING = (NoServerFits, asyncpg.TooManyConnectionsError, asyncpg.CannotConnectNowError)
"""A server answered and will probably accept the connection soon: during a fail-over, a start, or a shortage of connections."""


async def open_connection(
    target: Target,
    *,
    limit: float = CONNECT_SECONDS,
    accept: Callable[[Any], Awaitable[object]] | None = None,
    only: Address | None = None,
    **options: Any,
) -> asyncpg.Connection:
    """Connect to the first host that fits. Further options are passed to asyncpg.

    limit: seconds for all hosts together, divided among them
    accept: checks the new connection, and raises one of FAILED to try the next host
    only: connect to this one of `host_addresses`, and ignore target_session_attrs

    If no host fits and the file with the URL has changed, the new URL is tried. Raises NoServerFits, the error of a rejected
    login, or an OSError with the reason of each host.
    """
    url = target if isinstance(target, DatabaseUrl) else DatabaseUrl(target or "")
    try:
        conn = await _try_hosts(url, limit, accept, only, options)
    except asyncpg.ClientConfigurationError:
        raise
    except FAILED:
        if not url.reload():
            raise
        conn = await _try_hosts(url, limit, accept, only, options)
    transport: Any = getattr(conn, "_transport")  # noqa: B009  the driver has no public name for it
    link = transport.get_extra_info("socket")
    close_in_child(conn, link)
    _limit_silence(link)
    return conn


async def close_connection(conn: asyncpg.Connection) -> None:
    """Close the connection within a time limit. Over a dead network link it is dropped."""
    with suppress(*FAILED):
        await conn.close(timeout=CLOSE_SECONDS)


def mark_unresponsive(conn: Any) -> None:
    """Try the other hosts of the URL first for some time, because a statement on this connection got no answer."""
    _unresponsive_until[conn._addr] = time.monotonic() + UNRESPONSIVE_SECONDS  # noqa: SLF001


def _limit_silence(link: Any) -> None:
    """Drop the connection when the other machine has acknowledged nothing for UNACKNOWLEDGED_SECONDS, idle or not."""
    if link.family not in {socket.AF_INET, socket.AF_INET6}:
        return
    with socket.socket(fileno=os.dup(link.fileno())) as copy:  # uvloop's sockets have no setsockopt()
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(UNACKNOWLEDGED_SECONDS / 2))
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNACKNOWLEDGED_SECONDS * 1000))


def host_addresses(target: Target) -> list[Address]:
    """Return the addresses of the URL's hosts in order: (name, port), or the path of a socket."""
    url = target if isinstance(target, DatabaseUrl) else DatabaseUrl(target or "")
    addresses, _ = _parse_dsn(url.dsn or None)
    return list(addresses)


def address_text(address: Address) -> str:
    """Format an address for messages."""
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


async def _try_hosts(
    url: DatabaseUrl,
    limit: float,
    accept: Callable[[Any], Awaitable[object]] | None,
    only: Address | None,
    options: dict[str, Any],
) -> asyncpg.Connection:
    dsn = url.dsn or None
    addresses, parameters = _parse_dsn(dsn)
    wanted: SessionAttribute = parameters.target_session_attrs
    if only is not None:
        addresses, wanted = [only], SessionAttribute.any
    attributes = [wanted]
    if wanted == SessionAttribute.prefer_standby:  # with a single host, the driver would accept any server
        attributes = [SessionAttribute.standby, SessionAttribute.any]
    attempts = [(address, attribute) for attribute in attributes for address in sorted(addresses, key=_is_unresponsive)]
    deadline = time.monotonic() + limit
    failures: list[tuple[Address, Exception]] = []
    host_limits = [FIRST_TRY_SECONDS, limit] if len(attempts) > 1 else [limit]
    if url.connect_timeout:
        host_limits = [url.connect_timeout]
    for host_limit in host_limits:
        unanswered = []
        for number, (address, attribute) in enumerate(attempts):
            share = (deadline - time.monotonic()) / (len(attempts) - number)
            if address in _unresponsive_until:  # other callers skip the host until this attempt has ended
                _unresponsive_until[address] = time.monotonic() + UNRESPONSIVE_SECONDS
            host, port = (address, 5432) if isinstance(address, str) else address
            try:
                async with asyncio.timeout(max(0.1, min(share, host_limit))):
                    conn: asyncpg.Connection = await asyncpg.connect(
                        dsn,
                        host=host,
                        port=port,
                        # Looked up before, because the password file is matched against all hosts of the URL.
                        password=parameters.password,
                        target_session_attrs=attribute,
                        **options,
                    )
                    try:
                        if accept is not None:
                            await accept(conn)
                    except BaseException:
                        conn.terminate()
                        raise
            except FAILED as error:
                if isinstance(error, TimeoutError):
                    _unresponsive_until[address] = time.monotonic() + UNRESPONSIVE_SECONDS
                    unanswered.append((address, attribute))
                failures.append((address, error))
            else:
                _unresponsive_until.pop(address, None)
                return conn
        attempts = unanswered
    raise _combined_error(failures)


def _parse_dsn(dsn: str | None) -> tuple[Sequence[Address], Any]:
    connection_names = (
        "host",
        "port",
        "user",
        "password",
        "passfile",
        "database",
        "ssl",
        "service",
        "servicefile",
        "direct_tls",
    )
    other_names = ("server_settings", "target_session_attrs", "krbsrvname", "gsslib")
    parsed: tuple[Sequence[Address], Any] = connect_utils._parse_connect_dsn_and_args(  # type: ignore[attr-defined]  # noqa: SLF001
        dsn=dsn, **dict.fromkeys((*connection_names, *other_names))
    )
    return parsed


def _is_unresponsive(address: Address) -> bool:
    return time.monotonic() < _unresponsive_until.get(address, 0.0)


def _combined_error(failures: list[tuple[Address, Exception]]) -> Exception:
    """Return the one error to raise for the failures of all hosts."""
    for _, error in failures:
        if isinstance(error, LOGIN_REFUSED):
            return error
    reasons = [(address_text(address), _failure_reason(error)) for address, error in failures]
    text = "; ".join(f"{address}: {reason}" for address, reason in dict(reasons).items())
    if any(isinstance(error, UNFIT) for _, error in failures):
        return NoServerFits(text)
    for _, error in failures:
        if len(failures) == 1 or isinstance(error, WORTH_WAITING):
            return error
    return OSError(text)


def _failure_reason(error: Exception) -> str:
    match error:
        case asyncpg.TargetServerAttributeNotMatched():
            return "does not fit target_session_attrs"
        case TimeoutError():
            return "no answer in time"
        case _:
            return (str(error.args[0]) if error.args else "") or type(error).__name__
