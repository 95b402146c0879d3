"""Send HTTP requests as jobs: to an endpoint of the configuration, or, if turned on, to any public address.

The address is checked when the socket is created, so a name that resolves to a private network gets no connection, even if it
resolved to a public address before. Redirects are not followed, and proxy variables of the environment are ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import socket
import time
from base64 import b64decode, b64encode
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
from pydantic import BaseModel, ConfigDict, Field
from yarl import URL

from rota.domain.job import instant
from rota.domain.payload import storable_text
from rota.handler_exceptions import Permanent, Retry
from rota.handlers.job import Job  # noqa: TC001  the codec reads the annotations at run time

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from rota.config import Endpoint, HttpJobs

    Send = Callable[[Job[Any]], Coroutine[Any, Any, dict[str, Any]]]

MAX_BODY_BYTES = 2000
"""The most bytes of a response body kept in the job's result. Escaping may double them."""

EXCERPT_SECONDS = 5.0
"""The limit for reading a body, counted from the arrival of the status."""

_INVALID_IN_NAME = re.compile(r"[^!#$%&'*+.^_`|~0-9A-Za-z-]")
_INVALID_IN_VALUE = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")

_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        *("0.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15"),
        *("224.0.0.0/4", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
        # Public numbers that cloud providers route to services of their own platform: Azure, IBM Cloud (2), Google Cloud (2).
        *("168.63.129.16/32", "161.26.0.0/16", "166.8.0.0/14", "199.36.153.4/30", "199.36.153.8/30"),
    )
]
"""Networks refused in addition to those that the ipaddress module calls private, a list that differs between Python versions."""


class PrivateAddress(Permanent):
    """The URL leads to an address that is not public."""


class Unsuccessful(Exception):
    """The response had no status from 200 to 299."""


class Request(BaseModel):
    """The payload of `http`."""

    model_config = ConfigDict(extra="forbid")

    url: str = Field(pattern=r"^https?://")
    method: Literal["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] = "POST"
    headers: dict[str, str] = Field(default_factory=dict)
    body: Any = Field(default=None, alias="json")


class Message(BaseModel):
    """The payload of `http.<name>`: the request body and headers, and a path below the endpoint's URL."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(default="", pattern=r"^[^/\\]*[^\\]*$")
    headers: dict[str, str] = Field(default_factory=dict)
    body: Any = Field(default=None, alias="json")


def send_anywhere(settings: HttpJobs) -> Send:
    """Return the handler `http`, which accepts every URL with a public address."""

    async def http(job: Job[Request]) -> dict[str, Any]:
        request = job.payload
        body = None if request.body is None else json.dumps(request.body, ensure_ascii=False).encode()
        headers = request.headers | _job_headers(job)
        return await _send(request.method, request.url, body, headers, permanent=settings.permanent, private=False)

    return http


def send_to(endpoint: Endpoint) -> Send:
    """Return the handler of one endpoint."""

    async def http(job: Job[Message]) -> dict[str, Any]:
        message = job.payload
        url = _url_below(endpoint.url, message.path)
        body = None if message.body is None else json.dumps(message.body, ensure_ascii=False).encode()
        configured_headers = {name: value.get_secret_value() for name, value in endpoint.headers.items()}
        # The configuration's headers win: a client that inserts jobs must not replace its credentials.
        headers = _drop_reserved(message.headers, configured_headers) | configured_headers | _job_headers(job)
        if endpoint.secret is not None:
            headers |= signature(endpoint.secret.get_secret_value(), job.idempotency_key, body or b"", now=time.time())
        return await _send(endpoint.method, url, body, headers, permanent=endpoint.permanent, private=endpoint.private)

    return http


def signature(secret: str, idempotency_key: str, body: bytes, *, now: float) -> dict[str, str]:
    """Return the headers of Standard Webhooks. The id is the same for every attempt, so a receiver can detect repetitions."""
    identity = "msg_" + hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]
    stamp = str(int(now))
    key = b64decode(secret.removeprefix("whsec_"))
    signed = hmac.new(key, f"{identity}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return {
        "webhook-id": identity,
        "webhook-timestamp": stamp,
        "webhook-signature": "v1," + b64encode(signed).decode(),
    }


def is_public(address: str) -> bool:
    """Return whether an address is on the public internet. An IPv4 address mapped or translated to IPv6 counts as itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return is_public(str(parsed.ipv4_mapped))
        if parsed in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        if parsed not in _GLOBAL_UNICAST:
            return False
    return parsed.is_global and not any(parsed in network for network in _NOT_PUBLIC)


def _socket_to_public_address(address: Any) -> socket.socket:
    family, kind, protocol, _, where = address
    if not is_public(where[0]):
        raise PrivateAddress(
            "the URL leads to an address that is not public: an endpoint with private = true may go there"
        )
    return socket.socket(family, kind, protocol)


async def _send(
    method: str, url: str, body: bytes | None, headers: dict[str, str], *, permanent: frozenset[int], private: bool
) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(socket_factory=None if private else _socket_to_public_address, force_close=True)
    headers = {"Content-Type": "application/json"} | headers if body is not None else headers
    for name, value in headers.items():
        if not name or _INVALID_IN_NAME.search(name) or _INVALID_IN_VALUE.search(value):
            raise Permanent(f"{name[:60]!r} and its value can be no header of a request")
    try:
        return await _exchange(connector, method, url, body=body, headers=headers, permanent=permanent)
    except aiohttp.InvalidURL:
        raise Permanent("the URL can't be used") from None


async def _exchange(
    connector: aiohttp.TCPConnector,
    method: str,
    url: str,
    *,
    body: bytes | None,
    headers: dict[str, str],
    permanent: frozenset[int],
) -> dict[str, Any]:
    async with (
        # No timeout here: the job's own timeout applies.
        aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(), cookie_jar=aiohttp.DummyCookieJar()
        ) as session,
        session.request(method, url, data=body, headers=headers, allow_redirects=False) as response,
    ):
        if 200 <= response.status < 300:
            excerpt = (await _excerpt(response.content)).decode("utf-8", "backslashreplace")
            return {"status": response.status, "body": storable_text(excerpt, 2 * MAX_BODY_BYTES)}
        host = urlsplit(url).hostname
        message = f"{host} answered with status {response.status}"
        if response.status in permanent:
            raise Permanent(message)
        if (after := _retry_after(response.headers)) is not None:
            raise Retry(after=after) from Unsuccessful(message)
        raise Unsuccessful(message)


async def _excerpt(content: aiohttp.StreamReader) -> bytes:
    """Return the first MAX_BODY_BYTES bytes of a body, or the part that arrived in time.

    The status already decided the attempt, so a body that breaks off must not cause a second request.
    """
    excerpt = bytearray()
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(EXCERPT_SECONDS):
            while len(excerpt) < MAX_BODY_BYTES and (piece := await content.read(MAX_BODY_BYTES - len(excerpt))):
                excerpt += piece
    return bytes(excerpt)


def _job_headers(job: Job[Any]) -> dict[str, str]:
    return {
        "Idempotency-Key": job.idempotency_key,
        "Rota-Fence-Token": str(job.fence_token),
        "Rota-Attempt": str(job.attempt),
        "Rota-Scheduled-For": instant(job.scheduled_for),
    }


def _drop_reserved(headers: dict[str, str], configured: Mapping[str, str]) -> dict[str, str]:
    reserved = {name.lower() for name in configured} | {"host", "content-length", "transfer-encoding"}
    return {
        name: value
        for name, value in headers.items()
        if name.lower() not in reserved and not name.lower().startswith("webhook-")
    }


def _url_below(url: str, path: str) -> str:
    """Return the URL of a path below an endpoint. Raises Permanent for one that leads out of it."""
    if not path:
        return url
    base = url if url.endswith("/") else url + "/"
    target = urljoin(base, path)
    # Check it also as it is sent, and with escapes decoded as some servers do: %2e%2e leads up too.
    sent, decoded = str(URL(target)), urljoin(base, "./" + unquote(path).replace("\\", "/"))
    if not (target.startswith(base) and sent.startswith(str(URL(base))) and decoded.startswith(base)):
        raise Permanent("the path leads out of the endpoint")
    return target


def _retry_after(headers: Mapping[str, str]) -> timedelta | None:
    """Return the delay of a Retry-After header, at most a day. A date is compared with the server's own Date."""
    text = headers.get("Retry-After", "").strip()
    try:
        if text.isdecimal():
            delay = timedelta(seconds=int(text))
        else:
            now = parsedate_to_datetime(headers["Date"]) if "Date" in headers else datetime.now(UTC)
            delay = parsedate_to_datetime(text) - now
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(delay, timedelta(0)), timedelta(days=1))
