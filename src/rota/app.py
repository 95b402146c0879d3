"""An app: the handlers that a daemon runs, and the schedules that its code declares."""

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
from rota.domain.declaration import declare_limit
from rota.domain.payload import encode
from rota.domain.validation import check_declaration, check_name
from rota.errors import AppNotFound, ConfigError, InvalidPayload
from rota.handler_exceptions import LONGEST_DELAY
from rota.handlers import Handler
from rota.handlers.codec import codec_of
from rota.handlers.handler_function import declare, limit_key_of
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
    """The decorator that `app.handler(…)` returns."""

    @overload
    def __call__(
        self, function: Callable[[Job[P]], Coroutine[Any, Any, R]], /
    ) -> HandlerFunction[P, Job[P], Coroutine[Any, Any, R]]: ...
    @overload
    def __call__(self, function: Callable[[SyncJob[P]], R], /) -> HandlerFunction[P, SyncJob[P], R]: ...


class App:
    """Handlers and schedules under one name.

    `lifespan` is entered before the first claim and left after the drain. The value that it yields is `job.state`.
    """

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

    def __repr__(self) -> str:
        release = "" if self.release is None else f", release {self.release!r}"
        return f"<App {self.name!r}{release}: {len(self.handlers)} handlers, {self._count_schedules()} schedules>"

    def _count_schedules(self) -> int:
        return len(self._schedules) + sum(app._count_schedules() for app in self._included)  # noqa: SLF001

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by name, including those of included apps."""
        handlers = dict(self._handlers)
        for other in self._included:
            handlers |= other.handlers
        return {name: handler.with_outer_middleware(self._middleware) for name, handler in handlers.items()}

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
        limit_key: str | Callable[[Any], str | None] | None = None,
        max_running: int | None = None,
        max_starts: int | None = None,
        per: timedelta | None = None,
    ) -> Declare:
        """Register a function that takes the job. `async def` runs on the loop, `def` in a thread.

        With runs_in="process", both run in a process of their own. There, `job.state` is None: the lifespan runs in the daemon.

        None means the default: queue 'default', 20 attempts, backoff from 5 s up to 1 h, no timeout, at least once.
        An exception of a type in `permanent` makes a dead letter at once. `backoff` replaces `backoff_base` and `backoff_cap`,
        whose delays double and have jitter. It is a list of delays (the first failure, the second …; the last delay repeats), or a
        function that gets the number of the failed attempt, from 1. These delays have no jitter and win over the job's own
        columns. The function isn't called for an attempt whose daemon died.

        `limit_key` is the key of its jobs, or a function of the payload that returns it. The enqueue methods of the returned
        function and declared schedules use it, unless they set another. `max_running` jobs of the handler run at once in the
        whole fleet, and `max_starts` start within `per`: a starting daemon stores both as the limit `handler:NAME`. As with
        declared schedules, edits by operators stay.

        The decorator returns the same function, so tests can call it, with `.name`, `.enqueue(conn, payload)` and variants added.
        Raises ConfigError for a name that is taken and for invalid options.
        """
        if callable(name):
            raise ConfigError(f'write @app.handler("{getattr(name, "__name__", "name")}"): the handler needs a name')
        check_name("handler", name)
        options: Any = {"queue": queue, "max_attempts": max_attempts, "timeout": timeout, "delivery": delivery}
        check_declaration(
            f"handler {name!r}", backoff_base=backoff_base, backoff_cap=backoff_cap, runs_in=runs_in, **options
        )
        limits: Any = {"max_running": max_running, "max_starts": max_starts, "per": per}
        check_declaration(f"handler {name!r}", limit_key=None if callable(limit_key) else limit_key, **limits)
        if (max_starts is None) is not (per is None):
            raise ConfigError(f"handler {name!r} needs both max_starts and per, or neither")
        backoff_base, backoff_cap, backoff = _checked_backoff(name, backoff, backoff_base, backoff_cap)
        if not (isinstance(permanent, Sequence) and all(_is_exception_type(kind) for kind in permanent)):
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
                backoff_base=backoff_base,
                backoff_cap=backoff_cap,
                backoff=backoff,
                permanent=tuple(permanent),
                limit_key=limit_key,
                **options,
                **limits,
            )
            return declare(name, function, codec, limit_key)

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
        limit_key: str | None = None,
    ) -> Callable[[F], F]:
        """Declare a schedule of a handler. Put it above or below `@app.handler`, or give `handler` and ignore the result.

        A starting daemon inserts missing schedules, and updates the values that have changed *in the code* since they were last
        applied. Edits and pauses by operators stay, an update fires nothing, and an older release changes nothing. `name`
        defaults to the handler's name. `paused` is only used when the schedule is inserted. None means the default of
        `rota.schedules`, and for `limit_key` that of the handler. Raises InvalidCron or ConfigError for invalid options.
        """
        arguments = dict(locals())
        given = {option: value for option, value in arguments.items() if option not in {"self", "name", "handler"}}
        check_declaration("schedule", meta=meta, paused=paused)
        if callable(cron):
            raise ConfigError('write @app.schedule("0 6 * * *"): the schedule needs a cron expression or every')
        check_declaration("schedule", name=name, handler=handler)
        # Checked now, so that the traceback shows this line. The handler is only known once the app is complete.
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
        """The declared schedules by name, including those of included apps.

        Raises ConfigError if two have the same name, a function isn't a handler, or a handler can't decode its payload.
        """
        declarations: dict[str, Declaration] = {}
        handlers = self.handlers
        for function, handler, name, given in self._schedules:
            handler_name = handler or self._handler_name_of(function)
            payload = given["payload"]
            if payload is not None:
                try:
                    payload = (
                        handlers[handler_name].codec.encode(payload) if handler_name in handlers else encode(payload)
                    )
                except InvalidPayload as error:
                    raise ConfigError(f"schedule {name or handler_name!r}: {error}") from error
            limit_key = given["limit_key"]
            if limit_key is None and handler_name in handlers:
                limit_key = _schedule_limit_key(name or handler_name, handlers[handler_name], given["payload"])
            values = {**given, "payload": payload, "limit_key": limit_key}
            self._add_declaration(declarations, declare_schedule(name or handler_name, **values, handler=handler_name))
        for other in self._included:
            for declaration in other.schedules.values():
                self._add_declaration(declarations, declaration)
        return declarations

    @property
    def limits(self) -> Mapping[str, Declaration]:
        """The declared limits by key, `handler:NAME`, including those of included apps."""
        declared = [
            declare_limit(name, max_running=handler.max_running, max_starts=handler.max_starts, per=handler.per)
            for name, handler in self.handlers.items()
        ]
        return {limit.name: limit for limit in declared if limit is not None}

    def _add_declaration(self, declarations: dict[str, Declaration], declaration: Declaration) -> None:
        if declaration.name in declarations:
            raise ConfigError(
                f"schedule {declaration.name!r} is declared twice in app {self.name!r}: rename one of them"
            )
        declarations[declaration.name] = declaration

    def _handler_name_of(self, function: Callable[..., Any] | None) -> str:
        candidates = (function, getattr(function, "__wrapped__", function))
        names = [name for name, handler in self.handlers.items() if handler.function in candidates]
        if len(names) != 1:
            problem = (
                f"is {len(names)} handlers" if names else "is no handler: put @app.handler(…) beside @app.schedule(…)"
            )
            raise ConfigError(f"{getattr(function, '__qualname__', function)} {problem}; or say which: handler=…")
        return names[0]

    def middleware(self, function: M) -> M:
        """Run `async def function(job, call_next)` around every attempt of this app's handlers and of those it includes.

        The first one declared is the outermost. It returns the result of `await call_next(job)` or another result, and an
        exception that it raises fails the attempt. The payload is already decoded. Middleware always runs on the loop, also
        around a plain `def` in its thread.
        """
        if not callable(function) or not is_async(function) or len(inspect.signature(function).parameters) != 2:
            raise ConfigError(f"middleware {function!r} must be an async def that takes (job, call_next)")
        self._middleware.append(function)
        return function

    def include(self, other: App) -> None:
        """Include the handlers and schedules of another app, also those declared later. They keep their own app's middleware.

        Raises ConfigError for a name that is taken, and for an app with a lifespan.
        """
        if not isinstance(other, App):
            raise ConfigError(f"app {self.name!r} can't include a {type(other).__name__}: write a rota.App")
        if other.lifespan is not None:
            raise ConfigError(
                f"app {other.name!r} has a lifespan, which would never be entered once {self.name!r} includes it: "
                f"enter it in the lifespan of {self.name!r}"
            )
        for app in (self, *self._all_included_by()):
            if app is other:
                raise ConfigError(f"app {other.name!r} can't include itself")
            if duplicates := sorted(app.handlers.keys() & other.handlers.keys()):
                raise ConfigError(
                    f"apps {app.name!r} and {other.name!r} both declare {', '.join(duplicates)}: rename one of them"
                )
        self._included.append(other)
        other._included_by.append(self)

    def joined_by(self, other: App) -> App:
        """Return a new app with the handlers and schedules of both, and with this one's name, release and lifespan."""
        if not (other.handlers or other.schedules):
            return self
        joined = App(self.name, release=self.release, lifespan=self.lifespan)
        if duplicates := sorted(self.handlers.keys() & other.handlers.keys()):
            raise ConfigError(
                f"app {self.name!r} declares {', '.join(duplicates)}, which the configuration turns on: rename one of them"
            )
        joined._included = [self, other]
        return joined

    def _all_included_by(self) -> Iterator[App]:
        for app in self._included_by:
            yield app
            yield from app._all_included_by()  # noqa: SLF001


def _schedule_limit_key(schedule: str, handler: Handler, payload: Any) -> str | None:
    """Return the key of the handler for the schedule's jobs. Raises ConfigError if its function fails."""
    if not callable(handler.limit_key):
        return handler.limit_key
    try:
        return limit_key_of(handler.limit_key, handler.codec.decode("{}") if payload is None else payload)
    except Exception as error:
        raise ConfigError(
            f"schedule {schedule!r}: limit_key of handler {handler.name!r} fails for its payload "
            f"({type(error).__name__}): give the schedule its own limit_key"
        ) from error


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
    """Return base, cap and backoff. A lost attempt uses only base and cap; from a list, these are its first and longest delay."""
    if backoff is None or (callable(backoff) and base is None and cap is None):
        return base, cap, backoff
    if base is not None or cap is not None:
        raise ConfigError(f"handler {name!r} has both backoff and backoff_base or backoff_cap: choose one")
    delays = list(backoff) if isinstance(backoff, Sequence) else []
    if not delays or not all(
        isinstance(delay, timedelta) and timedelta(0) < delay <= LONGEST_DELAY for delay in delays
    ):
        raise ConfigError(
            f"handler {name!r}: backoff = {backoff!r:.80}: write a list of positive timedeltas up to 366 days, or a function"
        )
    return delays[0], max(delays), delays


def find_app(reference: str) -> App:
    """Import `module:attribute`, also from the current folder. Raises AppNotFound, which names the places searched."""
    module_name, _, attribute = reference.partition(":")
    attribute = attribute or "app"
    if "" not in sys.path:
        sys.path.insert(0, "")
    if "/" in module_name:
        raise AppNotFound(f"no module {module_name!r}: that is a path{_import_hint(module_name)}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise AppNotFound(_import_error_text(module_name, error)) from error
        raise AppNotFound(
            f"no module {module_name!r}: looked in {Path.cwd()} and along PYTHONPATH{_import_hint(module_name)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise AppNotFound(_import_error_text(module_name, error)) from error
    candidate = getattr(module, attribute, None)
    if isinstance(candidate, App):
        return candidate
    apps = [name for name, value in vars(module).items() if isinstance(value, App)]
    similar = get_close_matches(attribute, apps, 1) or apps[:1]
    hint = f"; did you mean {module_name}:{similar[0]}?" if similar else f"; {module_name} holds no rota.App at all"
    raise AppNotFound(f"{module_name} ({module.__file__}) has no app called {attribute!r}{hint}")


def _import_error_text(module_name: str, error: BaseException) -> str:
    """Return the message for a failed import, with the last line of the traceback that belongs to the app."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in {__file__, importlib.__file__} and not frame.filename.startswith("<frozen importlib")
    ]
    # The demo's app is part of rota, so its own frames are frames of rota.
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parent)] or frames
    place = f"{error.filename}, line {error.lineno}" if isinstance(error, SyntaxError) else None
    place = place or (f"{own[-1].filename}, line {own[-1].lineno}" if own else module_name)
    text = error.msg if isinstance(error, SyntaxError) else error
    return f"{module_name} can't be imported: {type(error).__name__}: {text} ({place})"


def _import_hint(module_name: str) -> str:
    """Return the end of the message: the module that was probably meant, guessed from a path or from similar names."""
    parent, _, name = module_name.rpartition(".")
    if name == "py" or "/" in module_name:
        path = Path(module_name.removesuffix(".py")).absolute()
        path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(path.name)
        hint = f"; did you mean {'.'.join(path.parts)}?"
    else:
        # A module that is no package contains no modules.
        folders = getattr(sys.modules[parent], "__path__", []) if parent in sys.modules else [str(Path.cwd())]
        module_names = [module.name for module in pkgutil.iter_modules(folders)]
        similar = get_close_matches(name, module_names, 1)
        hint = (
            f"; did you mean {parent}{'.' if parent else ''}{similar[0]}?"
            if similar
            else f", found {', '.join(module_names[:8])}."
            if module_names
            else "."
        )
    return f"{hint} Give the app as module:attribute, such as myapp.jobs:app"
