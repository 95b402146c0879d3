"""Pure functions behind the commands: forecasts, findings and text output."""

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


def as_seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


@given(
    attempt=st.integers(1, 12),
    attempts_left=st.integers(0, 12),
    base=st.floats(0.5, 100),
    cap=st.floats(0.5, 5000),
    deadline=st.none() | st.floats(-10, 20_000),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=12, max_size=12),
)
def test_a_failing_job_is_buried_within_the_forecast_of_job_show(
    attempt: int, attempts_left: int, base: float, cap: float, deadline: float | None, draws: list[float]
) -> None:
    """The forecast must hold for every jitter that the retry planner draws."""
    until = None if deadline is None else NOW + as_seconds(deadline)
    terms = {"base": as_seconds(base), "cap": as_seconds(cap)}
    span = predict_dead_letter(attempt=attempt, at=NOW, max_attempts=attempt + attempts_left, deadline=until, **terms)

    at = NOW
    for failures, draw in zip(range(attempt, attempt + attempts_left), draws, strict=False):
        delay = backoff(failures, random=partial(float, draw), **terms)
        if until is not None and at + delay > until:
            break
        at += delay
    slack = timedelta(milliseconds=1)
    assert span.earliest - slack <= at <= span.latest + slack


def test_the_forecast_for_the_last_attempt_has_no_delay() -> None:
    assert predict_dead_letter(attempt=4, at=NOW, max_attempts=4, base=as_seconds(5), cap=as_seconds(60)) == (NOW, NOW)


def test_the_default_retry_policy_survives_an_outage_of_a_night() -> None:
    """The policy has twenty attempts, with delays from five seconds to an hour."""
    span = predict_dead_letter(attempt=1, at=NOW, max_attempts=20, base=as_seconds(5), cap=timedelta(hours=1))
    assert timedelta(hours=5) < span.earliest - NOW < span.latest - NOW < timedelta(hours=11)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0s"), (59.9, "59s"), (61, "1m 1s"), (3600, "1h"), (7265, "2h 1m"), (90061, "1d 1h"), (-5, "-5s")],
)
def test_durations_are_written_in_two_units_at_most(value: float, text: str) -> None:
    """Seconds are noise beside days."""
    assert printing.format_duration(as_seconds(value)) == text


def test_terminal_control_characters_are_printed_in_escaped_form() -> None:
    """A note in a row must not move the cursor or set the window title."""
    assert printing.printable("a\x1b]0;evil\x07\nb") == "a\\x1b]0;evil\\x07\nb"
    assert printing.printable(None) == ""
    assert printing.printable("Zürich …") == "Zürich …"


def test_a_narrow_table_wraps_names_and_does_not_cut_them() -> None:
    """Operators copy handler names and error kinds from the table."""
    from rich.console import Console

    laid = printing.table(None, "error~", "died", rows=[("InsufficientPrivilegeError", "2026-03-01 12:00:00Z")])
    screen = Console(width=35, record=True, file=io.StringIO())
    screen.print(laid)
    lines = screen.export_text().splitlines()[2:]
    assert "".join(line.split()[0] for line in lines if line.strip()) == "InsufficientPrivilegeError"
    assert "2026-03-01 12:00:00Z" in lines[0]


@pytest.mark.parametrize("width", [30, 50, 120])
def test_a_table_that_does_not_fit_is_printed_as_one_block_per_row(width: int) -> None:
    """At 50 columns no number or instant is cut, and the terminal wraps no line."""
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
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the terminal 80 columns wide."""
    monkeypatch.setattr(printing, "PIPE_WIDTH", 80)


@pytest.mark.usefixtures("narrow_terminal")
def test_notes_on_daylight_saving_do_not_cut_the_instant(capsys: pytest.CaptureFixture[str]) -> None:
    rule = Rule(cron="30 2 * * *", timezone="Europe/Vienna")
    print_instants(preview(rule, datetime(2027, 3, 27, 12, tzinfo=UTC), 1), None)
    line, *notes = (each.rstrip() for each in capsys.readouterr().out.splitlines()[2:])
    assert line.startswith("2027-03-28 01:00:00Z   2027-03-28 03:00:00 Sun CEST   gap: the clock jumps from")
    assert notes[-1].endswith("at the jump")


@pytest.mark.usefixtures("narrow_terminal")
def test_status_shows_the_slots_of_a_node_uncut(capsys: pytest.CaptureFixture[str]) -> None:
    """Operators look for the slots when a queue grows."""
    one = node(handlers=["a"], queues=["default"], slots={"nightly_reports": 100, "default": 50, "mail": 1})
    found = Status(queues=sum_by_queue([], [], [one]), nodes=[one], paused=[], counted_all=True)
    printing.console().print(render(found))
    assert {"nightly_reports:100", "default:50", "+1"} <= set(capsys.readouterr().out.split())


def test_the_error_for_an_invalid_instant_or_duration_names_the_option() -> None:
    """The error also shows the expected format."""
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
        up=as_seconds(1),
        silent=as_seconds(1),
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
def test_a_queue_with_zero_slots_counts_as_not_served(queues: list[str], slots: str, served: bool) -> None:
    """`mail:0,*:5` excludes the queue mail from `*`, so its jobs wait."""
    why = why_unclaimed("a", "mail", [node(handlers=["a"], queues=queues, slots=json.loads(slots))], [])
    assert (why is None) is served


def test_a_job_is_unclaimed_unless_one_daemon_has_both_its_handler_and_its_queue() -> None:
    """One daemon with the handler and another with the queue cannot run the job. A draining daemon claims nothing."""
    serves_both = node(handlers=["a"], queues=["mail"])
    assert why_unclaimed("a", "mail", [serves_both], []) is None
    assert why_unclaimed("a", "mail", [node(handlers=["a"], queues=["*"])], []) is None
    apart = [node(handlers=["a"], queues=["default"]), node(handlers=["b"], queues=["mail"])]
    assert "queue 'mail'" in str(why_unclaimed("a", "mail", apart, []))
    assert why_unclaimed("a", "mail", [node(handlers=["a"], queues=["mail"], state="draining")], [])
    assert "did you mean 'send_receipt'" in str(why_unclaimed("send_reciept", "q", apart, ["send_receipt"]))
    assert "rota run" in str(why_unclaimed("a", "mail", [], []))


def server_facts(**changed: Any) -> ServerFacts:
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
        (server_facts(), []),
        (server_facts(read_only=True), ["read-only"]),
        (server_facts(clock=NOW + as_seconds(60)), ["clock"]),
        (server_facts(clock=NOW - as_seconds(60)), ["clock"]),
        (server_facts(autovacuum=False), ["autovacuum"]),
        (server_facts(snapshot_age=timedelta(minutes=11), snapshot_owner="pid 7"), ["snapshot"]),
        (server_facts(snapshot_age=timedelta(minutes=9)), []),
        (server_facts(prepared_age=timedelta(days=2)), ["snapshot"]),
        (server_facts(notifications=0.4), []),
        (server_facts(notifications=0.6), ["notifications"]),
    ],
)
def test_each_unsafe_or_slow_server_setting_is_one_finding_with_a_remedy(server: ServerFacts, found: list[str]) -> None:
    findings = list(server_findings(server, query_sent_at=NOW, query_answered_at=NOW + as_seconds(0.1)))
    assert [each.check for each in findings] == found
    assert all(each.do for each in findings)


def test_a_queue_that_is_served_is_shown_even_if_it_is_empty() -> None:
    """An empty queue with daemons differs from no queue at all."""
    lane = LaneCounts(
        queue="mail", handler="a", due=2, running=0, retrying=0, future=0, expired=0, oldest_due=as_seconds(3)
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
def test_database_errors_map_to_exit_codes_and_show_no_secrets(
    error: Exception, kind: type[RotaError], code: int
) -> None:
    """The DETAIL of a server error may hold a row, so it is left out."""
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
        (asyncpg.QueryCanceledError("canceling statement due to statement timeout"), "set statement_timeout = 0"),
        (asyncpg.QueryCanceledError("canceling statement due to user request"), "can't do that now: canceling"),
        (asyncpg.LockNotAvailableError("canceling statement due to lock timeout"), "can't do that now: canceling"),
        (asyncpg.CannotConnectNowError("the database system is starting up"), "no database answers"),
        (TimeoutError(), "another session holds a lock"),
    ],
)
def test_an_error_that_the_server_sent_is_not_reported_as_unreachable(error: Exception, says: str) -> None:
    """Examples are a wrong option in the URL, a statement timeout and a lock."""
    assert says in str(explain_error(error, DSN))


def test_an_internal_error_is_not_reported_as_a_database_error() -> None:
    assert explain_error(ValueError("a bug"), DSN) is None


def test_rota_dev_does_not_watch_environments_and_hidden_folders(tmp_path: Path) -> None:
    """Each installed package would restart the app, and scanning these folders is slow."""
    for name in ("app.py", "pkg/jobs.py", ".venv/lib/x.py", "env/lib/y.py", "pkg/__pycache__/z.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert {str(path.relative_to(tmp_path)) for path in modification_times(tmp_path)} == {"app.py", "pkg/jobs.py"}
