"""The retry planner as a pure function: each outcome under each condition."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.domain.job import FenceToken, NodeId, Terms
from rota.domain.outcome import (
    Cancelled,
    Committed,
    Failed,
    HolderLost,
    Interrupted,
    LeaseLost,
    Outcome,
    Snoozed,
    Succeeded,
    TimedOut,
    Undecodable,
)
from rota.domain.settlement import Abandon, Bury, Cancel, Release, Retry, Settlement, Succeed
from rota.lifecycle.retry_planner import MAX_LOSSES, decide
from rota.lifecycle.settlement_rows import outcome_columns, settlement_row

NODE = NodeId(UUID(int=1))
AT = datetime(2030, 1, 1, tzinfo=UTC)
NOW = timedelta(0)
NEXT = timedelta(microseconds=1)

TERMS = Terms(
    job_id=7,
    fence_token=FenceToken(70),
    leased_by=NODE,
    handler="h",
    queue="default",
    attempt=3,
    max_attempts=20,
    losses=0,
    releases=0,
    delivery="at_least_once",
    backoff_base=timedelta(seconds=5),
    backoff_cap=timedelta(hours=1),
)
ONCE = replace(TERMS, delivery="at_most_once", attempt=1, max_attempts=1)
LAST = replace(TERMS, attempt=20)
BOOM = Failed(kind="ValueError", text="boom")

TABLE: list[tuple[str, Terms, Outcome, Settlement]] = [
    ("success", TERMS, Succeeded("1"), Succeed("1")),
    ("success, once", ONCE, Succeeded(None), Succeed(None)),
    ("committed", TERMS, Committed(), Abandon()),
    ("committed, once", ONCE, Committed(), Abandon()),
    ("lease lost", TERMS, LeaseLost(), Abandon()),
    ("lease lost, once", ONCE, LeaseLost(), Abandon()),
    ("failure", TERMS, BOOM, Retry(timedelta(seconds=20))),
    ("failure, the last", LAST, BOOM, Bury("exhausted")),
    ("failure, once", ONCE, BOOM, Bury("exhausted")),
    ("permanent", TERMS, replace(BOOM, permanent=True), Bury("permanent")),
    ("permanent, once", ONCE, replace(BOOM, permanent=True), Bury("permanent")),
    ("retry after", TERMS, replace(BOOM, after=timedelta(days=2)), Retry(timedelta(days=2))),
    ("retry after nothing", TERMS, replace(BOOM, after=NOW), Retry(NOW)),
    ("retry at", TERMS, replace(BOOM, at=AT), Retry(NOW, AT)),
    ("retry, the last", LAST, replace(BOOM, after=NOW), Bury("exhausted")),
    ("retry, once", ONCE, replace(BOOM, after=NOW), Bury("exhausted")),
    ("timeout", TERMS, TimedOut(timedelta(seconds=1)), Retry(timedelta(seconds=20))),
    ("timeout, once", ONCE, TimedOut(timedelta(seconds=1)), Bury("exhausted")),
    ("undecodable", TERMS, Undecodable("ValueError", "no"), Bury("bad_payload")),
    ("undecodable, once", ONCE, Undecodable("ValueError", "no"), Bury("bad_payload")),
    ("snooze after", TERMS, Snoozed(after=timedelta(hours=1)), Release(timedelta(hours=1))),
    ("snooze at", TERMS, Snoozed(at=AT), Release(None, AT)),
    ("snooze, the last", LAST, Snoozed(after=NOW), Release(NOW)),
    ("snooze, once", ONCE, Snoozed(after=NOW), Bury("exhausted")),
    ("cancel", TERMS, Cancelled("moot"), Cancel("moot")),
    ("cancel, once", ONCE, Cancelled("moot"), Cancel("moot")),
    ("interrupted", TERMS, Interrupted(began=True), Release(NOW)),
    ("interrupted, the last", LAST, Interrupted(began=True), Release(NOW)),
    ("interrupted, still running", TERMS, Interrupted(began=True, still_running=True), Release(None)),
    ("interrupted, once", ONCE, Interrupted(began=True), Bury("lost")),
    ("interrupted, once, still running", ONCE, Interrupted(began=True, still_running=True), Bury("lost")),
    ("interrupted before it began", TERMS, Interrupted(began=False), Release(NOW)),
    ("interrupted before it began, once", ONCE, Interrupted(began=False), Release(NOW)),
    ("first loss", TERMS, HolderLost(), Retry(NOW)),
    ("second loss", replace(TERMS, losses=1), HolderLost(), Retry(timedelta(seconds=5))),
    ("third loss", replace(TERMS, losses=2), HolderLost(), Bury("poison")),
    ("loss of the last attempt", LAST, HolderLost(), Bury("exhausted")),
    ("loss, once", ONCE, HolderLost(), Bury("lost")),
    ("failure, out of time", replace(TERMS, retry_left=timedelta(seconds=19)), BOOM, Bury("expired")),
    ("failure, just in time", replace(TERMS, retry_left=timedelta(seconds=20)), BOOM, Retry(timedelta(seconds=20))),
    ("failure, long out of time", replace(TERMS, retry_left=timedelta(days=-1)), BOOM, Bury("expired")),
    ("failure, wishes for too late", replace(TERMS, retry_until=AT - NEXT), replace(BOOM, at=AT), Bury("expired")),
    ("failure, wishes for just in time", replace(TERMS, retry_until=AT), replace(BOOM, at=AT), Retry(NOW, AT)),
    ("loss, out of time", replace(TERMS, retry_left=timedelta(seconds=-1)), HolderLost(), Bury("expired")),
    ("snooze, out of time", replace(TERMS, retry_left=timedelta(seconds=-1)), Snoozed(after=NOW), Release(NOW)),
    ("no terms written", replace(TERMS, max_attempts=None, delivery=None), BOOM, Bury("exhausted")),
]


@pytest.mark.parametrize(("terms", "outcome", "settlement"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_each_outcome_leads_to_the_settlement_of_the_table(
    terms: Terms, outcome: Outcome, settlement: Settlement
) -> None:
    assert decide(terms, outcome, lambda: 1.0) == settlement


outcomes = st.sampled_from([row[2] for row in TABLE])
terms = st.builds(
    replace,
    st.just(TERMS),
    attempt=st.integers(1, 1000),
    max_attempts=st.integers(1, 1000),
    losses=st.integers(0, 5),
    releases=st.integers(0, 10**6),
    delivery=st.sampled_from(["at_least_once", "at_most_once", None]),
    backoff_base=st.timedeltas(timedelta(microseconds=1), timedelta(days=366)),
    backoff_cap=st.timedeltas(timedelta(microseconds=1), timedelta(days=366)),
    retry_left=st.none() | st.timedeltas(timedelta(days=-(10**5)), timedelta(days=10**5)),
    retry_until=st.none() | st.datetimes(timezones=st.just(UTC)),
)
randoms = st.floats(0, 1, exclude_max=True)


@given(terms, outcomes, randoms)
def test_at_most_once_never_leads_to_a_second_handler_call(terms: Terms, outcome: Outcome, random: float) -> None:
    """The only exception is an interruption before the first call."""
    settlement = decide(replace(terms, delivery="at_most_once"), outcome, lambda: random)
    if isinstance(settlement, Retry | Release):
        assert outcome == Interrupted(began=False)


@given(terms, outcomes, randoms)
def test_no_retry_exceeds_the_limits_of_attempts_losses_and_time(terms: Terms, outcome: Outcome, random: float) -> None:
    """No delay exceeds the cap or the delay that the handler requested."""
    settlement = decide(terms, outcome, lambda: random)
    if not isinstance(settlement, Retry):
        return
    assert terms.attempt < (terms.max_attempts or 1)
    assert settlement.delay >= NOW
    assert terms.retry_left is None or settlement.delay <= terms.retry_left
    assert terms.retry_until is None or settlement.at is None or settlement.at <= terms.retry_until
    if isinstance(outcome, HolderLost):
        assert terms.losses + 1 < MAX_LOSSES
    if not (isinstance(outcome, Failed) and outcome.after is not None):
        assert terms.backoff_cap is not None
        assert settlement.delay <= terms.backoff_cap


@given(terms, outcomes, randoms)
def test_every_settlement_has_valid_column_values_for_its_statement(
    terms: Terms, outcome: Outcome, random: float
) -> None:
    """The words are those of the schema."""
    settlement = decide(terms, outcome, lambda: random)
    row = settlement_row(terms, outcome, settlement)
    if isinstance(settlement, Succeed | Abandon):
        assert row is None
        return
    assert row is not None
    assert row[:3] == (7, 70, NODE)
    assert row[3] in {"retry", "release", "bury", "cancel"}
    assert row[6] == outcome_columns(outcome)[0]
    assert row[4] is None or row[5] is None or isinstance(outcome, Failed)
    if row[3] == "bury":
        assert row[7] in {"permanent", "exhausted", "poison", "lost", "bad_payload", "expired"}


def test_the_outcome_names_in_the_history_are_fixed() -> None:
    """Dashboards and users filter by them."""
    outcome_names = {row[0]: outcome_columns(row[2])[0] for row in TABLE}
    assert set(outcome_names.values()) == {
        "succeeded",
        "lost",
        "failed",
        "timed_out",
        "undecodable",
        "snoozed",
        "cancelled",
        "interrupted",
    }
