"""The pure parts of the commands: forecasts, findings, words."""

from __future__ import annotations

import io
import json
import uuid
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from rota.commands import printing
from rota.commands.check import server_findings
from rota.commands.cron import print_instants
from rota.commands.database_errors import explain_error
from rota.commands.options import parse_duration_option, parse_instant
from rota.commands.queue_lines import sum_by_queue
from rota.commands.restart_on_change import modification_times
from rota.commands.status import Status, render
from rota.db.node_reports import LivingNode, why_unclaimed
from rota.db.reports import LaneCounts
from rota.db.server_reports import ServerFacts
from rota.domain.backoff import backoff
from rota.domain.forecast import predict_dead_letter
from rota.domain.preview import preview
from rota.domain.schedule import Rule
from rota.errors import DatabaseUnusable, RotaError, SchemaMismatch

if TYPE_CHECKING:
    from pathlib import Path

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
DSN = "postgresql://me:S3CRET-canary@h/db"


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


@given(
    attempt=st.integers(1, 12),
    more=st.integers(0, 12),
    base=st.floats(0.5, 100),
    cap=st.floats(0.5, 5000),
    deadline=st.none() | st.floats(-10, 20_000),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=12, max_size=12),
)
def test_no_job_that_goes_on_failing_is_given_up_outside_of_the_span(
    attempt: int, more: int, base: float, cap: float, deadline: float | None, draws: list[float]
) -> None:
    """What `job show` promises is what the retry planner does, whatever it draws."""
    until = None if deadline is None else NOW + seconds(deadline)
    terms = {"base": seconds(base), "cap": seconds(cap)}
    span = predict_dead_letter(attempt=attempt, at=NOW, max_attempts=attempt + more, deadline=until, **terms)

    at = NOW
    for failures, draw in zip(range(attempt, attempt + more), draws, strict=False):
        delay = backoff(failures, random=partial(float, draw), **terms)
        if until is not None and at + delay > until:
            break
        at += delay
    slack = timedelta(milliseconds=1)
    assert span.earliest - slack <= at <= span.latest + slack


def test_a_last_attempt_is_given_up_when_it_fails() -> None:
    """No delay follows it."""
    assert predict_dead_letter(attempt=4, at=NOW, max_attempts=4, base=seconds(5), cap=seconds(60)) == (NOW, NOW)


def test_delays_of_the_default_policy_last_a_night() -> None:
    """Twenty attempts from five seconds up to an hour: an outage of a night is survived."""
    span = predict_dead_letter(attempt=1, at=NOW, max_attempts=20, base=seconds(5), cap=timedelta(hours=1))
    assert timedelta(hours=5) < span.earliest - NOW < span.latest - NOW < timedelta(hours=11)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (59.9, "59s"), (61, "1m 1s"), (3600, "1h"), (7265, "2h 1m"), (90061, "1d 1h"), (-5, "-5s")],
)
def test_durations_are_written_in_two_units_at_most(value: float, text: str) -> None:
    """Nobody reads seconds beside days."""
    assert printing.format_duration(seconds(value)) == text


def test_what_a_terminal_would_obey_is_shown_and_not_sent() -> None:
    """A note from somebody else must not move the cursor or set the title of an operator's window."""
    assert printing.printable("a\x1b]0;evil\x07\nb") == "a\\x1b]0;evil\\x07\nb"
    assert printing.printable(None) == ""
    assert printing.printable("Zürich …") == "Zürich …"


def test_a_narrow_table_breaks_the_names_that_one_has_to_type() -> None:
    """At 80 columns an operator copies a handler or a kind of error from it: half a name is none."""
    from rich.console import Console

    laid = printing.table(None, "error~", "died", rows=[("InsufficientPrivilegeError", "2026-03-01 12:00:00Z")])
    screen = Console(width=35, record=True, file=io.StringIO())
    screen.print(laid)
    lines = screen.export_text().splitlines()[2:]
    assert "".join(line.split()[0] for line in lines if line.strip()) == "InsufficientPrivilegeError"
    assert "2026-03-01 12:00:00Z" in lines[0]


@pytest.mark.parametrize("width", [30, 50, 120])
def test_f11_a_table_that_does_not_fit_becomes_one_block_for_each_row(width: int) -> None:
    """F11: at 50 columns nothing is cut in the middle of a number or an instant, and no line is broken by the terminal."""
    from rich.console import Console

    columns = ("job#", "state", "attempt#", "handler…", "queue…", "when", "last error…", "")
    rows = [(10_001, "succeeded", "20/20", "send_receipt", "default", "2026-03-01 12:00:00Z", "", "paused")]
    screen = Console(width=width, record=True, file=io.StringIO())
    screen.print(printing.table("jobs", *columns, rows=rows))
    lines = [line.rstrip() for line in screen.export_text().splitlines()]
    assert max(map(len, lines)) <= width
    assert "2026-03-01 12:00:00Z" in "\n".join(lines).replace("\n            ", " ")
    if width == 120:
        assert sum("10001" in line and "send_receipt" in line for line in lines) == 1
    else:
        assert "job         10001" in lines
        assert "attempt     20/20" in lines
        assert not [line for line in lines if line.startswith("last error")]  # it is empty


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setattr(printing, "PIPE_WIDTH", 80)


@pytest.mark.usefixtures("narrow")
def test_what_daylight_saving_does_is_told_without_cutting_an_instant(capsys: pytest.CaptureFixture[str]) -> None:
    """An instant without its hour is what nobody asked for."""
    rule = Rule(cron="30 2 * * *", timezone="Europe/Vienna")
    print_instants(preview(rule, datetime(2027, 3, 27, 12, tzinfo=UTC), 1), None)
    line, *more = (each.rstrip() for each in capsys.readouterr().out.splitlines()[2:])
    assert line.startswith("2027-03-28 01:00:00Z   2027-03-28 03:00:00 Sun CEST   gap: the clock jumps from")
    assert more[-1].endswith("at the jump")


@pytest.mark.usefixtures("narrow")
def test_status_cuts_no_slots(capsys: pytest.CaptureFixture[str]) -> None:
    """How many jobs a daemon takes is what one looks for where a queue grows."""
    one = node(handlers=["a"], queues=["default"], slots={"nightly_reports": 100, "default": 50, "mail": 1})
    found = Status(queues=sum_by_queue([], [], [one]), nodes=[one], paused=[], counted_all=True)
    printing.console().print(render(found))
    assert {"nightly_reports:100", "default:50", "+1"} <= set(capsys.readouterr().out.split())


def test_instants_and_durations_say_what_is_wrong_with_them() -> None:
    """A usage error names the option and how it is written."""
    assert parse_instant("2026-03-01T13:00+01:00", "--at") == NOW
    assert parse_duration_option("1h30m", "--in") == timedelta(minutes=90)
    with pytest.raises(typer.BadParameter, match="has no time zone"):
        parse_instant("2026-03-01T12:00", "--at")
    with pytest.raises(typer.BadParameter, match="is not an instant"):
        parse_instant("soon", "--at")
    with pytest.raises(typer.BadParameter, match="write a duration"):
        parse_duration_option("soon", "--in")
    with pytest.raises(typer.BadParameter, match="at most 60000d"):
        parse_duration_option("999999999d", "--in")


def node(
    *, handlers: list[str], queues: list[str], state: str = "running", slots: dict[str, int] | None = None
) -> LivingNode:
    return LivingNode(
        node_id=uuid.uuid4(),
        host="here",
        pid=1,
        rota_version="0",
        release=None,
        app="shop",
        handlers=handlers,
        queues=queues,
        slots=slots or {},
        state=state,
        tzdata=None,
        started_at=NOW,
        up=seconds(1),
        silent=seconds(1),
    )


@pytest.mark.parametrize(
    ("queues", "slots", "served"),
    [
        (["mail", "*"], '{"mail": 0, "*": 5}', False),
        (["default", "*"], '{"default": 5, "*": 0}', False),
        (["mail", "*"], '{"mail": 1, "*": 0}', True),
        (["default", "*"], '{"default": 0, "*": 1}', True),
    ],
)
def test_a_queue_without_a_slot_is_served_by_nobody(queues: list[str], slots: str, served: bool) -> None:
    """`mail:0,*:5` takes a queue out of those that `*` stands for: its jobs wait, and whoever wonders must be told."""
    why = why_unclaimed("a", "mail", [node(handlers=["a"], queues=queues, slots=json.loads(slots))], [])
    assert (why is None) is served


def test_a_job_is_unclaimed_unless_one_daemon_has_both_its_handler_and_its_queue() -> None:
    """One daemon with the handler and another with the queue run nothing together; one that drains claims nothing."""
    both = node(handlers=["a"], queues=["mail"])
    assert why_unclaimed("a", "mail", [both], []) is None
    assert why_unclaimed("a", "mail", [node(handlers=["a"], queues=["*"])], []) is None
    apart = [node(handlers=["a"], queues=["default"]), node(handlers=["b"], queues=["mail"])]
    assert "queue 'mail'" in str(why_unclaimed("a", "mail", apart, []))
    assert why_unclaimed("a", "mail", [node(handlers=["a"], queues=["mail"], state="draining")], [])
    assert "did you mean 'send_receipt'" in str(why_unclaimed("send_reciept", "q", apart, ["send_receipt"]))
    assert "rota run" in str(why_unclaimed("a", "mail", [], []))


def look(**changed: Any) -> ServerFacts:
    values: dict[str, Any] = {
        "version": "18",
        "read_only": False,
        "pid": 1,
        "clock": NOW,
        "autovacuum": True,
        "snapshot_age": None,
        "snapshot_owner": None,
        "prepared_age": None,
        "notifications": 0.0,
        "user_name": "me",
        "may_run": True,
        "daemon_role": "rota_daemon",
    }
    return ServerFacts(**(values | changed))


@pytest.mark.parametrize(
    ("server", "found"),
    [
        (look(), []),
        (look(read_only=True), ["read-only"]),
        (look(clock=NOW + seconds(60)), ["clock"]),
        (look(clock=NOW - seconds(60)), ["clock"]),
        (look(autovacuum=False), ["autovacuum"]),
        (look(snapshot_age=timedelta(minutes=11), snapshot_owner="pid 7"), ["snapshot"]),
        (look(snapshot_age=timedelta(minutes=9)), []),
        (look(prepared_age=timedelta(days=2)), ["snapshot"]),
        (look(notifications=0.4), []),
        (look(notifications=0.6), ["notifications"]),
    ],
)
def test_a_server_is_judged_by_what_it_says(server: ServerFacts, found: list[str]) -> None:
    """Each thing that makes a queue slow or unsafe is a finding with a cure, and nothing else is."""
    findings = list(server_findings(server, query_sent_at=NOW, query_answered_at=NOW + seconds(0.1)))
    assert [each.check for each in findings] == found
    assert all(each.do for each in findings)


def test_a_queue_that_is_served_is_shown_even_if_it_is_empty() -> None:
    """An empty queue with daemons and no queue at all are different news."""
    lane = LaneCounts(
        queue="mail", handler="a", due=2, running=0, retrying=0, future=0, expired=0, oldest_due=seconds(3)
    )
    lines = sum_by_queue([lane], [], [node(handlers=["a"], queues=["default", "*"])])
    assert [(line.queue, line.due, line.nodes) for line in lines] == [("default", 0, 1), ("mail", 2, 1)]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (asyncpg.InvalidPasswordError("password authentication failed"), DatabaseUnusable, 3),
        (asyncpg.InvalidCatalogNameError("no such database"), DatabaseUnusable, 3),
        (
            asyncpg.InsufficientPrivilegeError("permission denied for column state of relation jobs"),
            DatabaseUnusable,
            3,
        ),
        (asyncpg.ReadOnlySQLTransactionError("read-only"), DatabaseUnusable, 3),
        (asyncpg.UndefinedTableError("no rota.jobs"), SchemaMismatch, 3),
        (asyncpg.CannotConnectNowError("starting up"), DatabaseUnusable, 3),
        (ConnectionRefusedError(111, "refused"), DatabaseUnusable, 3),
        (asyncpg.CheckViolationError("violates"), RotaError, 1),
    ],
)
def test_what_a_server_refuses_becomes_an_exit_code_and_no_secret(
    error: Exception, kind: type[RotaError], code: int
) -> None:
    """The first failures of everybody, each told from the other; the server's detail, which may hold a row, is left out."""
    if isinstance(error, asyncpg.PostgresError):
        error.detail = "Failing row contains (S3CRET-canary)"
    refusal = explain_error(error, DSN)
    assert isinstance(refusal, kind)
    assert refusal.exit_code == code
    assert "S3CRET-canary" not in str(refusal)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (asyncpg.ClientConfigurationError("`sslmode` must be one of …"), "the database URL can't be used: `sslmode`"),
        (asyncpg.QueryCanceledError("canceling statement due to statement timeout"), "can't do that now: canceling"),
        (asyncpg.LockNotAvailableError("canceling statement due to lock timeout"), "can't do that now: canceling"),
        (asyncpg.CannotConnectNowError("the database system is starting up"), "no database answers"),
        (TimeoutError(), "another session holds a lock"),
    ],
)
def test_nobody_is_sent_to_look_for_a_server_that_has_answered(error: Exception, says: str) -> None:
    """A wrong option in the URL, a statement that took too long, a lock: each by its name."""
    assert says in str(explain_error(error, DSN))


def test_a_fault_of_ours_is_not_explained_away() -> None:
    """An error that the database has no part in must reach the person who can mend it."""
    assert explain_error(ValueError("a bug"), DSN) is None


def test_environments_and_hidden_folders_are_not_watched(tmp_path: Path) -> None:
    """A restart at every installed package would be a loop, and looking through them all a load."""
    for name in ("app.py", "pkg/jobs.py", ".venv/lib/x.py", "env/lib/y.py", "pkg/__pycache__/z.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert {str(path.relative_to(tmp_path)) for path in modification_times(tmp_path)} == {"app.py", "pkg/jobs.py"}
