"""What a job can call: a name, how it is called, and the defaults of its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from datetime import timedelta

    from rota.attempt import Attempt
    from rota.job import Environment

Delivery = Literal["at_least_once", "at_most_once"]


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
    decode: Callable[[str], Any]
    call: Call
    queue: str | None = None
    max_attempts: int | None = None
    backoff_base: timedelta | None = None
    backoff_cap: timedelta | None = None
    timeout: timedelta | None = None
    delivery: Delivery | None = None
    permanent: tuple[type[BaseException], ...] = ()
