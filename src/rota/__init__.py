"""rota: cron for a fleet, on the PostgreSQL that you already run."""

from importlib.metadata import version

from rota.app import App
from rota.client import Enqueued, enqueue
from rota.errors import RotaError, StaleToken
from rota.job import Job, SyncJob
from rota.signals import Cancel, Permanent, Retry, Snooze

__version__ = version("rota")

__all__ = [
    "App",
    "Cancel",
    "Enqueued",
    "Job",
    "Permanent",
    "Retry",
    "RotaError",
    "Snooze",
    "StaleToken",
    "SyncJob",
    "__version__",
    "enqueue",
]
