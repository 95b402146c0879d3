"""rota: cron for a fleet, on the PostgreSQL that you already run."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rota.app import App
    from rota.client import Enqueued, enqueue, enqueue_many, enqueue_many_sync, enqueue_sync
    from rota.errors import InvalidPayload, Refused, RotaError, StaleToken
    from rota.handler_exceptions import Cancel, Hold, Permanent, Retry, Snooze
    from rota.handlers.job import Job, SyncJob

    __version__: str

__all__ = [
    "App",
    "Cancel",
    "Enqueued",
    "Hold",
    "InvalidPayload",
    "Job",
    "Permanent",
    "Refused",
    "Retry",
    "RotaError",
    "Snooze",
    "StaleToken",
    "SyncJob",
    "__version__",
    "enqueue",
    "enqueue_many",
    "enqueue_many_sync",
    "enqueue_sync",
]

_MODULES = {
    "rota.app": ("App",),
    "rota.client": ("Enqueued", "enqueue", "enqueue_many", "enqueue_many_sync", "enqueue_sync"),
    "rota.errors": ("InvalidPayload", "Refused", "RotaError", "StaleToken"),
    "rota.handler_exceptions": ("Cancel", "Hold", "Permanent", "Retry", "Snooze"),
    "rota.handlers.job": ("Job", "SyncJob"),
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that a command which needs none of them starts fast."""
    value: Any
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415  slow to import

        value = version("rota")
    else:
        from importlib import import_module  # noqa: PLC0415

        module = next((module for module, names in _MODULES.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
