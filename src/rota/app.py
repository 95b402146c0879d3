"""An app: the handlers that a daemon brings along, and the schedules that its code declares."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

from rota.domain.declaration import declare as declare_schedule
from rota.domain.payload import encode
from rota.domain.validation import check_declaration, check_name
from rota.errors import AppNotFound, ConfigError, InvalidPayload
from rota.handler_exceptions import LONGEST_DELAY
from rota.handlers import Handler
from rota.handlers.codec import codec_of
from rota.handlers.handler_function import declare
from rota.handlers.python import in_process, in_thread, is_async, on_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import datetime

    from rota.cron import Fold, Gap
    from rota.domain.declaration import Declaration
    from rota.domain.schedule import Misfire, Overlap
    from rota.domain.validation import Delivery
    from rota.handlers import Middleware
    from rota.handlers.handler_function import HandlerFunction
    from rota.handlers.job import Job, SyncJob

P = TypeVar("P")
R = TypeVar("R")
F = TypeVar("F", bound="Callable[..., Any]")
M = TypeVar("M", bound="Middleware")


class Declare(Protocol):
    """What `app.handler(…)` returns: the decorator."""

    @overload
    def __call__(
        self, function: Callable[[Job[P]], Coroutine[Any, Any, R]], /
    ) -> HandlerFunction[P, Job[P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[[SyncJob[P]], R], /) -> HandlerFunction[P, SyncJob[P], R]: ...


class App:
    """Handlers under one name. `lifespan` is entered before the first claim and left after the drain; it yields `job.state`."""

    def __init__(
        self,
        name: str,
        *,
        release: str | None = None,
        lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None,
    ) -> None:
        check_name("app", name)
        check_declaration(f"app {name!r}", release=release)
        _check_lifespan(name, lifespan)
        self.name = name
        self.release = release
        self.lifespan = lifespan
        self._handlers: dict[str, Handler] = {}
        self._schedules: list[tuple[Callable[..., Any] | None, str | None, str | None, Mapping[str, Any]]] = []
        self._middleware: list[Middleware] = []
        self._included: list[App] = []
        self._included_by: list[App] = []

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """name -> Handler, those of included apps among them"""
        found = dict(self._handlers)
        for other in self._included:
            found |= other.handlers
        return {name: handler.inside(self._middleware) for name, handler in found.items()}

    def handler(
        self,
        name: str,
        *,
        queue: str | None = None,
        max_attempts: int | None = None,
        backoff_base: timedelta | None = None,
        backoff_cap: timedelta | None = None,
        backoff: Sequence[timedelta] | Callable[[int], timedelta] | None = None,
        timeout: timedelta | None = None,
        delivery: Delivery | None = None,
        permanent: tuple[type[BaseException], ...] = (),
        runs_in: Literal["process"] | None = None,
    ) -> Declare:
        """Register a function that takes the job: `async def` runs on the loop, `def` in a thread, either in a process if asked.
        What the lifespan yielded doesn't reach a process: there `job.state` is None.

        What is None is the design's default: queue 'default', 20 attempts, backoff from 5 s up to 1 h, no timeout, at least once.
        An exception of a type in `permanent` makes a dead letter at once. Instead of `backoff_base` and `backoff_cap`, which
        double and are jittered, `backoff` gives the delays after the first, the second … failure (the last one holds on), or a
        function of the attempt that failed, from 1; they are taken as they are, and win over the job's own columns. After an
        attempt whose daemon died nobody can ask a function.
        The function is returned unchanged: call it in tests. It gains `.name`, `.enqueue(conn, payload)` and its variants.
        Raises ConfigError for a name that is taken, and for what can't be.
        """
        if callable(name):
            raise ConfigError(f'write @app.handler("{getattr(name, "__name__", "name")}"): the handler needs a name')
        check_name("handler", name)
        check_declaration(
            f"handler {name!r}",
            queue=queue,
            max_attempts=max_attempts,
            backoff_base=backoff_base,
            backoff_cap=backoff_cap,
            timeout=timeout,
            delivery=delivery,
            runs_in=runs_in,
        )
        backoff_base, backoff_cap, backoff = _checked_backoff(name, backoff, backoff_base, backoff_cap)
        if not (isinstance(permanent, Sequence) and all(_is_exception_type(each) for each in permanent)):
            raise ConfigError(
                f"permanent of handler {name!r} must be a tuple of exception types, for a single one, too: (ValueError,)"
            )

        def register(function: Any) -> Any:
            for app in (self, *self._all_included_by()):
                if name in app.handlers:
                    raise ConfigError(
                        f"handler {name!r} is declared twice in app {app.name!r}: give one of them another name"
                    )
            if not callable(function) or len(inspect.signature(function).parameters) != 1:
                raise ConfigError(f"handler {name!r} must be a function that takes exactly one argument, the job")
            frame = inspect.currentframe()
            codec = codec_of(function, frame.f_back.f_locals if frame is not None and frame.f_back is not None else {})
            kind = in_process if runs_in == "process" else on_loop if is_async(function) else in_thread
            self._handlers[name] = Handler(
                name=name,
                function=function,
                codec=codec,
                kind=kind,
                queue=queue,
                max_attempts=max_attempts,
                backoff_base=backoff_base,
                backoff_cap=backoff_cap,
                backoff=backoff,
                timeout=timeout,
                delivery=delivery,
                permanent=tuple(permanent),
            )
            return declare(name, function, codec)

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
        check_declaration("schedule", meta=meta, paused=paused)
        if callable(cron):
            raise ConfigError('write @app.schedule("0 6 * * *"): the schedule needs a cron expression or every')
        check_declaration("schedule", name=name, handler=handler)
        # Now, so that an error is one of the line that made it; whose handler it is, only the finished app can tell.
        declare_schedule(name or handler or str(cron or "?"), **{**given, "payload": None}, handler=handler or "?")
        if handler is not None:
            self._schedules.append((None, handler, name, given))

        def register(function: F) -> F:
            if handler is None:
                self._schedules.append((function, None, name, given))
            return function

        return register

    @property
    def schedules(self) -> Mapping[str, Declaration]:
        """name -> Declaration, those of included apps among them.

        Raises ConfigError where two have one name, or a function isn't a handler; InvalidPayload for what its handler can't decode.
        """
        found: dict[str, Declaration] = {}
        handlers = self.handlers
        for function, handler, name, given in self._schedules:
            called = handler or self._name_of(function)
            payload = given["payload"]
            if payload is not None:
                try:
                    payload = handlers[called].codec.encode(payload) if called in handlers else encode(payload)
                except InvalidPayload as error:
                    raise ConfigError(f"schedule {name or called!r}: {error}") from error
            self._add(found, declare_schedule(name or called, **{**given, "payload": payload}, handler=called))
        for other in self._included:
            for each in other.schedules.values():
                self._add(found, each)
        return found

    def _add(self, found: dict[str, Declaration], declaration: Declaration) -> None:
        if declaration.name in found:
            raise ConfigError(
                f"schedule {declaration.name!r} is declared twice in app {self.name!r}: rename one of them"
            )
        found[declaration.name] = declaration

    def _name_of(self, function: Callable[..., Any] | None) -> str:
        those = (function, getattr(function, "__wrapped__", function))
        names = [name for name, handler in self.handlers.items() if handler.function in those]
        if len(names) != 1:
            what = (
                f"is {len(names)} handlers" if names else "is no handler: put @app.handler(…) beside @app.schedule(…)"
            )
            raise ConfigError(f"{getattr(function, '__qualname__', function)} {what}; or say which: handler=…")
        return names[0]

    def middleware(self, function: M) -> M:
        """Have `async def function(job, call_next)` run around every attempt of this app's handlers and those it includes.

        The first one declared is the outermost. It returns what `await call_next(job)` returned, or another result; what it
        raises is the attempt's failure. The payload has been decoded. For a plain `def` it runs on the loop, around the thread.
        """
        if not callable(function) or not is_async(function) or len(inspect.signature(function).parameters) != 2:
            raise ConfigError(f"middleware {function!r} must be an async def that takes (job, call_next)")
        self._middleware.append(function)
        return function

    def include(self, other: App) -> None:
        """Take over the handlers and schedules of another app, now and later, each within its own app's middleware.

        Raises ConfigError for a name that is taken, and for an app with a lifespan.
        """
        if not isinstance(other, App):
            raise ConfigError(f"app {self.name!r} can't include a {type(other).__name__}: write a rota.App")
        if other.lifespan is not None:
            raise ConfigError(
                f"app {other.name!r} has a lifespan, which nobody would enter once {self.name!r} includes it: "
                f"enter it in the lifespan of {self.name!r}"
            )
        for app in (self, *self._all_included_by()):
            if app is other:
                raise ConfigError(f"app {other.name!r} can't include itself")
            if taken := sorted(app.handlers.keys() & other.handlers.keys()):
                raise ConfigError(
                    f"apps {app.name!r} and {other.name!r} both declare {', '.join(taken)}: rename one of them"
                )
        self._included.append(other)
        other._included_by.append(self)

    def joined_by(self, other: App) -> App:
        """Return an app with the handlers of both, this one's name and lifespan; neither is changed by it."""
        if not (other.handlers or other.schedules):
            return self
        both = App(self.name, release=self.release, lifespan=self.lifespan)
        if taken := sorted(self.handlers.keys() & other.handlers.keys()):
            raise ConfigError(
                f"app {self.name!r} declares {', '.join(taken)}, which the configuration turns on: rename one of them"
            )
        both._included = [self, other]
        return both

    def _all_included_by(self) -> Iterator[App]:
        for app in self._included_by:
            yield app
            yield from app._all_included_by()  # noqa: SLF001


def _is_exception_type(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def _check_lifespan(app: str, lifespan: object) -> None:
    if hasattr(lifespan, "__aenter__") and not isinstance(lifespan, type):
        raise ConfigError(f"app {app!r}: lifespan was called: write lifespan=…, the function itself")
    if inspect.isasyncgenfunction(lifespan):
        raise ConfigError(f"app {app!r}: lifespan = {lifespan!r:.80}: put @asynccontextmanager above the function")
    if lifespan is not None and not callable(lifespan):
        raise ConfigError(f"app {app!r}: lifespan = {lifespan!r:.80}: write a function that returns a context manager")


def _checked_backoff(
    name: str,
    backoff: Sequence[timedelta] | Callable[[int], timedelta] | None,
    base: timedelta | None,
    cap: timedelta | None,
) -> tuple[timedelta | None, timedelta | None, Sequence[timedelta] | Callable[[int], timedelta] | None]:
    """Return base, cap and backoff: for a list, its first and its longest delay are what a lost attempt is retried by."""
    if backoff is None or (callable(backoff) and base is None and cap is None):
        return base, cap, backoff
    if base is not None or cap is not None:
        raise ConfigError(f"handler {name!r} has both backoff and backoff_base or backoff_cap: choose one")
    delays = list(backoff) if isinstance(backoff, Sequence) else []
    if not delays or not all(isinstance(d, timedelta) and timedelta(0) < d <= LONGEST_DELAY for d in delays):
        raise ConfigError(
            f"handler {name!r}: backoff = {backoff!r:.80}: write a list of positive timedeltas up to 366 days, or a function"
        )
    return delays[0], max(delays), delays


def find_app(reference: str) -> App:
    """Import `module:attribute`, from the current folder too. Raises AppNotFound, saying where it looked and what it found."""
    module_name, _, attribute = reference.partition(":")
    attribute = attribute or "app"
    if "" not in sys.path:
        sys.path.insert(0, "")
    if "/" in module_name:
        raise AppNotFound(f"no module {module_name!r}: that is a path{_spelling(module_name)}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise AppNotFound(_broken(module_name, error)) from error
        raise AppNotFound(
            f"no module {module_name!r}: looked in {Path.cwd()} and along PYTHONPATH{_spelling(module_name)}"
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
    """Say where in the app's code its import failed: the last line that is neither rota's nor the import machinery's."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in {__file__, importlib.__file__} and not frame.filename.startswith("<frozen importlib")
    ]
    # An app may lie in rota itself, as the demo's does.
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parent)] or frames
    place = f"{error.filename}, line {error.lineno}" if isinstance(error, SyntaxError) else None
    place = place or (f"{own[-1].filename}, line {own[-1].lineno}" if own else module_name)
    said = error.msg if isinstance(error, SyntaxError) else error
    return f"{module_name} can't be imported: {type(error).__name__}: {said} ({place})"


def _spelling(module_name: str) -> str:
    """End the sentence with what was probably meant: a file's module, or the one in the same package that is spelled most alike."""
    parent, _, name = module_name.rpartition(".")
    if name == "py" or "/" in module_name:
        meant = Path(module_name.removesuffix(".py")).absolute()
        meant = meant.relative_to(Path.cwd()) if meant.is_relative_to(Path.cwd()) else Path(meant.name)
        found = f"; did you mean {'.'.join(meant.parts)}?"
    else:
        # A module that is no package has nothing below it.
        folders = getattr(sys.modules[parent], "__path__", []) if parent in sys.modules else [str(Path.cwd())]
        beside = [each.name for each in pkgutil.iter_modules(folders)]
        close = get_close_matches(name, beside, 1)
        found = (
            f"; did you mean {parent}{'.' if parent else ''}{close[0]}?"
            if close
            else f", found {', '.join(beside[:8])}."
            if beside
            else "."
        )
    return f"{found} Give the app as module:attribute, such as myapp.jobs:app"
