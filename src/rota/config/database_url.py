"""A database URL that is read again from its file when a connection fails, so that passwords can change at run time."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_CONNECT_TIMEOUT = re.compile(r"(?<=[?&])connect_timeout=(\d+)(?:&|$)")

_MIN_CONNECT_TIMEOUT_SECONDS = 2.0
"""libpq raises shorter timeouts to this."""


class DatabaseUrl:
    """The URL of a database. All connections of the process share it, on any thread."""

    def __init__(self, url: str, read: Callable[[], str] | None = None) -> None:
        """`read` returns the current URL from its file. It may raise OSError, ValueError or LookupError."""
        self._read = read
        self._url = url

    @property
    def url(self) -> str:
        """The configured URL, with the password."""
        return self._url

    @property
    def dsn(self) -> str:
        """The URL for the driver, with the password. It omits `connect_timeout`, which the driver would send to the server."""
        return _CONNECT_TIMEOUT.sub("", self._url).rstrip("?&")

    @property
    def connect_timeout(self) -> float | None:
        """Seconds for connecting to one host, None if the URL doesn't set it. 0 (no limit in libpq) counts as unset."""
        match = _CONNECT_TIMEOUT.search(self._url)
        if match is None or not int(match[1]):
            return None
        return max(_MIN_CONNECT_TIMEOUT_SECONDS, float(match[1]))

    def reload(self) -> bool:
        """Read the file again, and return whether the URL changed. Keeps the old URL if the file can't be read."""
        if self._read is None:
            return False
        try:
            url = self._read()
        except (OSError, ValueError, LookupError):
            return False
        self._url, old_url = url, self._url
        return url != old_url
