"""`rota bench`: measure rota on a given server, and the best that this server could do.

`drain` empties a backlog with real daemons, `latency` measures how long a single job waits, `enqueue` inserts many jobs, and
`floor` runs only the claim and the settlement. `stored` polls many schedules of which none is due, `spike` makes many due at one
instant. `scrape` reads /metrics while many jobs have unknown names, `priority` sends urgent jobs behind a backlog. Each creates a
database of its own on the server and drops it at the end.
"""

from rota.bench.commands import bench_app

__all__ = ["bench_app"]
