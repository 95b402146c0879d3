"""`rota check`: what is wrong, or about to be, each with what to do."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from shlex import quote
from typing import TYPE_CHECKING

import typer

from rota.commands.options import AsJson, ConfigFile, Dsn, Embedded
from rota.commands.session import ask, explaining, using
from rota.commands.show import age, moment, plural, print_json, printable

if TYPE_CHECKING:
    from rota.config import Config
    from rota.db.migrate import Installation
    from rota.db.pool import Connection
    from rota.db.reports import Lane, LetterGroup, LivingNode, Paused, ServerLook
    from rota.db.schedule_reports import ScheduleLine

CLOCKS_APART = timedelta(seconds=2)
OLD_SNAPSHOT = timedelta(minutes=10)

FULL = 0.5
"""From which part on the queue of notifications is told of: at 0.9 we leave them out."""

NAMED = 20
"""How many schedules of a kind are named."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a person should look at."""

    check: str
    finding: str
    do: str


def check(
    config_file: ConfigFile = None,
    dsn: Dsn = None,
    embedded: Embedded = False,
    as_json: AsJson = False,
) -> None:
    """Look for what is wrong, or about to be. Exit code 1 if there is something, 3 if the database can't be used."""
    with using(config_file, dsn, embedded=embedded) as config:
        server, found = ask(config, partial(examine, config), name="check")
    findings = [*(Finding(check="configuration", finding=each.finding, do=each.do) for each in config.warnings), *found]
    if as_json:
        print_json({"server_version": server.version, "findings": findings})
    else:
        for each in findings:
            typer.echo(printable(f"{each.check}: {each.finding}\n    {each.do}"))
        typer.echo(f"PostgreSQL {server.version}, schema in order, {plural(len(findings), 'finding')}", err=True)
    raise typer.Exit(1 if findings else 0)


async def examine(config: "Config", db: "Connection") -> "tuple[ServerLook, list[Finding]]":
    """Ask the server what there is to ask, and judge it."""
    from rota.db import reports, schedule_reports
    from rota.db.migrate import installation
    from rota.db.pool import is_pooled

    asked = datetime.now(UTC)
    server = await reports.examine_server(db)
    answered = datetime.now(UTC)
    lanes = await reports.summarise_live_jobs(db)
    letters = await reports.summarise_dead_letters(db, which=reports.LetterFilter())
    nodes = await reports.list_nodes(db)
    known = await reports.list_handler_names(db)
    schedules = await schedule_reports.summarise_schedules(db)
    return server, [
        *login_findings(server, config),
        *server_findings(server, asked=asked, answered=answered),
        *(await listen_findings(config, await installation(db), pooled=is_pooled(db, pid=server.pid))),
        *pause_findings(await reports.list_paused(db)),
        *lane_findings(lanes, nodes, known),
        *letter_findings(letters),
        *node_findings(nodes),
        *([] if nodes else absence_findings(lanes, schedules)),
        *(await schedule_findings(db, schedules)),
    ]


def login_findings(server: "ServerLook", config: "Config") -> Iterator[Finding]:
    """Judge the login, where it is a daemon's: where no app is named, this is a person's shell."""
    if config.app is not None and not server.may_run:
        yield Finding(
            check="role",
            finding=f"the login {server.user_name} may not run a daemon, which ROTA_APP says that this is for",
            do=f"grant {server.daemon_role or 'rota_daemon'} to {server.user_name}, or give the URL of a login that has it",
        )


async def listen_findings(config: "Config", here: "Installation", *, pooled: bool) -> list[Finding]:
    """Judge the way on which notifications come: one on which none can come fails in silence."""
    from rota.db.migrate import installation
    from rota.db.pool import Route, connect, probe
    from rota.errors import RotaError

    if config.database.direct_url is None:
        if not pooled:
            return []
        return [
            Finding(
                check="pooler",
                finding="the URL leads through a connection pooler, which notifications can't pass",
                do="set ROTA_DIRECT_URL to a URL straight to the server; without it, jobs are found by polling",
            )
        ]
    dsn = config.require_direct_database()
    try:
        with explaining(dsn):
            if (await probe(dsn)).pooled:
                return [
                    Finding(
                        check="pooler",
                        finding="ROTA_DIRECT_URL leads through a connection pooler, which notifications can't pass",
                        do="let it lead straight to the server, to its own host and port; until then, jobs are found by polling",
                    )
                ]
            direct = await connect(
                dsn, route=Route(pooled=True, version=0, synchronous_commit="on"), name="rota check direct"
            )
            try:
                there = await installation(direct)
            finally:
                await direct.close()
    except RotaError as error:
        return [
            Finding(
                check="direct URL",
                finding=f"ROTA_DIRECT_URL can't be used: {error}",
                do="correct it, or unset it where the other URL leads straight to the server; until then, polling finds the jobs",
            )
        ]
    if there.installation_id == here.installation_id:
        return []
    return [
        Finding(
            check="direct URL",
            finding="ROTA_DIRECT_URL leads to another database than the URL: what is inserted there notifies nobody here",
            do="let both lead to the same database; until then, jobs are found by polling",
        )
    ]


def pause_findings(paused: "Sequence[Paused]") -> Iterator[Finding]:
    """Tell what was told to wait: not wrong, and yet what one forgets."""
    for each in paused:
        everything = each.kind == "queue" and each.name == "*"
        since = f" since {moment(each.paused_at)}" if each.paused_at else ""
        by = f" by {each.paused_by}" if each.paused_by else ""
        yield Finding(
            check="paused",
            finding=f"{'every queue' if everything else f'the {each.kind} {each.name}'} is paused{since}{by}"
            f": {each.reason or 'no reason given'}",
            do=f"rota {each.kind} resume {'--all' if everything else quote(each.name)}, once the reason is gone",
        )


def server_findings(server: "ServerLook", *, asked: datetime, answered: datetime) -> Iterator[Finding]:
    """Judge the server."""
    from rota.db.pool import TO_THE_PRIMARY, WHY_READ_ONLY

    if server.read_only:
        yield Finding(
            check="read-only",
            finding=f"this server takes no writes {WHY_READ_ONLY}",
            do=TO_THE_PRIMARY,
        )
    apart = max(server.clock - answered, asked - server.clock)
    if apart > CLOCKS_APART:
        yield Finding(
            check="clock",
            finding=f"the server's clock and this machine's are {age(apart)} apart",
            do="leases don't mind, they use the server's clock; but run NTP on both, or logs and --at will mislead you",
        )
    if not server.autovacuum:
        yield Finding(
            check="autovacuum",
            finding="autovacuum is off for rota.jobs",
            do="alter table rota.jobs reset (autovacuum_enabled), and autovacuum = on: without it, claims become slow",
        )
    if server.snapshot_age is not None and server.snapshot_age > OLD_SNAPSHOT:
        yield Finding(
            check="snapshot",
            finding=f"a transaction has held its snapshot for {age(server.snapshot_age)} ({server.snapshot_owner})",
            do="end it, or select pg_terminate_backend(pid): dead rows can't be removed while it lasts",
        )
    if server.prepared_age is not None and server.prepared_age > OLD_SNAPSHOT:
        yield Finding(
            check="snapshot",
            finding=f"a prepared transaction is {age(server.prepared_age)} old",
            do="commit or roll back what pg_prepared_xacts lists: dead rows can't be removed while it lasts",
        )
    if server.notifications > FULL:
        yield Finding(
            check="notifications",
            finding=f"the server's queue of notifications is {server.notifications:.0%} full",
            do="a session that listens has left a transaction open: end it; once it is full, we poll, and others' NOTIFY fails",
        )


def lane_findings(lanes: "Sequence[Lane]", nodes: "Sequence[LivingNode]", known: Sequence[str]) -> Iterator[Finding]:
    """Judge whether somebody runs what is due, and takes back what was left."""
    from rota.db.reports import why_unclaimed

    for lane in lanes:
        if lane.due and (why := why_unclaimed(lane.handler, lane.queue, nodes, known)):
            due = f"{plural(lane.due, 'due job')} of {lane.handler} in queue {lane.queue}, the oldest for {age(lane.oldest_due)}"
            yield Finding(check="unclaimed", finding=due, do=why)
    expired = sum(lane.expired for lane in lanes)
    if expired:
        yield Finding(
            check="leases",
            finding=f"{plural(expired, 'lease')} expired and not yet reaped",
            do="look again in some seconds; if it stays, no daemon is alive that reaps: start one, or see its log"
            if nodes
            else "no daemon is alive to take them back: start one with rota run --app module:app",
        )


def letter_findings(letters: "Sequence[LetterGroup]") -> Iterator[Finding]:
    """Judge what waits for a person."""
    for group in letters:
        what = f"{plural(group.letters, 'dead letter')} of {group.handler} in queue {group.queue}: {group.reason}"
        chosen = f"--handler {quote(group.handler)} --queue {quote(group.queue)} --reason {group.reason}"
        if group.error_kind:
            chosen += f" --error-kind {quote(group.error_kind)}"
        yield Finding(
            check="dead letters",
            finding=f"{what}, {group.error_kind}" if group.error_kind else what,
            do=f"rota dead list {chosen}, then rota dead redrive or discard with the same filters",
        )


def node_findings(nodes: "Sequence[LivingNode]") -> Iterator[Finding]:
    """Judge whether the daemons agree about the time."""
    releases: dict[str, list[str]] = {}
    for node in nodes:
        releases.setdefault(node.tzdata or "unknown", []).append(f"{node.host}:{node.pid}")
    if len(releases) > 1:
        shown = "; ".join(f"{release} on {', '.join(where[:3])}" for release, where in sorted(releases.items()))
        yield Finding(
            check="tzdata",
            finding=f"daemons have different time zone data: {shown}",
            do="install the same tzdata everywhere: where zones have changed, they compute different fires",
        )


def absence_findings(lanes: "Sequence[Lane]", schedules: Mapping[str, int]) -> Iterator[Finding]:
    """Tell that no daemon is alive before anything is late; what is due, expired or overdue has findings that say so."""
    if any(lane.due or lane.expired for lane in lanes) or schedules.get("overdue"):
        return
    jobs, fires = sum(lane.future + lane.retrying for lane in lanes), schedules.get("ok", 0)
    if jobs or fires:
        yield Finding(
            check="daemons",
            finding=f"none is alive, and {plural(jobs, 'job')} and {plural(fires, 'schedule')} wait for their time",
            do="start one before they are due: rota run --app module:app",
        )


async def schedule_findings(db: "Connection", counts: Mapping[str, int]) -> list[Finding]:
    """Look for schedules that stand still, or do not succeed, or all fire together."""
    from rota.commands.schedule_sheet import SPREAD
    from rota.db import schedule_reports

    found = []
    for state, judge in (("invalid", _invalid), ("overdue", _overdue), ("silent", _silent)):
        if not (count := counts.get(state)):
            continue
        named = await schedule_reports.list_schedules(db, handler=None, state=state, limit=NAMED)
        found += [judge(each) for each in named]
        if count > len(named):
            found.append(
                Finding(
                    check=f"{state} schedules",
                    finding=f"{count - len(named):,} more of them",
                    do=f"rota schedule list --state {state}",
                )
            )
    found += [
        Finding(
            check="schedules ahead",
            finding=f"{name} has decided about all instants up to {moment(upto)}: the server's clock was ahead",
            do="it fires none of them again: if that can't be waited for, rota schedule remove, and add it anew",
        )
        for name, upto in await schedule_reports.find_schedules_ahead(db, limit=NAMED)
    ]
    found += [
        Finding(
            check="crowd",
            finding=f"{plural(crowd.schedules, 'schedule')} without jitter, {crowd.sample} among them, fire together"
            + (f" at {moment(crowd.next_fire_at)}" if crowd.next_fire_at else f" ({crowd.cron})"),
            do=SPREAD,
        )
        for crowd in await schedule_reports.find_crowds(db)
    ]
    return found


def _invalid(each: "ScheduleLine") -> Finding:
    return Finding(
        check="invalid schedules",
        finding=f"{each.name} stands still: {each.invalid_reason}",
        do=f"rota schedule set {quote(each.name)} --cron … or --timezone …",
    )


def _overdue(each: "ScheduleLine") -> Finding:
    since = f"since {moment(each.next_fire_at)}" if each.next_fire_at else "and was never planned"
    return Finding(
        check="overdue schedules",
        finding=f"{each.name} is due {since}, and nobody decides about it",
        do="start a daemon, of any app: rota run --app module:app; or see the log of one that lives",
    )


def _silent(each: "ScheduleLine") -> Finding:
    last = f"its last was {moment(each.last_success_at)}" if each.last_success_at else "there was none yet"
    return Finding(
        check="no success",
        finding=f"{each.name} has not succeeded within {age(each.expect_success_within)}: {last}",
        do=f"rota why {quote(each.name)}, or rota schedule show {quote(each.name)}",
    )
