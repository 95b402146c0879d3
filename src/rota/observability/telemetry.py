"""Everything rota tells the outside: one method per event, which writes the log line and moves the metrics.

Nobody else formats a log line or moves a metric; which there are, `metrics` says. No line carries a payload, a result, a DSN
or a header. Label values come from what is configured or registered; what somebody merely inserted is `other`.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections import defaultdict
from contextlib import suppress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import structlog

from rota.observability.logs import LEVELS, readable
from rota.observability.metrics import Metrics
from rota.observability.refused_rows import RefusedRows

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from datetime import datetime, timedelta

    from rota.domain.declaration import Step
    from rota.domain.job import Claim


def make_logger(*, level: str, format: str, **bound: Any) -> structlog.typing.FilteringBoundLogger:  # noqa: A002
    """Return a logger of rota's own on standard error: JSON, or lines to read at a terminal. The root logger is left alone."""
    # Not structlog's default formatter: it warns about an `exception` that is text already.
    console = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    render: Any = console if readable(format) else structlog.processors.JSONRenderer()
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


MOST_SUSPECTS = 20
"""Most running handlers that one log line names."""


class Telemetry:
    """Logs and counts the events of one daemon. Tests wait on `watch`, which gets each event, whatever the log level.

    With `show_errors`, the lines about failed attempts include the error's text as it is stored: its traceback and message. A
    production log must not: masking can't recognize each value that an error derives from a payload.
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
        # A full disk, or a pipe that nobody reads any more: elsewhere, an OSError means that the database is away.
        with suppress(OSError, ValueError):
            self._log.log(level, event, **fields)
        if self._watch is not None:
            self._watch(event, fields)

    def _queue(self, queue: str) -> str:
        return queue if queue in self._queues else "other"

    # The node.

    def node_started(self, *, version: str, release: str | None, tzdata: str | None, **fields: Any) -> None:
        """Say that this daemon is up, and how it is configured."""
        self._metrics.build.labels(version, release or "", tzdata or "").set(1)
        self._event(logging.INFO, "node.started", version=version, release=release, **fields)

    def node_advised(self, advice: str) -> None:
        """Say at start what an operator would want to change."""
        self._event(logging.WARNING, "node.advised", advice=advice)

    def node_stopping(self, *, running: int, how: str) -> None:
        """Say that this daemon is on its way out: `drain` lets jobs finish, `interrupt` cuts them."""
        self._event(logging.INFO, "node.stopping", running=running, how=how)

    def node_stopped(self) -> None:
        """Say goodbye."""
        self._event(logging.INFO, "node.stopped")

    def signal_ignored(self, name: str) -> None:
        """Tell of a signal that has no meaning here and would have ended the process."""
        self._event(logging.WARNING, "signal.ignored", signal=name)

    def log_to(self, log: structlog.typing.FilteringBoundLogger) -> None:
        """Log with another logger from now on, one of another level."""
        self._log = log
        self._debug = log.is_enabled_for(logging.DEBUG) or self._watch is not None

    def reloaded(self, *, log_level: str) -> None:
        """Tell of a SIGHUP."""
        self._event(logging.WARNING, "node.reloaded", log_level=log_level)

    def reload_failed(self, kind: str) -> None:
        """Tell that the configuration can't be read again, and that nothing has changed."""
        self._event(logging.ERROR, "node.reload_failed", kind=kind, do="run rota config to see what is wrong")

    def stacks_dumped(self, *, threads: Mapping[str, list[str]], tasks: Mapping[str, list[str]]) -> None:
        """Log where all threads and tasks are."""
        self._event(logging.WARNING, "stacks", threads=threads, tasks=tasks)

    def node_hung(self) -> None:
        """Say that the process ends without a word to its jobs, because the main loop doesn't turn."""
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
        """Tell how late the main loop turned, and at worst of late; a second and more is a handler that blocks it.

        `suspects`: the handlers that ran meanwhile; `where`: the main thread's stack, if another thread could look at it;
        `frozen`: no other thread could run either.
        """
        self._metrics.loop_lag.set(worst)
        if lag >= 1:
            self._event(
                logging.WARNING,
                "loop.blocked",
                seconds=round(lag, 3),
                suspects=[f"{handler} (job {job_id})" for handler, job_id in suspects[:MOST_SUSPECTS]],
                where=list(where),
                do="a handler held the interpreter, so that heartbeats stood still, too: give it runs_in='process' "
                "(unless the whole process was held still)"
                if frozen
                else "use a plain def handler: it runs in a thread; or runs_in='process' for work that computes",
            )

    def log_lines_dropped(self, total: int) -> None:
        """Count the lines that were dropped because the reader of the log is too slow, and log how many once lines pass again."""
        if fresh := total - self._dropped:
            self._dropped = total
            self._metrics.log_dropped.inc(fresh)
            self._event(
                logging.WARNING,
                "log.dropped",
                lines=fresh,
                do="look at what reads this log: it is too slow, blocked, or its disk is full",
            )

    def stray_error(self, context: Mapping[str, Any]) -> None:
        """Tell of an error in something that a handler left behind, a task or a callback; its text may be the payload's."""
        error = context.get("exception")
        self._event(logging.ERROR, "loop.stray_error", kind=type(error).__name__ if error is not None else "unknown")

    # Services.

    def service_ran(self, service: str) -> None:
        """Tell that a service has done its turn."""
        if self._watch is not None:
            self._watch("service.ran", {"service": service})

    def service_failed(self, service: str, error: BaseException, *, failures: int, again_in: float) -> None:
        """Tell what cost this service its turn: the database was away, or there is a bug in a service that may have one."""
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
        """Show the count of its crashes from 0 on, so that the first one is seen as an increase."""
        self._metrics.loop_crashes.labels(loop)

    def loop_crashed(self, loop: str, error: BaseException, *, crashes: int) -> None:
        """Log and count an unexpected exception in a loop. The traceback names places only: an error's text may hold a payload."""
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
        """Tell that the daemon drains and ends because a loop can't do its work."""
        self._event(logging.ERROR, "loop.given_up", loop=loop, kind=kind)

    def main_loop_broken(self, error: BaseException, *, running: Sequence[tuple[str, int]]) -> None:
        """Tell that code of a handler stopped the main loop or raised SystemExit in it; the daemon drains and ends."""
        self._event(
            logging.ERROR,
            "loop.broken",
            kind=type(error).__name__,
            traceback="".join(traceback.format_tb(error.__traceback__, limit=-12)),
            suspects=[f"{handler} (job {job_id})" for handler, job_id in running[:MOST_SUSPECTS]],
            do="find the handler that stops the loop or calls sys.exit(), among those that were running",
        )

    def socket_lost(self, *, running: Sequence[tuple[str, int]]) -> None:
        """Log that code of a handler closed the listening socket; the daemon drains and ends."""
        self._event(
            logging.ERROR,
            "socket.lost",
            suspects=[f"{handler} (job {job_id})" for handler, job_id in running[:MOST_SUSPECTS]],
            do="find the handler that closes file descriptors it did not open, among those that were running or had just ended",
        )

    def cancel_refused(self, *, job_id: int, handler: str | None) -> None:
        """Tell that code of a job tried to cancel tasks that belong to the daemon or to other jobs."""
        self._event(
            logging.ERROR,
            "handler.cancelled_others",
            job_id=job_id,
            handler=handler,
            do="cancel only tasks that the handler has created: those of the daemon and of other jobs were left alone",
        )

    def service_aged(self, service: str, age: timedelta) -> None:
        """Tell how long ago a service last succeeded."""
        self._metrics.service_age.labels(service).set(age.total_seconds())

    def listener_changed(self, *, up: bool, why: str | None = None) -> None:
        """Tell whether notifications can arrive; without them, polling finds the jobs. No `why`: it was we who ended it."""
        self._metrics.listener_up.set(up)
        told = {} if why is None else {"why": why}
        self._event(logging.WARNING if told else logging.INFO, "listener.up" if up else "listener.down", **told)

    def server_moved(self, *, timeline: int) -> None:
        """Report that connections now lead to another server, or to a newer timeline of the same."""
        self._event(logging.WARNING, "database.moved", timeline=timeline)

    def database_awaited(self, reason: str, *, waits: float) -> None:
        """Report that no server takes us yet while the daemon starts, and for how many seconds it waits in all."""
        self._event(logging.WARNING, "database.awaited", reason=reason, waits_s=waits)

    def fence_tokens_raised(self) -> None:
        """Tell that the sequence of tokens had fallen behind the clock: a fail-over, a restore, or a new database."""
        self._event(logging.DEBUG, "fence_tokens.raised")

    # A job's path.

    def jobs_claimed(self, claims: list[Claim]) -> None:
        """Count a batch of claims, and how late each started."""
        queues: defaultdict[str, int] = defaultdict(int)
        delays = []
        for claim in claims:
            queues[claim.queue] += 1
            due = claim.run_at if claim.created_at is None else max(claim.run_at, claim.created_at)
            delays.append((claim.started_at - due).total_seconds())
        self._metrics.start_delay.observe(delays)
        for queue, count in queues.items():
            self._metrics.claimed.labels(self._queue(queue)).inc(count)
        if self._debug:
            self._event(logging.DEBUG, "jobs.claimed", count=len(claims), job_ids=[claim.job_id for claim in claims])

    def jobs_succeeded(self, done: Iterable[tuple[str, str, float]]) -> None:
        """Count a settled batch of successes: (queue, handler, seconds) each."""
        ran: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for queue, handler, seconds in done:
            ran[queue, handler].append(seconds)
        for (queue, handler), seconds_each in ran.items():
            self._metrics.settled.labels(self._queue(queue), handler, "succeeded").inc(len(seconds_each))
            self._metrics.run_seconds.observe(seconds_each, handler)

    def job_succeeded(self, job_id: int, **fields: Any) -> None:
        """Tell of one success, at debug."""
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
        """Log and count how an attempt ended that did not succeed; `error` is the stored text of its error."""
        if self._show_errors:
            fields["exception"] = error
        known = handler if handler in self._handlers else "other"
        self._metrics.settled.labels(self._queue(queue), known, settlement).inc()
        if seconds is not None:
            self._metrics.run_seconds.observe([seconds], known)
        if outcome not in {"snoozed", "interrupted", "cancelled"}:
            self._metrics.failed.labels(known, outcome).inc()
        level = {"dead": logging.ERROR, "retried": logging.WARNING}.get(settlement, logging.INFO)
        if outcome == "snoozed" and (fields.get("releases") or 0) < 10:
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
        """Tell that a settlement whose answer was lost had been written. What it said, its row in `rota.attempts` says."""
        self._event(logging.INFO, "settlement.confirmed", job_id=job_id, handler=handler)

    def write_refused(self, *, job_id: int, handler: str, what: str) -> None:
        """Tell that a write showed a stale token and touched nothing."""
        self._metrics.stale.inc()
        self._event(logging.WARNING, "write.refused", job_id=job_id, handler=handler, what=what)

    def lease_lost(self, *, job_id: int, handler: str) -> None:
        """Tell that this daemon lost the lease of a job that it ran, interrupted it, and wrote nothing."""
        self._metrics.lost.inc()
        self._event(logging.WARNING, "lease.lost", job_id=job_id, handler=handler)

    def lease_missed(self, *, job_id: int) -> None:
        """Tell of a token that did not come back: the job has just been settled, or its lease is lost, as its end will tell."""
        self._event(logging.DEBUG, "lease.missed", job_id=job_id)

    def leases_extended(self, *, held: int, extended: int) -> None:
        """Tell of a heartbeat."""
        self._event(logging.DEBUG, "leases.extended", held=held, extended=extended)

    def handler_stuck(self, *, job_id: int, handler: str, why: str) -> None:
        """Tell of a handler that goes on after it was told to stop: its slot stays taken, its lease runs out."""
        self._event(
            logging.ERROR,
            "handler.stuck",
            job_id=job_id,
            handler=handler,
            why=why,
            do="look at job.stop_requested, or use runs_in='process'",
        )

    def orphans_released(self, count: int) -> None:
        """Tell that claims came back whose answer was lost with the connection."""
        self._event(logging.INFO, "claims.orphaned", count=count)

    def settlement_rejected(self, *, job_id: int, kind: str) -> None:
        """Report a job that could not be settled as asked; it is settled with less, in the end as a dead letter."""
        self._event(logging.ERROR, "settlement.rejected", job_id=job_id, kind=kind)

    def row_refused(self, doing: str, error: Exception, *, again_in: float = 0.0, **where: object) -> None:
        """Report a row with which the database refuses an operation: a bad value, or a trigger or constraint of the user's.

        `again_in`: seconds for which the operation is not tried again.
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
        """Count a batch of fires: (disposition, scheduled_for, how many, how late); `planned` - `decided` others were faster at."""
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
        """Tell of fires that had waited for their turn and are enqueued now."""
        if promoted:
            self._metrics.fires.labels("enqueued").inc(promoted)
            self._event(logging.DEBUG, "fires.promoted", count=promoted)

    def jobs_replaced(self, asked: int) -> None:
        """Tell of live jobs that were asked to cancel because a later fire of their schedule replaces them."""
        if asked:
            self._event(logging.INFO, "jobs.replaced", count=asked)

    def schedule_invalid(self, *, schedule_id: int, name: str | None, reason: str) -> None:
        """Tell of a schedule that stands still until somebody edits it."""
        self._event(
            logging.ERROR,
            "schedule.invalid",
            schedule_id=schedule_id,
            schedule=name,
            reason=reason,
            do="correct the schedule: an edit has it planned again",
        )

    def schedules_resumed(self, count: int) -> None:
        """Tell of paused schedules whose resume_at has come."""
        if count:
            self._event(logging.INFO, "schedules.resumed", count=count)

    def schedules_moved(self, count: int) -> None:
        """Tell of schedules that another rota or other zone data would have fired at another instant."""
        if count:
            self._event(logging.INFO, "schedules.moved", count=count)

    def schedules_declared(self, steps: Iterable[Step]) -> None:
        """Tell what became of the schedules that the app's code declares: what was written, and what was left alone and why."""
        for step in steps:
            if step.what in {"inserted", "updated"}:
                self._event(logging.INFO, f"schedule.{step.what}", schedule=step.name, changed=step.why)
            elif step.what == "refused":
                self._event(logging.ERROR, "schedule.refused", schedule=step.name, reason=step.why)
            elif step.what in {"newer_release", "not_ours", "undeclared"}:
                self._event(logging.WARNING, "schedule.left_alone", schedule=step.name, what=step.what, reason=step.why)

    def shards_taken(self, count: int) -> None:
        """Tell that this node looks at another part of the schedules than before, because nodes came or went."""
        self._event(logging.DEBUG, "shards.taken", count=count)

    def blocked(self, by: str, *, do: str) -> None:
        """Report a session whose lock this node's statements wait for."""
        self._event(logging.WARNING, "lock.blocked", by=by, do=do)

    def lock_wait_sampled(self, seconds: float) -> None:
        """Show for how long this node has been waiting for a lock of another session; 0 if it isn't."""
        self._metrics.lock_wait.set(seconds)

    # Housekeeping.

    def lease_reaped(self, *, job_id: int, handler: str, settlement: str) -> None:
        """Tell that an expired lease was taken back; what that means for the job, `job.settled` has told at its own level."""
        self._metrics.reaped.inc()
        self._event(logging.INFO, "lease.reaped", job_id=job_id, handler=handler, settlement=settlement)

    def reaper_waits(self, *, jumped_by: float) -> None:
        """Tell that the database's clock jumped ahead, so that expired leases prove nothing for now."""
        self._event(logging.WARNING, "reaper.waits", clock_jumped_by_s=round(jumped_by, 3))

    def jobs_ended(self, what: str, count: int) -> None:
        """Tell of jobs that ended without an attempt: expired, cancelled."""
        if count:
            self._event(logging.INFO, f"jobs.{what}", count=count)

    def pruned(self, what: str, count: int) -> None:
        """Tell of history that was let go."""
        if count:
            self._event(logging.INFO, "history.pruned", what=what, count=count)

    # Sampled gauges.

    def slots_sampled(self, slots: Mapping[str, tuple[int, int]]) -> None:
        """Show taken and free slots: queue -> (taken, free)."""
        for queue, (taken, free) in slots.items():
            self._metrics.slots.labels(queue, "taken").set(taken)
            self._metrics.slots.labels(queue, "free").set(free)

    def backlog_sampled(
        self,
        *,
        jobs: Mapping[tuple[str, str], int],
        oldest_due: Mapping[tuple[str, str], float],
        oldest_running: Mapping[str, float],
        dead: Mapping[str, int],
        oldest_dead: float,
        expired: int,
        unclaimable: int,
        unserved: int,
        at_least: bool,
    ) -> None:
        """Show what the last look at the whole installation found."""
        for gauge in (self._metrics.jobs, self._metrics.oldest_due, self._metrics.oldest_running, self._metrics.dead):
            gauge.clear()
        for (queue, state), count in jobs.items():
            self._metrics.jobs.labels(self._queue(queue), state).inc(count)
        for (queue, priority), age in sorted(
            oldest_due.items(), key=itemgetter(1)
        ):  # of those called other, the oldest
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
        """Log which pieces of housekeeping have failed, when that changes."""
        for piece, error in errors.items() - self._housekeeping_errors.items():
            self._event(
                logging.ERROR,
                "housekeeping.failed",
                piece=piece,
                error=error,
                do="mend what the error names; the piece is tried again each minute, the others go on. See also: rota check",
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
        """Show what is paused, and what the last look at the server's upkeep found."""
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
        """Tell of due jobs that no living daemon would claim: the name is somebody's slip, or a service is down."""
        self._event(logging.WARNING, "jobs.unclaimed", queue=queue, handler=handler, due=due, why=why)

    def schedules_sampled(self, *, states: Mapping[str, int], last_success: Mapping[str | None, float]) -> None:
        """Show how the schedules are, and when those that are watched last succeeded."""
        for state in ("ok", "invalid", "paused", "overdue"):
            self._metrics.schedules.labels(state).set(
                states.get(state, 0) + (states.get("ended", 0) if state == "ok" else 0)
            )
        self._metrics.last_success.clear()
        for name, at in last_success.items():
            self._metrics.last_success.labels("other" if name is None else name).set(at)

    def sample_aged(self, age: timedelta, *, stale: bool) -> None:
        """Show how old the sampled gauges are; hide them while they are stale."""
        self._metrics.sample_age.set(age.total_seconds())
        self._metrics.hide_sampled(stale)
