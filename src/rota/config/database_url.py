"""A database URL that may change while the daemon runs: it is read again from its file when a connection fails."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECT_TIMEOUT = re.compile(r"(?<=[?&])connect_timeout=(\d+)(?:&|$)")

_MIN_CONNECT_TIMEOUT_SECONDS = 2.0
"""As in libpq: a shorter one would fail on an ordinary network."""


class DatabaseUrl:
    """Where a database is, and how to log in there. Shared by all connections of the process, from any thread."""

    def __init__(self, url: str, read: Callable[[], str] | None = None) -> None:
        """`read` returns the URL as its file holds it now. It may raise OSError, ValueError or LookupError."""
        self._read = read
        self._url = url

    @property
    def url(self) -> str:
        """The URL as it was written, password included."""
        return self._url

    @property
    def dsn(self) -> str:
        """The URL for the driver, password included, without `connect_timeout`, which the driver would send to the server."""
        return _CONNECT_TIMEOUT.sub("", self._url).rstrip("?&")

    @property
    def connect_timeout(self) -> float | None:
        """Seconds that one host may take to accept a connection, if the URL says so. libpq's 0, no limit, counts as unset."""
        found = _CONNECT_TIMEOUT.search(self._url)
        if found is None or not int(found[1]):
            return None
        return max(_MIN_CONNECT_TIMEOUT_SECONDS, float(found[1]))

    def reload(self) -> bool:
        """Read the file again, if there is one; return whether the URL changed. Keeps the old one while the file is unusable."""
        if self._read is None:
            return False
        try:
            url = self._read()
        except (OSError, ValueError, LookupError):
            return False
        self._url, before = url, self._url
        return url != before
