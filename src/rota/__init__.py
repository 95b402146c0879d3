"""rota: cron for a fleet, on the PostgreSQL that you already run."""

from importlib.metadata import version

from rota.app import App
from rota.client import Enqueued, enqueue, enqueue_many, enqueue_many_sync, enqueue_sync
from rota.errors import InvalidPayload, Refused, RotaError, StaleToken
from rota.handler_exceptions import Cancel, Permanent, Retry, Snooze
from rota.handlers.job import Job, SyncJob

__version__ = version("rota")

__all__ = [
    "App",
    "Cancel",
    "Enqueued",
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
