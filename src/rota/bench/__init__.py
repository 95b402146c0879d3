"""`rota bench`: what rota does on a given database, and what that database could do at best.

`drain` empties a backlog with real daemons, `latency` measures how long a single job waits, `floor` runs the two statements
of a job's life alone; `stored` looks at many schedules of which none is due, `spike` has many fall due at one instant; `scrape`
reads /metrics beside many names that nobody knows. Each works in a database of its own, which it makes and drops on the server
it is given; nobody's schema is touched.
"""

from rota.bench.commands import bench_app

__all__ = ["bench_app"]
