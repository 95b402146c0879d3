"""The metrics of one daemon: what they are called, by which labels they are parted, and what they say of themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

_DELAYS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 3600)


class Histogram(Collector):
    """A histogram that takes many observations at once: the client library's own costs more than running a small job."""

    def __init__(self, name: str, documentation: str, label: str | None = None) -> None:
        self._family = (name, documentation, [label] if label else [])
        self._counts: defaultdict[str, list[int]] = defaultdict(lambda: [0] * (len(_DELAYS) + 1))
        self._sums: defaultdict[str, float] = defaultdict(float)
        if not label:
            self._counts[""] = [0] * (len(_DELAYS) + 1)

    def observe(self, seconds: Iterable[float], label: str = "") -> None:
        """Count these observations."""
        counts = self._counts[label]
        total = 0.0
        for value in seconds:
            counts[bisect_left(_DELAYS, value)] += 1
            total += value
        self._sums[label] += total

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return them for a scrape."""
        name, documentation, labels = self._family
        family = HistogramMetricFamily(name, documentation, labels=labels)
        for label, counts in list(self._counts.items()):
            running, buckets = 0, []
            for bound, count in zip([*map(str, _DELAYS), "+Inf"], counts, strict=True):
                running += count
                buckets.append((bound, running))
            family.add_metric([label] if labels else [], buckets, self._sums[label])
        yield family


class SampledGauge(Gauge):
    """A gauge of the whole installation, which is not shown while its sample is too old."""

    hidden = False

    def collect(self) -> Iterable[Metric]:
        """Return its values for a scrape; nothing while it is hidden."""
        return [] if self.hidden else super().collect()


class Metrics:
    """All of them, in a registry of their own. `telemetry` alone moves them."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = r = CollectorRegistry()
        self.claimed = Counter("rota_claimed", "Jobs claimed by this daemon.", ["queue"], registry=r)
        self.settled = Counter("rota_settled", "Attempts settled.", ["queue", "handler", "settlement"], registry=r)
        self.failed = Counter("rota_attempts_failed", "Attempts that did not succeed.", ["handler", "kind"], registry=r)
        self.lost = Counter("rota_leases_lost", "Leases that this daemon lost while it ran the job.", registry=r)
        self.stale = Counter("rota_stale_writes", "Writes refused because their fence token was stale.", registry=r)
        self.reaped = Counter("rota_reaped", "Expired leases taken back from whoever held them.", registry=r)
        self.start_delay = Histogram("rota_start_delay_seconds", "From the instant a job was due to its start.")
        self.run_seconds = Histogram("rota_run_seconds", "How long attempts ran.", "handler")
        self.fires = Counter("rota_fires", "Fires of schedules, by what became of them.", ["disposition"], registry=r)
        self.lateness = Histogram(
            "rota_fire_lateness_seconds", "From the instant a fire was due to the moment its job was enqueued."
        )
        for histogram in (self.start_delay, self.run_seconds, self.lateness):
            r.register(histogram)
        self.slots = Gauge("rota_slots", "Slots of this daemon.", ["queue", "state"], registry=r)
        self.loop_lag = Gauge(
            "rota_loop_lag_seconds", "How late the main loop turned, at worst in half a minute.", registry=r
        )
        self.listener_up = Gauge("rota_listener_up", "1 while notifications can arrive.", registry=r)
        self.service_age = Gauge(
            "rota_service_age_seconds", "Since the service last succeeded.", ["service"], registry=r
        )
        self.lock_wait = Gauge(
            "rota_lock_wait_seconds",
            "How long this daemon has been waiting for a lock that another session holds; 0 if it isn't.",
            registry=r,
        )
        cluster = "Of the whole installation: aggregate with max, not sum."
        self.oldest_due = SampledGauge(
            "rota_oldest_due_seconds", f"Age of the oldest due job. {cluster}", ["queue", "priority"], registry=r
        )
        self.oldest_running = SampledGauge(
            "rota_oldest_running_seconds", f"Age of the attempt that runs longest. {cluster}", ["queue"], registry=r
        )
        self.jobs = SampledGauge("rota_jobs", f"Jobs by state. {cluster}", ["queue", "state"], registry=r)
        self.jobs_capped = SampledGauge(
            "rota_jobs_capped",
            f"1 while there are too many jobs to count, so that rota_jobs is a lower bound. {cluster}",
            registry=r,
        )
        self.dead = SampledGauge("rota_dead_letters", f"Dead letters. {cluster}", ["queue"], registry=r)
        self.oldest_dead = SampledGauge("rota_oldest_dead_letter_seconds", f"Age of the oldest. {cluster}", registry=r)
        self.expired = SampledGauge("rota_leases_expired", f"Expired and not yet reaped. {cluster}", registry=r)
        self.unclaimable = SampledGauge(
            "rota_jobs_unclaimable", f"Due jobs whose handler no living node has. {cluster}", registry=r
        )
        self.unserved = SampledGauge(
            "rota_jobs_unserved",
            f"Due jobs whose queue no living node that has their handler serves. {cluster}",
            registry=r,
        )
        self.schedules = SampledGauge(
            "rota_schedules",
            f"Schedules: ok (those at their end, too), invalid, paused, or overdue: due for 30 s and not decided. {cluster}",
            ["state"],
            registry=r,
        )
        self.last_success = SampledGauge(
            "rota_schedule_last_success_timestamp_seconds",
            "When the last success of a schedule with expect_success_within was, or its creation. Those that code declares by "
            f"name; of all others the one that has waited longest, as other. {cluster}",
            ["schedule"],
            registry=r,
        )
        self.paused = SampledGauge("rota_paused", f"1 while it is paused. {cluster}", ["kind", "name"], registry=r)
        self.oldest_snapshot = SampledGauge(
            "rota_oldest_snapshot_seconds",
            f"Age of the oldest snapshot or prepared transaction that this login sees; it keeps dead rows. {cluster}",
            registry=r,
        )
        self.dead_tuples = SampledGauge("rota_dead_tuples", f"Dead rows of a table. {cluster}", ["table"], registry=r)
        self.log_dropped = Counter(
            "rota_log_lines_dropped", "Lines of the log dropped because its reader is too slow.", registry=r
        )
        self.loop_crashes = Counter(
            "rota_loop_crashes",
            "Unexpected exceptions in a loop of this daemon, which was restarted.",
            ["loop"],
            registry=r,
        )
        self.housekeeping_age = SampledGauge(
            "rota_housekeeping_age_seconds",
            f"Since a piece of housekeeping last succeeded, on whichever daemon. {cluster}",
            ["piece"],
            registry=r,
        )
        self.nodes = SampledGauge(
            "rota_nodes",
            f"Daemons: running, draining, or lost within a day (vanished, and not replaced). {cluster}",
            ["state"],
            registry=r,
        )
        self.sample_age = Gauge("rota_sample_age_seconds", "Age of the sampled gauges.", registry=r)
        self.build = Gauge("rota_build_info", "Always 1.", ["version", "release", "tzdata"], registry=r)

    def hide_sampled(self, hidden: bool) -> None:
        """Hide the sampled gauges, or show them again."""
        for gauge in vars(self).values():
            if isinstance(gauge, SampledGauge):
                gauge.hidden = hidden
