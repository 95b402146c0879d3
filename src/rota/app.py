"""An app: the handlers that a daemon brings along."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rota.errors import AppNotFound, ConfigError
from rota.handlers import Delivery, Handler
from rota.handlers.python import decoder, in_process, in_thread, on_loop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager
    from datetime import timedelta

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

    def include(self, other: App) -> None:
        """Take over the handlers of another app. Raises ConfigError for a name that is taken."""
        if taken := sorted(self._handlers.keys() & other.handlers.keys()):
            raise ConfigError(
                f"apps {self.name!r} and {other.name!r} both declare {', '.join(taken)}: rename one of them"
            )
        self._handlers.update(other.handlers)


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
