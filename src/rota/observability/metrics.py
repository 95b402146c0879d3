"""The metrics of one daemon: names, labels and help texts."""

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
        """Return the buckets and sums for a scrape."""
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
    """A gauge of the whole installation. It is hidden while its sample is too old."""

    hidden = False

    def collect(self) -> Iterable[Metric]:
        """Return the values for a scrape, or nothing while the gauge is hidden."""
        return [] if self.hidden else super().collect()


class Metrics:
    """All metrics, in their own registry. Only `telemetry` updates them."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = r = CollectorRegistry()
        self.claimed = Counter("rota_claimed", "Jobs claimed by this daemon.", ["queue"], registry=r)
        self.settled = Counter("rota_settled", "Attempts settled.", ["queue", "handler", "settlement"], registry=r)
        self.failed = Counter("rota_attempts_failed", "Attempts that did not succeed.", ["handler", "kind"], registry=r)
        self.lost = Counter("rota_leases_lost", "Leases that this daemon lost while it ran the job.", registry=r)
        self.stale = Counter("rota_stale_writes", "Writes refused because their fence token was stale.", registry=r)
        self.reaped = Counter("rota_reaped", "Expired leases taken back by this daemon's reaper.", registry=r)
        self.start_delay = Histogram("rota_start_delay_seconds", "Seconds from the instant a job was due to its start.")
        self.limit_wait = Histogram(
            "rota_limit_wait_seconds", "Seconds from the instant a job under a limit was due to its start."
        )
        self.run_seconds = Histogram("rota_run_seconds", "How long attempts ran.", "handler")
        self.fires = Counter("rota_fires", "Fires of schedules by disposition.", ["disposition"], registry=r)
        self.lateness = Histogram(
            "rota_fire_lateness_seconds", "Seconds from the instant a fire was due until its job was enqueued."
        )
        for histogram in (self.start_delay, self.limit_wait, self.run_seconds, self.lateness):
            r.register(histogram)
        self.slots = Gauge("rota_slots", "Slots of this daemon.", ["queue", "state"], registry=r)
        self.loop_lag = Gauge(
            "rota_loop_lag_seconds", "The longest delay of the main loop in the last half minute.", registry=r
        )
        self.listener_up = Gauge("rota_listener_up", "1 while notifications can arrive, else 0.", registry=r)
        self.service_age = Gauge(
            "rota_service_age_seconds", "Seconds since the service last succeeded.", ["service"], registry=r
        )
        self.lock_wait = Gauge(
            "rota_lock_wait_seconds",
            "How long this daemon has waited for a lock that another session holds; 0 if it does not wait.",
            registry=r,
        )
        cluster = "Counts the whole installation: aggregate with max, not sum."
        self.oldest_due = SampledGauge(
            "rota_oldest_due_seconds", f"Age of the oldest due job. {cluster}", ["queue", "priority"], registry=r
        )
        self.oldest_running = SampledGauge(
            "rota_oldest_running_seconds", f"Age of the longest running attempt. {cluster}", ["queue"], registry=r
        )
        self.jobs = SampledGauge("rota_jobs", f"Jobs by state. {cluster}", ["queue", "state"], registry=r)
        self.jobs_limited = SampledGauge(
            "rota_jobs_limited",
            f"Due jobs that a limit or hold applies to. They are not counted in rota_jobs. {cluster}",
            ["queue"],
            registry=r,
        )
        self.jobs_capped = SampledGauge(
            "rota_jobs_capped",
            f"1 while there are too many jobs to count: rota_jobs is then a lower bound. {cluster}",
            registry=r,
        )
        self.dead = SampledGauge("rota_dead_letters", f"Dead letters. {cluster}", ["queue"], registry=r)
        self.oldest_dead = SampledGauge(
            "rota_oldest_dead_letter_seconds", f"Age of the oldest dead letter. {cluster}", registry=r
        )
        self.expired = SampledGauge(
            "rota_leases_expired", f"Leases that have expired and are not reaped yet. {cluster}", registry=r
        )
        self.unclaimable = SampledGauge(
            "rota_jobs_unclaimable", f"Due jobs whose handler no living node has. {cluster}", registry=r
        )
        self.unserved = SampledGauge(
            "rota_jobs_unserved",
            f"Due jobs whose queue is not served by any living node that has their handler. {cluster}",
            registry=r,
        )
        self.schedules = SampledGauge(
            "rota_schedules",
            f"Schedules by state: ok (ended ones included), invalid, paused, or overdue (due for 30 s and not decided). {cluster}",
            ["state"],
            registry=r,
        )
        self.last_success = SampledGauge(
            "rota_schedule_last_success_timestamp_seconds",
            "Time of the last success of a schedule with expect_success_within, else of its creation. A schedule declared in "
            f"code has its own series; `other` is the oldest time of all remaining schedules. {cluster}",
            ["schedule"],
            registry=r,
        )
        self.paused = SampledGauge(
            "rota_paused",
            f"1 while the queue, handler or schedule set is paused. {cluster}",
            ["kind", "name"],
            registry=r,
        )
        self.oldest_snapshot = SampledGauge(
            "rota_oldest_snapshot_seconds",
            f"Age of the oldest snapshot or prepared transaction that this login sees. It prevents vacuum. {cluster}",
            registry=r,
        )
        self.dead_tuples = SampledGauge("rota_dead_tuples", f"Dead rows of a table. {cluster}", ["table"], registry=r)
        self.log_dropped = Counter(
            "rota_log_lines_dropped", "Log lines dropped because the log's reader is too slow.", registry=r
        )
        self.loop_crashes = Counter(
            "rota_loop_crashes",
            "Crashes of a loop of this daemon by an unexpected exception. The loop was restarted.",
            ["loop"],
            registry=r,
        )
        self.housekeeping_age = SampledGauge(
            "rota_housekeeping_age_seconds",
            f"Seconds since a piece of housekeeping last succeeded on any daemon. {cluster}",
            ["piece"],
            registry=r,
        )
        self.nodes = SampledGauge(
            "rota_nodes",
            f"Daemons: running, draining, or lost (vanished within the last day and not replaced). {cluster}",
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
