"""Close the daemon's sockets in forked children: a child that inherits them would hold the port and database sessions open."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from functools import cache
from typing import Any

_owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def close_in_child(owner: Any, *sockets: Any) -> None:
    """Close these sockets in every plain fork of this process, for as long as `owner` lives."""
    _register()
    _owners[owner] = sockets


@cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for sockets in list(_owners.values()):
        for sock in sockets:
            # Close the descriptor, not the object: the object would also leave the epoll set, which is shared with the parent.
            with suppress(Exception):  # psycopg's fileno() raises its own error once the connection is closed
                if (number := sock.fileno()) >= 0:
                    os.close(number)
    _owners.clear()
