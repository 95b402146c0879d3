"""`rota bench`: measure rota on a server. Each command creates its own database there, and drops it at the end."""

from rota.bench.commands import bench_app

__all__ = ["bench_app"]
