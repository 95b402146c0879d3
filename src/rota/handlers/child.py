"""The process of one attempt of a handler that runs in a process of its own. Started by `in_process`, by nobody else.

Reads one order from standard input and writes one line of JSON per answer to the descriptor named in its arguments, so that
whatever the handler prints goes where the daemon's output goes.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import os
import signal
import sys
import threading
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from rota.app import find_app
from rota.failure import describe
from rota.payload import encode_result
from rota.signals import Cancel, Retry, Snooze


class ChildJob:
    """The attempt, with the names of `SyncJob`; what needs the database is asked of the daemon."""

    def __init__(self, facts: dict[str, Any], payload: Any, answers: Any, stop: threading.Event) -> None:
        self.__dict__.update(facts)
        self.scheduled_for = datetime.fromisoformat(facts["scheduled_for"])
        self.payload = payload
        self.state = None
        self._answers = answers
        self._stop = stop

    @property
    def stop_requested(self) -> bool:
        """True once this process was told to stop."""
        return self._stop.is_set()

    def save_checkpoint(self, value: Any) -> None:
        """Keep a JSON value for the next attempt."""
        self._ask({"is": "checkpoint", "value": value})
        self.checkpoint = value

    def report_progress(self, done: float, note: str | None = None) -> None:
        """Show how far it has come."""
        self._ask({"is": "progress", "done": done, "note": note})

    def _ask(self, question: dict[str, Any]) -> None:
        say(self._answers, question)
        fault = json.loads(sys.stdin.buffer.readline())["fault"]
        if fault is not None:
            raise RuntimeError(fault)


def say(answers: Any, answer: dict[str, Any]) -> None:
    """Write one line to the daemon."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main() -> None:
    """Run the one attempt that standard input describes, and say how it went."""
    # Without it, a daemon killed by -9 leaves this process running beside the job's next attempt.
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    order = json.loads(sys.stdin.buffer.readline())
    handler = find_app(order["app"]).handlers[order["handler"]]
    job = ChildJob(order["facts"], handler.decode(order["payload"]), answers, stop)
    try:
        result = (
            asyncio.run(handler.function(job))
            if inspect.iscoroutinefunction(handler.function)
            else handler.function(job)
        )
        text = encode_result(result)
        say(answers, {"is": "returned", "result": None if text is None else json.loads(text)})
    except (Snooze, Retry) as wish:
        say(answers, {"is": type(wish).__name__.lower(), **wish.as_answer()})
    except Cancel as cancel:
        say(answers, {"is": "cancel", "text": cancel.reason})
    except (Exception, SystemExit) as error:  # noqa: BLE001  the handler's, whatever it is
        failed = describe(error, SimpleNamespace(payload=order["payload"]), handler.permanent)
        say(answers, {"is": "raised", "kind": failed.kind, "text": failed.text, "permanent": failed.permanent})


if __name__ == "__main__":
    main()
