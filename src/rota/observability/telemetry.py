"""The events of a daemon: one method per event, which writes the log line and updates the metrics.

No other module formats a log line or updates a metric. A line never contains a payload, a result, a DSN or a header. Only
configured or registered names become label values. A name that exists only in an inserted row is reported as `other`.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections import defaultdict
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

import structlog

from rota.observability.logs import LEVELS, is_console
from rota.observability.metrics import Metrics
from rota.observability.refused_rows import RefusedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from rota.domain.declaration import Step
    from rota.domain.job import Claim


def make_logger(*, level: str, format: str, **bound: Any) -> structlog.typing.FilteringBoundLogger:  # noqa: A002
    """Return rota's own logger, which writes JSON or plain lines to standard error. The root logger is not changed."""
    # Not structlog's default formatter: it warns about an `exception` field that is already text.
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    render: Any = console if is_console(format) else structlog.processors.JSONRenderer()
    logger: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        structlog.WriteLogger(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            render,
        ],
        cache_logger_on_first_use=True,
    ).bind(**bound)
    return logger


MAX_SUSPECTS = 20
"""One log line names at most this many running handlers."""


class Telemetry:
    """Logs and counts the events of one daemon. `watch` is called with every event, at any log level. Tests use it to wait.

    With `show_errors`, the lines about failed attempts include the stored traceback and message. Never use it in production: an
    error's text may contain values of the payload, and masking can't find them all.
    """

    def __init__(
        self,
        log: structlog.typing.FilteringBoundLogger,
        *,
        handlers: Collection[str] = (),
        queues: Collection[str] = (),
        show_errors: bool = False,
        watch: Callable[[str, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self._log = log
        self._watch = watch
        self._show_errors = show_errors
        self._handlers = frozenset(handlers)
        self._queues = frozenset(queues)
        self._debug = log.is_enabled_for(logging.DEBUG) or watch is not None
        self.refused_rows = RefusedRows()
        self._housekeeping_errors: dict[str, str] = {}
        self._metrics = Metrics()
        self._dropped = 0
        self.registry = self._metrics.registry

    def _event(self, level: int, event: str, **fields: Any) -> None:
        # Logging fails on a full disk or a closed pipe. The caller would take that OSError for an unreachable database.
        with suppress(OSError, ValueError):
            self._log.log(level, event, **fields)
        if self._watch is not None:
            self._watch(event, fields)

    def _queue(self, queue: str) -> str:
        return queue if queue in self._queues else "other"

    # The node.

    def node_started(self, *, version: str, release: str | None, tzdata: str | None, **fields: Any) -> None:
        """This daemon has started, with this configuration."""
        self._metrics.build.labels(version, release or "", tzdata or "").set(1)
        self._event(logging.INFO, "node.started", version=version, release=release, **fields)

    def node_advised(self, advice: str) -> None:
        """At start: a setting that an operator should change."""
        self._event(logging.WARNING, "node.advised", advice=advice)

    def node_stopping(self, *, running: int, how: str) -> None:
        """This daemon is shutting down. `how`: `drain` lets running jobs finish, `interrupt` interrupts them."""
        self._event(logging.INFO, "node.stopping", running=running, how=how)

    def node_stopped(self) -> None:
        """This daemon has shut down."""
        self._event(logging.INFO, "node.stopped")

    def signal_ignored(self, name: str) -> None:
        """A signal was ignored that ends a process by default."""
        self._event(logging.WARNING, "signal.ignored", signal=name)

    def log_to(self, log: structlog.typing.FilteringBoundLogger) -> None:
        """Use another logger from now on, for example one of another level."""
        self._log = log
        self._debug = log.is_enabled_for(logging.DEBUG) or self._watch is not None

    def reloaded(self, *, log_level: str) -> None:
        """The configuration was read again after a SIGHUP."""
        self._event(logging.WARNING, "node.reloaded", log_level=log_level)

    def reload_failed(self, kind: str) -> None:
        """The configuration could not be read again. Nothing has changed."""
        self._event(logging.ERROR, "node.reload_failed", kind=kind, do="run rota config to see what is wrong")

    def stacks_dumped(self, *, threads: Mapping[str, list[str]], tasks: Mapping[str, list[str]]) -> None:
        """The stacks of all threads and tasks were requested by SIGUSR1."""
        self._event(logging.WARNING, "stacks", threads=threads, tasks=tasks)

    def node_hung(self) -> None:
        """A blocked main loop can't shut down, so the process ends without releasing its jobs."""
        self._event(
            logging.ERROR,
            "node.hung",
            why="a handler blocks the main loop, so the order to stop can't be carried out: its jobs run again when their "
            "leases have expired",
            do="use a plain def handler: it runs in a thread",
        )

    def loop_lagged(
        self,
        lag: float,
        *,
        worst: float,
        suspects: Sequence[tuple[str, int]],
        where: Sequence[str],
        frozen: bool,
    ) -> None:
        """The main loop ran `lag` seconds late; `worst` is the recent maximum. From one second on, the suspects are logged.

        `suspects`: the handlers that ran meanwhile. `where`: the main thread's stack, if another thread could read it.
        `frozen`: no other thread could run either.
        """
        self._metrics.loop_lag.set(worst)
        if lag >= 1:
            self._event(
                logging.WARNING,
                "loop.blocked",
                seconds=round(lag, 3),
                suspects=[f"{handler} (job {job_id})" for handler, job_id in suspects[:MAX_SUSPECTS]],
                where=list(where),
                do="a handler held the interpreter, so that heartbeats stood still, too: give it runs_in='process' "
                "(unless the whole process was held still)"
                if frozen
                else "use a plain def handler: it runs in a thread; or runs_in='process' for work that computes",
            )

    def log_lines_dropped(self, total: int) -> None:
        """Log lines were dropped because the log's reader is too slow. `total` counts them since the start."""
        if new := total - self._dropped:
            self._dropped = total
            self._metrics.log_dropped.inc(new)
            self._event(
                logging.WARNING,
                "log.dropped",
                lines=new,
                do="look at what reads this log: it is too slow, blocked, or its disk is full",
            )

    def stray_error(self, context: Mapping[str, Any]) -> None:
        """A task or callback that a handler left behind raised an error. Its text is not logged: it may contain the payload."""
        error = context.get("exception")
        self._event(logging.ERROR, "loop.stray_error", kind=type(error).__name__ if error is not None else "unknown")

    # Services.

    def service_ran(self, service: str) -> None:
        """A service completed a run."""
        if self._watch is not None:
            self._watch("service.ran", {"service": service})

    def service_failed(self, service: str, error: BaseException, *, failures: int, again_in: float) -> None:
        """A service's run failed: the database was unreachable, or a non-critical service has a bug."""
        level = logging.WARNING if failures in (1, 10, 100) else logging.DEBUG
        self._event(
            level,
            "service.failed",
            service=service,
            kind=type(error).__name__,
            failures=failures,
            again_in_s=round(again_in, 2),
        )

    def loop_supervised(self, loop: str) -> None:
        """A loop is now supervised. Its crash counter starts at 0, so that the first crash shows as an increase."""
        self._metrics.loop_crashes.labels(loop)

    def loop_crashed(self, loop: str, error: BaseException, *, crashes: int) -> None:
        """An unexpected exception ended a loop. The traceback leaves out the error's text, which may contain a payload."""
        self._metrics.loop_crashes.labels(loop).inc()
        self._event(
            logging.ERROR,
            "loop.crashed",
            loop=loop,
            kind=type(error).__name__,
            crashes_in_a_row=crashes,
            traceback="".join(traceback.format_tb(error.__traceback__, limit=-12)),
            do="the loop is restarted and jobs go on; report the traceback",
        )

    def loop_given_up(self, loop: str, *, kind: str) -> None:
        """A loop keeps failing, so the daemon drains and exits."""
        self._event(logging.ERROR, "loop.given_up", loop=loop, kind=kind)

    def main_loop_broken(self, error: BaseException, *, running: Sequence[tuple[str, int]]) -> None:
        """Code of a handler stopped the main loop or raised SystemExit in it. The daemon drains and exits."""
        self._event(
            logging.ERROR,
            "loop.broken",
            kind=type(error).__name__,
            traceback="".join(traceback.format_tb(error.__traceback__, limit=-12)),
            suspects=[f"{handler} (job {job_id})" for handler, job_id in running[:MAX_SUSPECTS]],
            do="find the handler that stops the loop or calls sys.exit(), among those that were running",
        )

    def socket_lost(self, *, running: Sequence[tuple[str, int]]) -> None:
        """Code of a handler closed the listening socket. The daemon drains and exits."""
        self._event(
            logging.ERROR,
            "socket.lost",
            suspects=[f"{handler} (job {job_id})" for handler, job_id in running[:MAX_SUSPECTS]],
            do="find the handler that closes file descriptors it did not open, among those that were running or had just ended",
        )

    def cancel_refused(self, *, job_id: int, handler: str | None) -> None:
        """Code of a job tried to cancel tasks of the daemon or of other jobs."""
        self._event(
            logging.ERROR,
            "handler.cancelled_others",
            job_id=job_id,
            handler=handler,
            do="cancel only tasks that the handler has created: those of the daemon and of other jobs were left alone",
        )

    def service_aged(self, service: str, age: timedelta) -> None:
        """A service's last success was `age` ago."""
        self._metrics.service_age.labels(service).set(age.total_seconds())

    def listener_changed(self, *, up: bool, why: str | None = None) -> None:
        """Notifications can arrive, or no longer can. `why` is None when the daemon itself started or ended the listener."""
        self._metrics.listener_up.set(up)
        fields = {} if why is None else {"why": why}
        self._event(logging.WARNING if fields else logging.INFO, "listener.up" if up else "listener.down", **fields)

    def server_moved(self, *, timeline: int) -> None:
        """Connections now lead to another server, or to a newer timeline of the same server."""
        self._event(logging.WARNING, "database.moved", timeline=timeline)

    def database_awaited(self, reason: str, *, waits: float) -> None:
        """No server accepts connections while the daemon starts. It waits for `waits` seconds in all."""
        self._event(logging.WARNING, "database.awaited", reason=reason, waits_s=waits)

    def fence_tokens_raised(self) -> None:
        """The fence token sequence lagged behind the clock and was advanced: after a fail-over, a restore, or in a new database."""
        self._event(logging.DEBUG, "fence_tokens.raised")

    # A job's path.

    def jobs_claimed(self, claims: list[Claim]) -> None:
        """A batch of jobs was claimed. Observes each job's delay from due to started."""
        queues: defaultdict[str, int] = defaultdict(int)
        delays = []
        limit_waits = []
        for claim in claims:
            queues[claim.queue] += 1
            due = claim.run_at if claim.created_at is None else max(claim.run_at, claim.created_at)
            delay = (claim.started_at - due).total_seconds()
            delays.append(delay)
            if claim.is_limited:
                limit_waits.append(delay)
        self._metrics.start_delay.observe(delays)
        if limit_waits:
            self._metrics.limit_wait.observe(limit_waits)
        for queue, count in queues.items():
            self._metrics.claimed.labels(self._queue(queue)).inc(count)
        if self._debug:
            self._event(logging.DEBUG, "jobs.claimed", count=len(claims), job_ids=[claim.job_id for claim in claims])

    def jobs_succeeded(self, done: Iterable[tuple[str, str, float]]) -> None:
        """A batch of successes was settled: (queue, handler, seconds) each."""
        run_times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for queue, handler, seconds in done:
            run_times[queue, handler].append(seconds)
        for (queue, handler), times in run_times.items():
            self._metrics.settled.labels(self._queue(queue), handler, "succeeded").inc(len(times))
            self._metrics.run_seconds.observe(times, handler)

    def job_succeeded(self, job_id: int, **fields: Any) -> None:
        """One success was settled. Logged at debug level only; jobs_succeeded() counts it."""
        if self._debug:
            self._event(logging.DEBUG, "job.settled", job_id=job_id, settlement="succeeded", **fields)

    def job_settled(
        self,
        *,
        job_id: int,
        handler: str,
        queue: str,
        settlement: str,
        outcome: str,
        attempt: int,
        seconds: float | None,
        error: str | None = None,
        **fields: Any,
    ) -> None:
        """An attempt that did not succeed was settled. `error` is the stored text of its error."""
        if self._show_errors:
            fields["exception"] = error
        known = handler if handler in self._handlers else "other"
        self._metrics.settled.labels(self._queue(queue), known, settlement).inc()
        if seconds is not None:
            self._metrics.run_seconds.observe([seconds], known)
        if outcome not in {"snoozed", "held", "interrupted", "cancelled"}:
            self._metrics.failed.labels(known, outcome).inc()
        level = {"dead": logging.ERROR, "retried": logging.WARNING}.get(settlement, logging.INFO)
        if outcome in {"snoozed", "held"} and (fields.get("releases") or 0) < 10:
            level = logging.DEBUG
        self._event(
            level,
            "job.settled",
            job_id=job_id,
            handler=handler,
            queue=queue,
            settlement=settlement,
            outcome=outcome,
            attempt=attempt,
            **{key: value for key, value in fields.items() if value is not None},
        )

    def settlement_confirmed(self, *, job_id: int, handler: str) -> None:
        """The reply to a settlement was lost, but the settlement had been written: see `rota.attempts`."""
        self._event(logging.INFO, "settlement.confirmed", job_id=job_id, handler=handler)

    def write_refused(self, *, job_id: int, handler: str, what: str) -> None:
        """A write carried a stale fence token and changed nothing."""
        self._metrics.stale.inc()
        self._event(logging.WARNING, "write.refused", job_id=job_id, handler=handler, what=what)

    def lease_lost(self, *, job_id: int, handler: str) -> None:
        """This daemon lost the lease of a running job. It interrupted the job and wrote nothing."""
        self._metrics.lost.inc()
        self._event(logging.WARNING, "lease.lost", job_id=job_id, handler=handler)

    def lease_missed(self, *, job_id: int) -> None:
        """A heartbeat did not extend a lease: the job was just settled, or the lease is lost (logged when the attempt ends)."""
        self._event(logging.DEBUG, "lease.missed", job_id=job_id)

    def leases_extended(self, *, held: int, extended: int) -> None:
        """A heartbeat extended leases."""
        self._event(logging.DEBUG, "leases.extended", held=held, extended=extended)

    def handler_stuck(self, *, job_id: int, handler: str, why: str) -> None:
        """A handler ignores its interruption. It keeps its slot, and its lease will expire."""
        self._event(
            logging.ERROR,
            "handler.stuck",
            job_id=job_id,
            handler=handler,
            why=why,
            do="look at job.stop_requested, or use runs_in='process'",
        )

    def orphans_released(self, count: int) -> None:
        """Claims were released because their reply was lost with the connection."""
        self._event(logging.INFO, "claims.orphaned", count=count)

    def settlement_rejected(self, *, job_id: int, kind: str) -> None:
        """The database rejected a settlement. The job is settled with less data, and at last as a dead letter."""
        self._event(logging.ERROR, "settlement.rejected", job_id=job_id, kind=kind)

    def row_refused(self, doing: str, error: Exception, *, again_in: float = 0.0, **where: object) -> None:
        """The database refused an operation on a row: a bad value, or the user's own trigger or constraint.

        The operation is not tried again for `again_in` seconds.
        """
        for what in ("job", "schedule"):
            if isinstance(number := where.get(f"{what}_id"), int):
                self.refused_rows.add(doing, what, number, type(error).__name__, again_in=again_in)
                break
        self._event(
            logging.ERROR,
            "row.refused",
            doing=doing,
            **where,
            kind=type(error).__name__,
            do="correct the row's values, or the trigger, foreign key or constraint that refuses it",
        )

    # Schedules.

    def fires_recorded(
        self, *, planned: int, decided: int, fires: Sequence[tuple[str, datetime, int, timedelta]]
    ) -> None:
        """A batch of fires was recorded: (disposition, scheduled_for, count, lateness) each.

        `planned` - `decided` is the number of decisions lost to another node.
        """
        for disposition, _, count, late in fires:
            self._metrics.fires.labels(disposition).inc(count)
            if disposition == "enqueued":
                self._metrics.lateness.observe([late.total_seconds()] * count)
        if self._debug:
            self._event(
                logging.DEBUG,
                "fires.recorded",
                planned=planned,
                decided=decided,
                dispositions={disposition: count for disposition, _, count, _ in fires},
            )

    def fires_promoted(self, promoted: int) -> None:
        """Waiting fires were enqueued."""
        if promoted:
            self._metrics.fires.labels("enqueued").inc(promoted)
            self._event(logging.DEBUG, "fires.promoted", count=promoted)

    def jobs_replaced(self, count: int) -> None:
        """Cancellation was requested of live jobs that a later fire of their schedule replaces."""
        if count:
            self._event(logging.INFO, "jobs.replaced", count=count)

    def schedule_invalid(self, *, schedule_id: int, name: str | None, reason: str) -> None:
        """A schedule is invalid and will not fire until it is edited."""
        self._event(
            logging.ERROR,
            "schedule.invalid",
            schedule_id=schedule_id,
            schedule=name,
            reason=reason,
            do="correct the schedule: it is planned again after an edit",
        )

    def schedules_resumed(self, count: int) -> None:
        """Paused schedules were resumed because their resume_at has passed."""
        if count:
            self._event(logging.INFO, "schedules.resumed", count=count)

    def schedules_moved(self, count: int) -> None:
        """The next fire of schedules was planned again: another version of rota or of tzdata had planned it at another instant."""
        if count:
            self._event(logging.INFO, "schedules.moved", count=count)

    def declared(self, kind: Literal["schedule", "limit"], steps: Iterable[Step]) -> None:
        """Schedules or limits that the app's code declares were written, refused, or left unchanged for a reason."""
        for step in steps:
            name = {kind: step.name}
            if step.what in {"inserted", "updated"}:
                self._event(logging.INFO, f"{kind}.{step.what}", **name, changed=step.why)
            elif step.what == "refused":
                self._event(logging.ERROR, f"{kind}.refused", **name, reason=step.why)
            elif step.what in {"newer_release", "not_ours", "undeclared"}:
                self._event(logging.WARNING, f"{kind}.left_alone", **name, what=step.what, reason=step.why)

    def shards_taken(self, count: int) -> None:
        """This node now plans another share of the schedules, because nodes started or ended."""
        self._event(logging.DEBUG, "shards.taken", count=count)

    def blocked(self, by: str, *, do: str) -> None:
        """Statements of this node wait for a lock that another session holds."""
        self._event(logging.WARNING, "lock.blocked", by=by, do=do)

    def lock_wait_sampled(self, seconds: float) -> None:
        """This node has waited this many seconds for another session's lock; 0 if it does not wait."""
        self._metrics.lock_wait.set(seconds)

    # Housekeeping.

    def lease_reaped(self, *, job_id: int, handler: str, settlement: str) -> None:
        """An expired lease was taken back. `job.settled` reports what becomes of the job."""
        self._metrics.reaped.inc()
        self._event(logging.INFO, "lease.reaped", job_id=job_id, handler=handler, settlement=settlement)

    def reaper_waits(self, *, jumped_by: float) -> None:
        """The reaper waits: the database's clock jumped ahead, so an expired lease does not prove that its holder is gone."""
        self._event(logging.WARNING, "reaper.waits", clock_jumped_by_s=round(jumped_by, 3))

    def jobs_ended(self, what: str, count: int) -> None:
        """Jobs ended without an attempt. `what`: expired or cancelled."""
        if count:
            self._event(logging.INFO, f"jobs.{what}", count=count)

    def pruned(self, what: str, count: int) -> None:
        """Expired history was deleted."""
        if count:
            self._event(logging.INFO, "history.pruned", what=what, count=count)

    # Sampled gauges.

    def slots_sampled(self, slots: Mapping[str, tuple[int, int]]) -> None:
        """Set the gauges of this daemon's slots: queue -> (taken, free)."""
        for queue, (taken, free) in slots.items():
            self._metrics.slots.labels(queue, "taken").set(taken)
            self._metrics.slots.labels(queue, "free").set(free)

    def backlog_sampled(
        self,
        *,
        jobs: Mapping[tuple[str, str], int],
        limited: Mapping[str, int],
        oldest_due: Mapping[tuple[str, str], float],
        oldest_running: Mapping[str, float],
        dead: Mapping[str, int],
        oldest_dead: float,
        expired: int,
        unclaimable: int,
        unserved: int,
        at_least: bool,
    ) -> None:
        """Set the gauges of the installation's jobs and dead letters."""
        metrics = self._metrics
        for gauge in (metrics.jobs, metrics.jobs_limited, metrics.oldest_due, metrics.oldest_running, metrics.dead):
            gauge.clear()
        for queue, count in limited.items():
            metrics.jobs_limited.labels(self._queue(queue)).inc(count)
        for (queue, state), count in jobs.items():
            self._metrics.jobs.labels(self._queue(queue), state).inc(count)
        # In order of age: of the queues reported as `other`, the oldest is set last.
        for (queue, priority), age in sorted(oldest_due.items(), key=itemgetter(1)):
            self._metrics.oldest_due.labels(self._queue(queue), priority).set(age)
        for queue, age in sorted(oldest_running.items(), key=itemgetter(1)):
            self._metrics.oldest_running.labels(self._queue(queue)).set(age)
        for queue, count in dead.items():
            self._metrics.dead.labels(self._queue(queue)).inc(count)
        self._metrics.oldest_dead.set(oldest_dead)
        self._metrics.expired.set(expired)
        self._metrics.unclaimable.set(unclaimable)
        self._metrics.unserved.set(unserved)
        self._metrics.jobs_capped.set(at_least)

    def housekeeping_failed(self, errors: Mapping[str, str]) -> None:
        """Pieces of housekeeping have failed. An unchanged error of a piece is logged only once."""
        for piece, error in errors.items() - self._housekeeping_errors.items():
            self._event(
                logging.ERROR,
                "housekeeping.failed",
                piece=piece,
                error=error,
                do="correct what the error names: the piece is tried again each minute, the others go on. See also: rota check",
            )
        self._housekeeping_errors = dict(errors)

    def upkeep_sampled(
        self,
        *,
        paused: Iterable[tuple[str, str]],
        oldest_snapshot: float,
        dead_tuples: Mapping[str, int],
        housekeeping: Mapping[str, float],
        nodes: Mapping[str, int],
    ) -> None:
        """Set the gauges of pauses, of the server's upkeep, and of the nodes."""
        self._metrics.paused.clear()
        for kind, name in paused:
            known = name == "*" or name in (self._queues if kind == "queue" else self._handlers)
            self._metrics.paused.labels(kind, name if known else "other").set(1)
        self._metrics.oldest_snapshot.set(oldest_snapshot)
        for table, dead in dead_tuples.items():
            self._metrics.dead_tuples.labels(table).set(dead)
        for piece, age in housekeeping.items():
            self._metrics.housekeeping_age.labels(piece).set(age)
        for state in ("running", "draining", "lost"):
            self._metrics.nodes.labels(state).set(nodes.get(state, 0))

    def jobs_unclaimed(self, *, queue: str, handler: str, due: int, why: str) -> None:
        """No living daemon claims some due jobs: their queue or handler is misspelled, or a service is down."""
        self._event(logging.WARNING, "jobs.unclaimed", queue=queue, handler=handler, due=due, why=why)

    def schedules_sampled(self, *, states: Mapping[str, int], last_success: Mapping[str | None, float]) -> None:
        """Set the gauges of schedules by state, and of the last success of those with expect_success_within."""
        for state in ("ok", "invalid", "paused", "overdue"):
            self._metrics.schedules.labels(state).set(
                states.get(state, 0) + (states.get("ended", 0) if state == "ok" else 0)
            )
        self._metrics.last_success.clear()
        for name, at in last_success.items():
            self._metrics.last_success.labels("other" if name is None else name).set(at)

    def sample_aged(self, age: timedelta, *, stale: bool) -> None:
        """Set the age of the sampled gauges, and hide them while they are stale."""
        self._metrics.sample_age.set(age.total_seconds())
        self._metrics.hide_sampled(stale)
