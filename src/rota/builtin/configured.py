"""Handlers that the configuration alone declares: `http`, `http.<name>`, `command.<name>`, `sql.<name>`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rota.app import App
from rota.builtin.command import run_command
from rota.builtin.http import send_anywhere, send_to
from rota.builtin.sql import execute_statement

if TYPE_CHECKING:
    from collections.abc import Callable

    from rota.config import Handlers, HandlerSettings


def configured(handlers: Handlers) -> App:
    """Return an app with the handlers that the configuration turns on; by default none."""
    app = App("rota")
    if handlers.http is not None:
        if handlers.http.any_url:
            _declare(app, "http", handlers.http, send_anywhere(handlers.http))
        for name, endpoint in handlers.http.endpoints.items():
            _declare(app, f"http.{name}", endpoint, send_to(endpoint))
    for name, command in (handlers.command or {}).items():
        _declare(app, f"command.{name}", command, run_command(command))
    for name, statement in (handlers.sql or {}).items():
        _declare(app, f"sql.{name}", statement, execute_statement(statement))
    return app


def _declare(app: App, name: str, settings: HandlerSettings, function: Callable[[Any], Any]) -> None:
    app.handler(name, queue=settings.queue, timeout=settings.timeout, max_attempts=settings.max_attempts)(function)
