"""Print the demo's story. On a terminal, a progress display is shown below it."""

from __future__ import annotations

import codecs
import io
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from rota.demo.fleet import Daemon
    from rota.demo.records import Check

MAX_WIDTH = 100

DAEMON_STYLES = {
    "running": "green",
    "starting": "cyan",
    "killed": "bold red",
    "stopped": "bold yellow",
    "draining": "cyan",
    "ended": "dim",
}

JOB_STYLES = {
    "future": "dim",
    "due": "cyan",
    "retrying": "yellow",
    "running": "green",
    "succeeded": "green",
    "cancelled": "dim",
    "discarded": "dim",
    "dead": "red",
}

ASCII = {"✓": "ok", "✗": "NO", "…": "..", "→": "->", "·": "-", "━": "="}


@dataclass(slots=True)
class Scene:
    """The data of the progress display."""

    daemons: Sequence[Daemon] = ()
    states: Mapping[str, int] = field(default_factory=dict)
    running: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a daemon's process -> handlers of the jobs that it runs."""


class Screen:
    """Prints the story. With `quiet` it prints nothing, because standard output is for the JSON report."""

    def __init__(self, *, quiet: bool) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            codecs.register_error("rota.demo", _replace_by_ascii)
            sys.stdout.reconfigure(errors="rota.demo")
        self._console = Console(quiet=quiet, highlight=False)
        if self._console.width > MAX_WIDTH or not self._console.is_terminal:
            self._console.width = min(MAX_WIDTH, self._console.width)
        self._shows_progress = self._console.is_terminal and not quiet and not self._console.is_dumb_terminal
        self._began = time.monotonic()
        self._act_began = self._began
        self._act = ""
        self._acts: list[tuple[str, float]] = []
        self.scene = Scene()

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the progress display at the bottom of the terminal inside the block."""
        if not self._shows_progress:
            yield
            return
        with Live(
            get_renderable=self._progress,
            console=self._console,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ):
            yield

    @property
    def elapsed(self) -> float:
        """Seconds since the demo started."""
        return time.monotonic() - self._began

    @property
    def acts(self) -> Sequence[tuple[str, float]]:
        """The finished acts, with the seconds that each took."""
        return self._acts

    def title(self, text: str, below: str) -> None:
        """Print the title and a line below it."""
        self._console.print()
        self._console.print(Text(text, style="bold"))
        self._console.print(Text(below, style="dim"))

    def act(self, title: str) -> None:
        """Start the next act."""
        self.close_act()
        self._act, self._act_began = title, time.monotonic()
        self._console.print()
        self._console.print(Rule(f"[bold]{len(self._acts) + 1}  {escape(title)}[/]", align="left", style="cyan"))

    def close_act(self) -> None:
        """End the current act, and record how long it took."""
        if self._act:
            self._acts.append((self._act, round(time.monotonic() - self._act_began, 2)))
            self._act = ""

    def say(self, text: str, *, style: str = "", bullet: str = " ") -> None:
        """Print a text in rich markup. Wrapped lines are indented below the first."""
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_column(width=2, justify="right")
        line.add_column(ratio=1)
        line.add_row(bullet, Text.from_markup(text, style=style))
        self._console.print(line)

    def event(self, seconds: float, text: str) -> None:
        """Print an event, with the seconds since the act's main event."""
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_column(width=9, justify="right", style="cyan")
        line.add_column(ratio=1)
        line.add_row(f"+{seconds:.1f} s", Text.from_markup(text))
        self._console.print(line)

    def sql(self, text: str) -> None:
        """Print SQL that is being run."""
        self._console.print(Padding(Text(text, style="magenta"), (0, 0, 0, 3)))

    def table(self, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> None:
        """Print rows. Each column is (heading, "left" or "right")."""
        table = Table(
            box=box.SIMPLE_HEAD if any(heading for heading, _ in columns) else None,
            show_header=any(heading for heading, _ in columns),
            show_edge=False,
            pad_edge=False,
            header_style="dim",
            padding=(0, 1),
        )
        for heading, justify in columns:
            table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._console.print(Padding(table, (0, 0, 0, 3)))

    def checks(self, checks: Sequence[Check]) -> None:
        """Print each promise, whether it held, and the proof."""
        for check in checks:
            mark = "[bold green]✓[/]" if check.passed else "[bold red]✗[/]"
            fact = escape(check.fact) if check.passed else f"[red]{escape(check.fact)}[/]"
            self.say(f"[bold]{escape(check.promise)}[/]", bullet=mark)
            self.say(f"{fact} [dim]· {escape(check.proof)}[/]")

    def plain(self, text: str = "", *, style: str = "") -> None:
        """Print text as it is."""
        self._console.print(Text(text, style=style))

    def _progress(self) -> RenderableType:
        scene = self.scene
        daemons = Table.grid(padding=(0, 2, 0, 0))
        daemons.add_column(width=4)
        daemons.add_column(width=9)
        daemons.add_column(width=9)
        daemons.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for daemon in scene.daemons:
            if not daemon.lives:
                continue
            handlers = scene.running.get(daemon.name, ())
            state_text = Text(daemon.state, style=DAEMON_STYLES.get(daemon.state, ""))
            daemons.add_row(
                Text(daemon.name, style="bold"), f"{daemon.life.pid}", state_text, Text(_count_by_handler(handlers))
            )
        counts = Text("jobs  ", style="bold")
        for state, style in JOB_STYLES.items():
            if count := scene.states.get(state, 0):
                counts.append(f"{count} {state}  ", style=style)
        ended = sum(scene.states.get(state, 0) for state in ("succeeded", "cancelled", "discarded", "dead"))
        clock = f"{self._act}  [dim]{self.elapsed:.0f} s[/]" if self._act else f"[dim]{self.elapsed:.0f} s[/]"
        return Group(
            Text(),
            Rule(clock, align="right", style="dim"),
            Padding(daemons, (0, 0, 0, 1)),
            Padding(counts, (0, 0, 0, 1)),
            Padding(_bar(ended, sum(scene.states.values()), self._console.width - 2), (0, 0, 0, 1)),
        )


def _replace_by_ascii(error: UnicodeError) -> tuple[str, int]:
    """Handle an encoding error: replace characters that the encoding lacks, for example ✓ by `ok`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _bar(done: int, total: int, width: int) -> Text:
    full = round(width * done / total) if total else 0
    return Text("━" * full, style="green") + Text("━" * (width - full), style="bright_black")


def _count_by_handler(handlers: Sequence[str]) -> str:
    counts = sorted(Counter(handlers).items())
    return ", ".join(f"{count} {handler}" if count > 1 else handler for handler, count in counts) or "-"


def plural(count: int, word: str) -> str:
    """Format a count with its noun, as in `1 job` or `2 jobs`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def short(fence_token: int) -> str:
    """Format the last four digits of a fence token, which are unique in the demo."""
    return f"…{fence_token % 10_000:04}"


def listed(items: Sequence[Any]) -> str:
    """Format a list as in `a, b and c`."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"
