"""What a job can call: a name, how it is called, and the defaults of its jobs."""

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
    """How a handler is called: returns its result; what it raises is the attempt's failure."""

    def __call__(self, attempt: Attempt, environment: Environment) -> Awaitable[Any]:
        """Decode the payload, call the handler, and wait for its end, whatever that takes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """A named thing that jobs call. None: the default of design."""

    name: str
    function: Callable[..., Any]
    codec: Codec
    kind: Callable[[Handler], Step]
    """How to call it: `on_loop`, `in_thread`, `in_process`."""
    middleware: tuple[Middleware, ...] = ()
    """What runs around it, outermost first."""
    queue: str | None = None
    max_attempts: int | None = None
    backoff_base: timedelta | None = None
    backoff_cap: timedelta | None = None
    backoff: Sequence[timedelta] | Callable[[int], timedelta] | None = field(default=None)
    timeout: timedelta | None = None
    delivery: Delivery | None = None
    permanent: tuple[type[BaseException], ...] = ()

    @property
    def row(self) -> HandlerRow:
        """The name and the defaults of its jobs, as `rota.handlers` shows them."""
        return (
            self.name,
            self.queue,
            self.max_attempts,
            self.backoff_base,
            self.backoff_cap,
            self.timeout,
            self.delivery,
        )

    def inside(self, middleware: Sequence[Middleware]) -> Handler:
        """Return it with further middleware around all that is there."""
        return replace(self, middleware=(*middleware, *self.middleware)) if middleware else self

    def bind(self) -> Call:
        """Compose what each attempt calls: once, at start, so that an attempt pays only for what its handler uses."""
        decode = self.codec.decode
        step = self.kind(self)
        for around in reversed(self.middleware):
            step = _around(around, step)

        async def call(attempt: Attempt, environment: Environment) -> Any:
            text = attempt.payload
            payload = decode(text) if len(text) < OFF_LOOP_BYTES else await off_the_loop(partial(decode, text))
            attempt.began = True
            return await step(environment.job(attempt, environment, payload))

        return call

    def delay_after(self, attempt: int) -> timedelta | None:
        """Return how long the handler itself wants to wait after that attempt failed; None: as the job's backoff says."""
        match self.backoff:
            case None:
                return None
            case Sequence() as delays:
                last: timedelta = delays[min(attempt, len(delays)) - 1]
                return last
            case ask:
                try:
                    delay = ask(attempt)
                except Exception:  # noqa: BLE001  a backoff that fails must not decide about the job
                    return None
        return min(max(delay, timedelta(0)), LONGEST_DELAY) if isinstance(delay, timedelta) else None


def _around(middleware: Middleware, step: Step) -> Step:
    return lambda job: middleware(job, step)
