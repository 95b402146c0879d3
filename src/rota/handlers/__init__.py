"""Handlers: their names, how they are called, and the defaults of their jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rota.handler_exceptions import LONGEST_DELAY
from rota.handlers.byte_budget import OFF_LOOP_BYTES, off_the_loop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rota.db.queries import HandlerRow
    from rota.domain.validation import Delivery
    from rota.handlers.attempt import Attempt
    from rota.handlers.codec import Codec
    from rota.handlers.job import Job
    from rota.handlers.local_port import Environment

    Step = Callable[[Job[Any]], Awaitable[Any]]
    Middleware = Callable[[Job[Any], Step], Awaitable[Any]]


class Call(Protocol):
    """Calls a handler and returns its result. An exception fails the attempt."""

    def __call__(self, attempt: Attempt, environment: Environment) -> Awaitable[Any]:
        """Decode the payload, call the handler, and wait until it ends."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A named function that jobs call, with the defaults of these jobs. None means rota's own default."""

    name: str
    function: Callable[..., Any]
    codec: Codec
    kind: Callable[[Handler], Step]
    """`on_loop`, `in_thread` or `in_process`: returns the function that calls the handler in that way."""
    middleware: tuple[Middleware, ...] = ()
    """Functions that run around it, outermost first."""
    queue: str | None = None
    max_attempts: int | None = None
    backoff_base: timedelta | None = None
    backoff_cap: timedelta | None = None
    backoff: Sequence[timedelta] | Callable[[int], timedelta] | None = field(default=None)
    timeout: timedelta | None = None
    delivery: Delivery | None = None
    permanent: tuple[type[BaseException], ...] = ()
    limit_key: str | Callable[[Any], str | None] | None = None
    """The limit_key of the jobs that the SDK enqueues: a key, or a function of the payload."""
    max_running: int | None = None
    """This and the next two declare the limit `handler:NAME`."""
    max_starts: int | None = None
    per: timedelta | None = None

    @property
    def row(self) -> HandlerRow:
        """The name and the defaults of its jobs, in the order of `queries.HandlerRow`."""
        return (
            self.name,
            self.queue,
            self.max_attempts,
            self.backoff_base,
            self.backoff_cap,
            self.timeout,
            self.delivery,
        )

    def with_outer_middleware(self, middleware: Sequence[Middleware]) -> Handler:
        """Return a copy with this middleware around its own."""
        return replace(self, middleware=(*middleware, *self.middleware)) if middleware else self

    def bind(self) -> Call:
        """Return the function that each attempt calls. Called once at start, so that attempts don't compose the middleware."""
        decode = self.codec.decode
        step = self.kind(self)
        for middleware in reversed(self.middleware):
            step = _wrapped_step(middleware, step)

        async def call(attempt: Attempt, environment: Environment) -> Any:
            text = attempt.payload
            payload = decode(text) if len(text) < OFF_LOOP_BYTES else await off_the_loop(partial(decode, text))
            attempt.handler_called = True
            return await step(environment.job(attempt, environment, payload))

        return call

    def delay_after(self, attempt: int) -> timedelta | None:
        """Return the delay that the handler's own backoff sets after this attempt failed; None means the job's backoff."""
        match self.backoff:
            case None:
                return None
            case Sequence() as delays:
                last: timedelta = delays[min(attempt, len(delays)) - 1]
                return last
            case compute_delay:
                try:
                    delay = compute_delay(attempt)
                except Exception:  # noqa: BLE001  a failing backoff function must not decide about the job
                    return None
        return min(max(delay, timedelta(0)), LONGEST_DELAY) if isinstance(delay, timedelta) else None


def _wrapped_step(middleware: Middleware, step: Step) -> Step:
    return lambda job: middleware(job, step)
