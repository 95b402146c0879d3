"""Turn POSIX signals into shutdown requests, also while a handler blocks the main loop."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING

from rota.runtime.clock import boottime

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from types import FrameType

SHUTDOWN_SIGNALS = (signal.SIGTERM, signal.SIGINT)

QUIT_SECONDS = 0.5
"""How long handlers may take to end after SIGQUIT has interrupted them."""

OTHER_SIGNALS = ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")
"""Signals that end a process by default. Not every platform has all of them."""

LOOP_RESPONSE_SECONDS = 5.0
"""A main loop that runs no callback for this long after a request's deadline counts as blocked."""


class ShutdownRequests:
    """The shutdown requests so far. The first signal drains, the second interrupts, the third has its default effect."""

    def __init__(self) -> None:
        self.drain_requested = asyncio.Event()
        """Claim nothing more, and let running jobs finish."""
        self.interrupt_requested = asyncio.Event()
        """Interrupt the running jobs."""
        self.quit_requested = asyncio.Event()
        """Interrupted handlers get QUIT_SECONDS instead of the grace period."""
        self._startup: asyncio.Timeout | None = None

    def request_next(self) -> None:
        """Request a drain, or an interruption if a drain was requested before."""
        startup, self._startup = self._startup, None  # once: a startup that is being cancelled can't be cancelled again
        if startup is not None:
            startup.reschedule(asyncio.get_running_loop().time())
        (self.interrupt_requested if self.drain_requested.is_set() else self.drain_requested).set()

    def request_quit(self) -> None:
        """Request drain and interruption at once, without the grace period."""
        self.quit_requested.set()
        while not self.interrupt_requested.is_set():
            self.request_next()

    @asynccontextmanager
    async def cancelling_startup(self) -> AsyncIterator[None]:
        """Leave the block at the first request, because there is nothing to drain yet."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._startup = scope
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._startup = None

    @contextmanager
    def on_signals(
        self,
        *,
        drain: float,
        grace: float,
        hung: Callable[[], None],
        reload: Callable[[], None],
        dump: Callable[[], None],
        ignored: Callable[[str], None],
    ) -> Iterator[None]:
        """Inside the block, SIGTERM and SIGINT make the next request. SIGQUIT makes both at once.

        SIGHUP calls `reload`. SIGUSR1 calls `dump` on a thread of its own. SIGUSR2 and SIGALRM call `ignored` with their name.
        `drain` and `grace` are the seconds that each of the two requests may take. If the main loop is blocked when that time is
        over, `hung` is called on a thread of its own.
        """
        loop = asyncio.get_running_loop()
        reset_signals_in_forks()

        def request() -> None:
            self.request_next()
            if self.interrupt_requested.is_set():
                for name in SHUTDOWN_SIGNALS:
                    loop.remove_signal_handler(name)
                    signal.signal(name, signal.SIG_DFL)  # Python's own for SIGINT raises an error inside a handler

        for name in SHUTDOWN_SIGNALS:
            loop.add_signal_handler(name, request)
        calls: dict[str, Callable[[], None]] = {
            "SIGHUP": reload,
            "SIGQUIT": self.request_quit,
            "SIGUSR1": lambda: None,  # _BlockedLoopGuard dumps the stacks, even while the main loop is blocked
            "SIGUSR2": lambda: ignored("SIGUSR2"),
            "SIGALRM": lambda: ignored("SIGALRM"),
        }
        others = [getattr(signal, name) for name in OTHER_SIGNALS if hasattr(signal, name)]
        # An ignored signal stays ignored: nohup starts its command with SIGHUP ignored.
        others = [number for number in others if signal.getsignal(number) is not signal.SIG_IGN]
        for number in others:
            loop.add_signal_handler(number, calls[number.name])
        try:
            with _BlockedLoopGuard(loop, time_limits=(drain + grace, grace), hung=hung, dump=dump).installed():
                yield
        finally:
            for number in (*SHUTDOWN_SIGNALS, *others):
                loop.remove_signal_handler(number)


@cache
def reset_signals_in_forks() -> None:
    """Give processes that a handler forks the default signal handling, from now on.

    A fork with this process's handlers would survive a SIGTERM from multiprocessing. It would also write the signal into the
    wakeup pipe that it shares with this process, and so make this daemon drain.
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_reset_signals)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGINT", *OTHER_SIGNALS):
        if hasattr(signal, name) and callable(signal.getsignal(number := getattr(signal, name))):
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


class _BlockedLoopGuard:
    """Receives the same signals directly. Calls `hung` if a blocked main loop has not carried out a request in time."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        time_limits: tuple[float, float],
        hung: Callable[[], None],
        dump: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._time_limits = list(time_limits)
        self._hung = hung
        self._dump = dump
        # SimpleQueue.put() is reentrant, so a signal handler may call it at any moment.
        self._request_seconds: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        """The seconds that each request may take; None ends the thread."""
        self._loop_responded = threading.Event()
        self._is_leaving = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap the loop's own signal handlers. Removing those removes these, too."""
        for name in SHUTDOWN_SIGNALS:
            if callable(loop_handler := signal.getsignal(name)):
                signal.signal(name, self._on_shutdown_signal(loop_handler))
        if hasattr(signal, "SIGQUIT") and callable(loop_handler := signal.getsignal(signal.SIGQUIT)):
            signal.signal(signal.SIGQUIT, self._on_quit(loop_handler))
        if hasattr(signal, "SIGUSR1") and callable(signal.getsignal(signal.SIGUSR1)):
            signal.signal(signal.SIGUSR1, self._on_dump)
        thread = threading.Thread(target=self._watch, daemon=True, name="rota shutdown")
        thread.start()
        try:
            yield
        finally:
            # join() blocks the loop, so a thread that waits for a response of the loop must be released first.
            self._is_leaving = True
            self._loop_responded.set()
            self._request_seconds.put(None)
            thread.join()

    def _on_shutdown_signal(
        self, loop_handler: Callable[[int, FrameType | None], object]
    ) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            if self._time_limits:
                self._request_seconds.put(self._time_limits.pop(0))
                loop_handler(number, frame)
            else:
                # Third signal. A blocked loop has not removed its handlers yet, so restore the default action here.
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        return handle

    def _on_quit(
        self, loop_handler: Callable[[int, FrameType | None], object]
    ) -> Callable[[int, FrameType | None], None]:
        def handle(number: int, frame: FrameType | None) -> None:
            self._request_seconds.put(QUIT_SECONDS)
            loop_handler(number, frame)

        return handle

    def _on_dump(self, _number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=self._dump, daemon=True, name="rota stacks").start()

    def _watch(self) -> None:
        seconds = self._request_seconds.get()
        deadline = float("inf")
        while seconds is not None:
            deadline = min(deadline, boottime() + seconds)
            try:
                seconds = self._request_seconds.get(timeout=max(0.0, deadline - boottime()))
            except queue.Empty:
                if not self._is_loop_responsive():
                    self._hung()
                    return
                deadline, seconds = float("inf"), LOOP_RESPONSE_SECONDS

    def _is_loop_responsive(self) -> bool:
        self._loop_responded.clear()
        if self._is_leaving:
            return True
        with suppress(RuntimeError):  # the loop is closed, so it has ended properly
            self._loop.call_soon_threadsafe(self._loop_responded.set)
            return self._loop_responded.wait(LOOP_RESPONSE_SECONDS)
        return True
