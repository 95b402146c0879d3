"""Signals: the orders to stop, who carries them out if the main loop doesn't turn, and what the other signals do."""

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

SIGNALS = (signal.SIGTERM, signal.SIGINT)

QUIT_SECONDS = 0.5
"""How long handlers that SIGQUIT interrupts may take to end."""

OTHERS = ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")
"""Signals that would end the process, where the platform has them."""

TURNS_WITHIN = 5.0
"""Seconds within which the main loop must turn when there is an order to carry out whose time is over."""


class Stops:
    """The two orders to stop. The first signal drains, the second interrupts, the third has its default effect."""

    def __init__(self) -> None:
        self.claiming = asyncio.Event()
        self.running = asyncio.Event()
        self.quitting = asyncio.Event()
        """Set where handlers that are interrupted get QUIT_SECONDS instead of the grace."""
        self._cut: asyncio.Timeout | None = None

    def order(self) -> None:
        """Take the next order."""
        cut, self._cut = self._cut, None  # once: what unwinds already can't be cut again
        if cut is not None:
            cut.reschedule(asyncio.get_running_loop().time())
        (self.running if self.claiming.is_set() else self.claiming).set()

    def quit(self) -> None:
        """Take both orders at once, without the grace."""
        self.quitting.set()
        while not self.running.is_set():
            self.order()

    @asynccontextmanager
    async def cutting(self) -> AsyncIterator[None]:
        """Leave the block at the first order that comes, because there is nothing to drain yet."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._cut = scope
                yield
        except TimeoutError:
            if not scope.expired():
                raise
        finally:
            self._cut = None

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
        """Take SIGTERM and SIGINT as orders, and SIGQUIT as both orders at once.

        SIGHUP calls `reload` and SIGUSR1 `dump`, the latter on a thread of its own; SIGUSR2 and SIGALRM are reported as `ignored`.

        Where the main loop doesn't turn any more when the `drain` of the first order or the `grace` of the second is over, in
        seconds, `hung` is called, on a thread of its own.
        """
        loop = asyncio.get_running_loop()
        forks_are_not_us()

        def ordered() -> None:
            self.order()
            if self.running.is_set():
                for name in SIGNALS:
                    loop.remove_signal_handler(name)

        for name in SIGNALS:
            loop.add_signal_handler(name, ordered)
        calls: dict[str, Callable[[], None]] = {
            "SIGHUP": reload,
            "SIGQUIT": self.quit,
            "SIGUSR1": lambda: None,  # the last resort dumps, while the main loop is blocked, too
            "SIGUSR2": lambda: ignored("SIGUSR2"),
            "SIGALRM": lambda: ignored("SIGALRM"),
        }
        others = [getattr(signal, name) for name in OTHERS if hasattr(signal, name)]
        # Where SIGHUP is ignored already, by nohup for one, it stays ignored.
        others = [number for number in others if signal.getsignal(number) is not signal.SIG_IGN]
        for number in others:
            loop.add_signal_handler(number, calls[number.name])
        try:
            with _LastResort(loop, patience=(drain + grace, grace), hung=hung, dump=dump).beside_the_loop():
                yield
        finally:
            for number in (*SIGNALS, *others):
                loop.remove_signal_handler(number)


@cache
def forks_are_not_us() -> None:
    """Have processes that a handler forks take signals as any other process does, from now on.

    Without it, one that multiprocessing ends by SIGTERM either lives on, or tells our own loop by the pipe that it has
    inherited: we drain.
    """
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=_take_signals_as_usual)


def _take_signals_as_usual() -> None:
    signal.set_wakeup_fd(-1)
    for name in ("SIGTERM", "SIGINT", *OTHERS):
        if hasattr(signal, name) and callable(signal.getsignal(number := getattr(signal, name))):
            signal.signal(number, signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)


class _LastResort:
    """Sees the same signals, also while a handler keeps the main loop from turning and the orders from being taken."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        patience: tuple[float, float],
        hung: Callable[[], None],
        dump: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._patience = list(patience)
        self._hung = hung
        self._dump = dump
        # Its put() may interrupt anything, itself too: no other way to tell a thread can do that.
        self._orders: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._turned = threading.Event()
        self._left = False

    @contextmanager
    def beside_the_loop(self) -> Iterator[None]:
        """Call the loop's own handlers and listen in. Their removal ends this, too."""
        for name in SIGNALS:
            if callable(loops := signal.getsignal(name)):
                signal.signal(name, self._listening_in(loops))
        if hasattr(signal, "SIGQUIT") and callable(loops := signal.getsignal(signal.SIGQUIT)):
            signal.signal(signal.SIGQUIT, self._quitting(loops))
        if hasattr(signal, "SIGUSR1") and callable(signal.getsignal(signal.SIGUSR1)):
            signal.signal(signal.SIGUSR1, self._dumping)
        thread = threading.Thread(target=self._watch, daemon=True, name="rota stops")
        thread.start()
        try:
            yield
        finally:
            # Whoever leaves has turned. Without this, a thread that has just asked would wait for what join() keeps from turning.
            self._left = True
            self._turned.set()
            self._orders.put(None)
            thread.join()

    def _listening_in(
        self, loops: Callable[[int, FrameType | None], object]
    ) -> Callable[[int, FrameType | None], None]:
        def signalled(number: int, frame: FrameType | None) -> None:
            if self._patience:
                self._orders.put(self._patience.pop(0))
                loops(number, frame)
            else:
                # The loop hasn't come to the second order yet, which leaves the third to the system.
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        return signalled

    def _quitting(self, loops: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], None]:
        def signalled(number: int, frame: FrameType | None) -> None:
            self._orders.put(QUIT_SECONDS)
            loops(number, frame)

        return signalled

    def _dumping(self, _number: int, _frame: FrameType | None) -> None:
        threading.Thread(target=self._dump, daemon=True, name="rota stacks").start()

    def _watch(self) -> None:
        seconds = self._orders.get()
        until = float("inf")
        while seconds is not None:
            until = min(until, boottime() + seconds)
            try:
                seconds = self._orders.get(timeout=max(0.0, until - boottime()))
            except queue.Empty:
                if not self._turns():
                    self._hung()
                    return
                until, seconds = float("inf"), TURNS_WITHIN

    def _turns(self) -> bool:
        self._turned.clear()
        if self._left:
            return True
        with suppress(RuntimeError):  # closed: it has come to its end
            self._loop.call_soon_threadsafe(self._turned.set)
            return self._turned.wait(TURNS_WITHIN)
        return True
