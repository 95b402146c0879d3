"""An app: the handlers that a daemon brings along, and the schedules that its code declares."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rota.domain.declaration import declare as declare_schedule
from rota.errors import AppNotFound, ConfigError
from rota.handlers import Delivery, Handler
from rota.handlers.python import decoder, in_process, in_thread, on_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime, timedelta

    from rota.cron import Fold, Gap
    from rota.domain.declaration import Declaration
    from rota.domain.schedule import Misfire, Overlap

F = TypeVar("F", bound="Callable[..., Any]")


class App:
    """Handlers under one name. `lifespan` is entered before the first claim and left after the drain; it yields `job.state`."""

    def __init__(
        self,
        name: str,
        *,
        release: str | None = None,
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    ) -> None:
        self.name = name
        self.release = release
        self.lifespan = lifespan
        self._handlers: dict[str, Handler] = {}
        self._schedules: list[tuple[Callable[..., Any] | None, str | None, str | None, Mapping[str, Any]]] = []

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """name -> Handler"""
        return self._handlers

    def handler(
        self,
        name: str,
        *,
        queue: str | None = None,
        max_attempts: int | None = None,
        backoff_base: timedelta | None = None,
        backoff_cap: timedelta | None = None,
        timeout: timedelta | None = None,
        delivery: Delivery | None = None,
        permanent: tuple[type[BaseException], ...] = (),
        runs_in: Literal["process"] | None = None,
    ) -> Callable[[F], F]:
        """Register a function that takes the job: `async def` runs on the loop, `def` in a thread, either in a process if asked.

        What is None is the design's default: queue 'default', 20 attempts, backoff from 5 s up to 1 h, no timeout, at least once.
        An exception of a type in `permanent` makes a dead letter at once. Raises ConfigError for a name that is taken.
        """

        def register(function: F) -> F:
            if name in self._handlers:
                raise ConfigError(
                    f"handler {name!r} is declared twice in app {self.name!r}: give one of them another name"
                )
            if len(inspect.signature(function).parameters) != 1:
                raise ConfigError(f"handler {name!r} must take exactly one argument, the job")
            decode = decoder(function)
            if runs_in == "process":
                call = in_process(name, decode)
            elif inspect.iscoroutinefunction(function):
                call = on_loop(function, decode)
            else:
                call = in_thread(function, decode)
            self._handlers[name] = Handler(
                name=name,
                function=function,
                decode=decode,
                call=call,
                queue=queue,
                max_attempts=max_attempts,
                backoff_base=backoff_base,
                backoff_cap=backoff_cap,
                timeout=timeout,
                delivery=delivery,
                permanent=permanent,
            )
            return function

        return register

    def schedule(
        self,
        cron: str | None = None,
        *,
        every: timedelta | None = None,
        name: str | None = None,
        handler: str | None = None,
        timezone: str | None = None,
        payload: Any = None,
        queue: str | None = None,
        priority: int | None = None,
        max_attempts: int | None = None,
        backoff_base: timedelta | None = None,
        backoff_cap: timedelta | None = None,
        retry_for: timedelta | None = None,
        timeout: timedelta | None = None,
        lease: timedelta | None = None,
        delivery: Delivery | None = None,
        start_within: timedelta | None = None,
        meta: Mapping[str, Any] | None = None,
        start_at: datetime | None = None,
        end_at: datetime | None = None,
        paused: bool = False,
        misfire: Misfire | None = None,
        on_time_within: timedelta | None = None,
        too_late_after: timedelta | None = None,
        catch_up_limit: int | None = None,
        overlap: Overlap | None = None,
        dst_gap: Gap | None = None,
        dst_fold: Fold | None = None,
        jitter: timedelta | None = None,
        expect_success_within: timedelta | None = None,
        description: str | None = None,
        owner: str | None = None,
    ) -> Callable[[F], F]:
        """Declare a schedule beside a handler, above or below its `@app.handler`; or give `handler`, and call the result no more.

        A starting daemon inserts what is missing, and updates what has changed *in the code* since it was last applied: what
        operators have edited or paused stays, nothing fires by it, and a release known to be older changes nothing. `name` is the
        handler's, where none is given; `paused` is how it is inserted. What is None has the default of `rota.schedules`.
        Raises InvalidCron and ConfigError for what can't be.
        """
        given = {
            "cron": cron, "every": every, "timezone": timezone, "payload": payload, "queue": queue, "priority": priority,
            "max_attempts": max_attempts, "backoff_base": backoff_base, "backoff_cap": backoff_cap, "retry_for": retry_for,
            "timeout": timeout, "lease": lease, "delivery": delivery, "start_within": start_within, "meta": meta,
            "start_at": start_at, "end_at": end_at, "paused": paused, "misfire": misfire, "on_time_within": on_time_within,
            "too_late_after": too_late_after, "catch_up_limit": catch_up_limit, "overlap": overlap, "dst_gap": dst_gap,
            "dst_fold": dst_fold, "jitter": jitter, "expect_success_within": expect_success_within,
            "description": description, "owner": owner,
        }  # fmt: skip
        # Now, so that an error is one of the line that made it; whose handler it is, only the finished app can tell.
        declare_schedule(name or handler or "?", **given, handler=handler or "?")
        if handler is not None:
            self._schedules.append((None, handler, name, given))

        def register(function: F) -> F:
            if handler is None:
                self._schedules.append((function, None, name, given))
            return function

        return register

    @property
    def schedules(self) -> Mapping[str, Declaration]:
        """name -> Declaration. Raises ConfigError where two have one name, or a function isn't a handler."""
        found: dict[str, Declaration] = {}
        for function, handler, name, given in self._schedules:
            called = handler or self._name_of(function)
            if (name or called) in found:
                raise ConfigError(
                    f"schedule {name or called!r} is declared twice in app {self.name!r}: name one of them"
                )
            found[name or called] = declare_schedule(name or called, **given, handler=called)
        return found

    def _name_of(self, function: Callable[..., Any] | None) -> str:
        those = (function, getattr(function, "__wrapped__", function))
        names = [name for name, handler in self.handlers.items() if handler.function in those]
        if len(names) != 1:
            what = (
                f"is {len(names)} handlers" if names else "is no handler: put @app.handler(…) beside @app.schedule(…)"
            )
            raise ConfigError(f"{getattr(function, '__qualname__', function)} {what}; or say which: handler=…")
        return names[0]

    def include(self, other: App) -> None:
        """Take over the handlers and schedules of another app. Raises ConfigError for a name that is taken."""
        if taken := sorted(self._handlers.keys() & other.handlers.keys()):
            raise ConfigError(
                f"apps {self.name!r} and {other.name!r} both declare {', '.join(taken)}: rename one of them"
            )
        if taken := sorted(self.schedules.keys() & other.schedules.keys()):
            raise ConfigError(
                f"apps {self.name!r} and {other.name!r} both declare the schedule {', '.join(taken)}: rename one of them"
            )
        self._handlers.update(other.handlers)
        self._schedules += other._schedules


def find_app(reference: str) -> App:
    """Import `module:attribute`, from the current folder too. Raises AppNotFound, saying where it looked and what it found."""
    module_name, _, attribute = reference.partition(":")
    attribute = attribute or "app"
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise AppNotFound(_broken(module_name, error)) from error
        raise AppNotFound(
            f"no module {module_name!r}: looked in {Path.cwd()} and along PYTHONPATH{_spelling(module_name)}. "
            f"Give the app as module:attribute, such as myapp.jobs:app"
        ) from error
    except (Exception, SystemExit) as error:
        raise AppNotFound(_broken(module_name, error)) from error
    found = getattr(module, attribute, None)
    if isinstance(found, App):
        return found
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    close = get_close_matches(attribute, apps, 1) or apps[:1]
    hint = f"; did you mean {module_name}:{close[0]}?" if close else f"; {module_name} holds no rota.App at all"
    raise AppNotFound(f"{module_name} ({module.__file__}) has no app called {attribute!r}{hint}")


def _broken(module_name: str, error: BaseException) -> str:
    """Say where in the app's code its import failed: the last line of it that is not the import machinery's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen importlib")
    ]
    own = [frame for frame in frames if frame.filename != importlib.__file__]
    place = f"{error.filename}, line {error.lineno}" if isinstance(error, SyntaxError) else None
    place = place or (f"{own[-1].filename}, line {own[-1].lineno}" if own else module_name)
    said = error.msg if isinstance(error, SyntaxError) else error
    return f"{module_name} can't be imported: {type(error).__name__}: {said} ({place})"


def _spelling(module_name: str) -> str:
    """Name the module beside the missing one, in the same package, that is spelled most like it."""
    parent, _, name = module_name.rpartition(".")
    package = sys.modules.get(parent)
    beside = [found.name for found in pkgutil.iter_modules(package.__path__ if package else [""])]
    close = get_close_matches(name, beside, 1)
    return (
        f"; did you mean {parent}{'.' if parent else ''}{close[0]}?"
        if close
        else f", found {', '.join(beside[:8])}"
        if beside
        else ""
    )
