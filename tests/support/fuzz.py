"""Run hostile clients, sessions and HTTP clients against rota, beside canary jobs that must run in time.

A client may harm its own jobs and nothing else: canary jobs of another client start in time, every reading command and
every page answers, and no accepted job disappears. The seed determines what is drawn, but not when it runs. The exit
code is 1 after a failure; the output has the seed and the row or command of each failure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg

from chaos import write_line
from command_line import Shell
from fuzz_hostility import CREATE_HOSTILE_FUNCTIONS, EXPECTED, SETTINGS, Clients, Sessions, bad_web_server
from fuzz_rows import CANARY, Rows, Statement
from network_faults import free_port
from processes import START_TIMEOUT_S, DaemonProcess, Daemons
from role_logins import module_role_database
from servers import start_test_server
from waiting import eventually, pace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncpg import Connection, Record

    from role_logins import RoleDatabase

CANARY_STARTS_WITHIN_S = 10.0
SHARED_STARTS_WITHIN_S = 20.0
"""The same for jobs in the lane of the hostile rows, where earlier rows run first."""
PAGE_ANSWERS_WITHIN_S = 2.0
COMMAND_ANSWERS_WITHIN_S = 20.0
SAMPLE_AGE_S = 60.0


def slack() -> float:
    """Return the factor by which a loaded machine extends the deadlines of answers."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / 2)


MAX_REMEMBERED_JOBS = 200_000
"""How many accepted jobs are remembered, each with the statement that inserted it."""

ENVIRON = {
    "ROTA_LEASE": "10s",
    "ROTA_QUEUES": "default:20,apart:1,canary:5,*:10",
    "ROTA_LOG_LEVEL": "info",
    "ROTA_CONFIG": "rota.toml",
}

CONFIG = """
[handlers.http.endpoints.hook]
url = "{hook}"
private = true
timeout = "2s"

[handlers.command]
cat = {{ argv = ["cat"], timeout = "2s" }}
fails = {{ argv = ["sh", "-c", "head -c 100000 /dev/urandom >&2; exit 3"], timeout = "2s" }}
noise = {{ argv = ["head", "-c", "3000000", "/dev/urandom"], timeout = "2s" }}
hangs = {{ argv = ["sleep", "60"], timeout = "500ms", grace = "100ms" }}

[handlers.sql]
echo = {{ statement = "select $1::jsonb", url = "{low}", timeout = "2s" }}
fails = {{ statement = "select 1 / (($1::jsonb ->> 'n')::int - 7)", url = "{low}", timeout = "2s" }}
sleeps = {{ statement = "select pg_sleep(30)", url = "{low}", timeout = "500ms" }}
analyze = {{ statement = "analyze", url = "{low}", transaction = false, timeout = "2s" }}
"""

SET_SAFE_SEARCH_PATH = "set search_path = pg_catalog, pg_temp"
"""Protects the fuzzer's own sessions, because asyncpg's queries call functions too. The canary keeps the default."""

ACCEPTABLE = re.compile(r"23514|23502|23505|RT00\d|42501|40001|40P01|55P03|57014|08\w{3}|57P01|57P05|25P0[23]|25006")
"""SQLSTATEs of refusals that a client can act on: a named constraint, a code of rota's, a missing right, a conflict, a timeout."""

READS: tuple[tuple[str, ...], ...] = (
    ("status",),
    ("status", "--json"),
    ("check",),
    ("check", "--json"),
    ("queue", "list"),
    ("queue", "list", "--json"),
    ("job", "list"),
    ("job", "list", "--limit", "2000", "--json"),
    ("schedule", "list"),
    ("schedule", "list", "--json"),
    ("dead", "summary"),
    ("dead", "summary", "--json"),
    ("dead", "list"),
    ("node", "list"),
    ("node", "list", "--json"),
    ("handler", "list"),
    ("handler", "list", "--json"),
    ("why", "JOB"),
    ("job", "show", "JOB"),
    ("job", "show", "JOB", "--json"),
    ("why", "SCHEDULE"),
    ("schedule", "show", "SCHEDULE"),
    ("schedule", "preview", "SCHEDULE"),
    ("why", "JOB", "--json"),
)


@dataclass(slots=True)
class Failures:
    """The failures by kind, each with its first example and a count."""

    seen: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, example: str) -> None:
        """Count a failure, and print the first of its kind at once."""
        self.seen[kind] += 1
        if kind not in self.examples:
            self.examples[kind] = example
            write_line(f"FAILURE {kind}\n    {example}")


@dataclass(slots=True)
class Fuzz:
    """One run: the installation, the drawn statements, and the observations."""

    role_database: RoleDatabase
    daemons: Daemons
    shell: Shell
    seed: int
    ends_at: float
    unbounded: bool = False
    seats: list[DaemonProcess] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    failures: Failures = field(default_factory=Failures)
    accepted: dict[int, str] = field(default_factory=dict)
    canaries: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    statements: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    recent: deque[str] = field(default_factory=lambda: deque(maxlen=12))
    pages: list[tuple[float, str]] = field(default_factory=list)
    commands: list[tuple[float, str]] = field(default_factory=list)
    unready: Counter[str] = field(default_factory=Counter)
    rows: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.rows = Rows(random.Random(self.seed))

    @property
    def is_over(self) -> bool:
        """Return whether the time is up."""
        return time.monotonic() > self.ends_at

    # ------------------------------------------------------------------------------------------- hostile rows

    async def run_statements(self, number: int, login: str, draw: Callable[[], Statement], *, pause: float) -> None:
        """Run drawn statements as that login until the time is up. Each session is short and has its own settings."""
        dice = random.Random(self.seed * 100 + number)
        while not self.is_over:
            settings = dice.sample(SETTINGS, dice.choice([0, 0, 1, 2]))
            with suppress(*EXPECTED):
                async with self.role_database.connect(login) as conn:
                    await conn.execute(
                        f"{SET_SAFE_SEARCH_PATH}; set lock_timeout = '5s'; set statement_timeout = '20s'"
                    )
                    for setting in settings:
                        await conn.execute(f"set {setting}")
                    for _ in range(60):
                        if self.is_over or conn.is_closed():
                            break
                        await self._run(conn, draw(), settings)
                        await pace(pause)

    async def _run(self, conn: Connection[Record], statement: Statement, settings: Sequence[str]) -> None:
        self.statements[statement.kind] += 1
        try:
            rows = await conn.fetch(statement.sql, *statement.arguments, timeout=25)
        except asyncpg.PostgresError as error:
            await self._check_refusal(conn, statement, settings, error)
            return
        except (UnicodeError, OverflowError, asyncpg.DataError):
            self.refusals["the driver"] += 1
            return
        except EXPECTED as error:
            self.refusals[type(error).__name__] += 1
            return
        self.refusals["accepted"] += 1
        self.recent.append(str(statement))
        if statement.returns_jobs:
            self._remember([int(row[0]) for row in rows if row[0] is not None], str(statement))
        elif statement.kind in {"schedules", "put_schedule"}:
            self.rows.schedules.append(
                str(statement.arguments[0]) if statement.kind == "put_schedule" else str(rows[0][0])
            )

    def _remember(self, job_ids: Sequence[int], how: str) -> None:
        self.rows.jobs = [*self.rows.jobs[-500:], *job_ids[:3]]
        if len(self.accepted) < MAX_REMEMBERED_JOBS:
            self.accepted.update(dict.fromkeys(job_ids, how))

    async def _check_refusal(
        self, conn: Connection[Record], statement: Statement, settings: Sequence[str], error: asyncpg.PostgresError
    ) -> None:
        code = str(error.sqlstate)
        self.refusals[code] += 1
        if self.unbounded:
            return  # without the constraints, PostgreSQL itself refuses the values
        if any(setting.startswith("search_path") for setting in settings):
            return  # the session's own functions may have raised it
        if code in {"22021", "22P05"} and any(setting.startswith("client_encoding") for setting in settings):
            return  # the driver sends UTF-8, which the encoding of the session rejects
        if statement.plain and (code[:2] in {"23", "RT"} or not ACCEPTABLE.fullmatch(code)):
            self.failures.add(
                f"{statement.kind}: valid, but refused with {code}",
                f"{error} | {statement} | {settings}",
            )
        elif not ACCEPTABLE.fullmatch(code) and not await self._has_invalid_value(conn, statement):
            self.failures.add(
                f"{statement.kind}: refused with {code} ({type(error).__name__})", f"{error} | {statement} | {settings}"
            )

    async def _has_invalid_value(self, conn: Connection[Record], statement: Statement) -> bool:
        """Return whether an argument cannot be cast to its type, which PostgreSQL refuses independently of rota."""
        for value, kind in zip(statement.arguments, statement.types, strict=True):
            try:
                await conn.fetchval(f"select $1::pg_catalog.text::{kind} is null", value)
            except EXPECTED:
                return True
        return False

    # ------------------------------------------------------------------------------------------- the canary

    async def insert_canaries(self) -> None:
        """Insert a canary job each second, and one into the lane of the hostile rows every other second."""
        async with self.role_database.connect("other") as conn:
            await conn.execute(
                f"select rota.put_schedule('{CANARY}', '{CANARY}', every => '2 seconds', overlap => 'allow')"
            )
            turn = 0
            while not self.is_over:
                turn += 1
                await self._insert_canary(conn, self.canaries, CANARY, CANARY)
                if turn % 2:
                    await self._insert_canary(conn, self.shared, "ok", "default")
                await pace(1)

    async def _insert_canary(self, conn: Connection[Record], kept: list[int], handler: str, queue: str) -> None:
        try:
            kept.append(
                await conn.fetchval(
                    "insert into rota.jobs (handler, queue, priority) values ($1, $2, 0) returning job_id",
                    *(handler, queue),
                    timeout=CANARY_STARTS_WITHIN_S,
                )
            )
        except EXPECTED as error:
            self.failures.add("a canary could not be inserted", f"{type(error).__name__}: {error}")

    async def check_canaries(self, conn: Connection[Record]) -> None:
        """Print how late the canaries were, and record those beyond the deadline."""
        for what, job_ids, bound in (
            ("canary", self.canaries, CANARY_STARTS_WITHIN_S),
            ("canary in the shared lane", self.shared, SHARED_STARTS_WITHIN_S),
        ):
            rows = await conn.fetch(SELECT_START_LATENESS, job_ids)
            await self._check_lateness(what, rows, len(job_ids), bound)
        fires = await conn.fetch(SELECT_FIRE_LATENESS, CANARY)
        await self._check_lateness("canary schedule", fires, len(fires), CANARY_STARTS_WITHIN_S)

    async def _check_lateness(self, what: str, rows: Sequence[Record], count: int, bound: float) -> None:
        late = sorted(float(row["late"]) for row in rows)
        if not late:
            self.failures.add(f"{what}: none", "not one job was inserted")
            return
        too_late = [row for row in rows if row["late"] > bound]
        p50, p99 = (late[int(share * (len(late) - 1))] for share in (0.5, 0.99))
        write_line(
            f"{what}: {count} jobs, {len(too_late)} late; start p50 {p50:.3f} s, p99 {p99:.3f} s, at most {late[-1]:.3f} s"
        )
        for row in too_late:
            self.failures.add(f"{what}: started later than {bound:g} s", str(dict(row)))
        if len(rows) < count:
            self.failures.add(f"{what}: disappeared", f"{count} inserted, {len(rows)} known")

    # ------------------------------------------------------------------------------------------- reading

    async def run_reading_commands(self) -> None:
        """Run one reading command after another."""
        turn = 0
        while not self.is_over:
            words = READS[turn % len(READS)]
            turn += 1
            job = str(self.rows.dice.choice(self.rows.jobs)) if self.rows.jobs else "1"
            schedule = self.rows.dice.choice([CANARY, *self.rows.schedules])
            if schedule.startswith("-") or "\x00" in schedule or "\ud800" in schedule:
                schedule = CANARY
            await self._run_reading_command(
                words, [{"JOB": job, "SCHEDULE": schedule}.get(word, word) for word in words]
            )

    async def _run_reading_command(self, words: Sequence[str], arguments: Sequence[str]) -> None:
        name, began = " ".join(words), time.monotonic()
        try:
            result = await self.shell(*arguments)
        except (AssertionError, TimeoutError) as error:
            self.failures.add(f"rota {name}: no answer", f"{arguments}: {type(error).__name__} {str(error)[-1500:]}")
            return
        took = time.monotonic() - began
        self.commands.append((took, name))
        may_be_missing = "JOB" in words or "SCHEDULE" in words
        if result.code not in {0, 1} or (result.code == 1 and words[0] != "check" and not may_be_missing):
            self.failures.add(
                f"rota {name}: exit code {result.code}", f"{arguments}: {(result.err or result.out)[-1500:]}"
            )
        elif took > COMMAND_ANSWERS_WITHIN_S * slack():
            self.failures.add(f"rota {name}: slower than {COMMAND_ANSWERS_WITHIN_S:g} s", f"{arguments}: {took:.1f} s")
        elif result.code == 0 and "--json" in words:
            try:
                json.loads(result.out)
            except ValueError as error:
                self.failures.add(f"rota {name}: not JSON", f"{arguments}: {error}")

    def scrape_pages(self) -> None:
        """Request each daemon's pages, on a thread of its own."""
        up_at = time.monotonic()
        while not self.is_over:
            for port, seat in zip(self.ports, self.seats, strict=True):
                for page in ("metrics", "healthz", "readyz"):
                    self._scrape(port, page, old=time.monotonic() - up_at > SAMPLE_AGE_S)
                if not seat.alive:
                    continue
            threading.Event().wait(0.3)

    def _scrape(self, port: int, page: str, *, old: bool, tries: int = 3) -> None:
        began = time.monotonic()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=30) as answer:
                body = answer.read().decode()
        except urllib.error.HTTPError as refused:
            with refused:
                body = refused.read().decode()
            if page == "readyz":
                self.unready[re.sub(r"\d+", "N", body)[:200]] += 1
            else:
                self.failures.add(f"/{page}: status {refused.code}", body[:1000])
        except OSError as error:
            if tries > 1 and isinstance(error, ConnectionError):  # the daemon closes connections while hundreds arrive
                self._scrape(port, page, old=old, tries=tries - 1)
            elif not self.is_over:
                self.failures.add(f"/{page}: {type(error).__name__}", f"{error} after {time.monotonic() - began:.1f} s")
            return
        took = time.monotonic() - began
        self.pages.append((took, page))
        if took > PAGE_ANSWERS_WITHIN_S * slack():
            self.failures.add(f"/{page}: slower than {PAGE_ANSWERS_WITHIN_S:g} s", f"{took:.2f} s")
        if page == "metrics":
            age = re.search(r"^rota_sample_age_seconds (\S+)$", body, re.MULTILINE)
            if old and (age is None or float(age[1]) > SAMPLE_AGE_S):
                self.failures.add(
                    f"gauges older than {SAMPLE_AGE_S:g} s", age[0] if age else "no rota_sample_age_seconds"
                )
            for crash in re.findall(r"^rota_loop_crashes_total\{.*\} [1-9].*$", body, re.MULTILINE):
                self.failures.add(
                    f"a loop crashed: {crash.rpartition(' ')[0]}", f"{crash}; recently: {list(self.recent)[-5:]}"
                )

    async def restart_ended_daemons(self) -> None:
        """Record each daemon that has ended as a failure, and start another one."""
        while not self.is_over:
            for number, seat in enumerate(self.seats):
                if not seat.alive:
                    tail = seat.output_text()[-3000:]
                    named = [self.accepted.get(int(job)) for job in re.findall(r'job(?:_id)?"?\W{1,2}(\d+)', tail)]
                    shown = [each for each in named if each] or list(self.recent)
                    self.failures.add(f"a daemon ended with {seat.popen.returncode}", f"{tail}\nrows: {shown[:12]}")
                    self.done["daemons ended"] += 1
                    self.seats[number] = self.launch(self.ports[number])
            await pace(0.3)

    def launch(self, port: int) -> DaemonProcess:
        """Start a daemon with the usual limit of open files."""
        limited = ("sh", "-c", 'ulimit -n 512; exec "$@"', "sh")
        return self.daemons.launch(within=limited, ROTA_HTTP_PORT=str(port))

    # ------------------------------------------------------------------------------------------- the end

    async def check_end_state(self) -> None:
        """Check what is stored at the end."""
        async with self.role_database.connect() as conn:
            await conn.execute(SET_SAFE_SEARCH_PATH)

            async def have_started() -> bool:
                return not await conn.fetchval(
                    "select exists (select from rota.jobs where job_id = any ($1) and attempt = 0)",
                    self.canaries + self.shared,
                )

            with suppress(AssertionError):
                await eventually(have_started, within=SHARED_STARTS_WITHIN_S)
            await self.check_canaries(conn)
            await self._check_accepted_jobs(conn)
            for row in await conn.fetch(
                "select who, what, count(*) from evil.caught where who <> session group by 1, 2 limit 5"
            ):
                self.failures.add(f"a stranger's function ran as {row['who']}", str(dict(row)))
            for row in await conn.fetch(
                "select session, what, min(query) as query, count(*) from evil.caught where session not like '%stranger'"
                " and session not like '%app' group by 1, 2 limit 5"
            ):
                self.failures.add(f"a stranger's function ran in a session of {row['session']}", str(dict(row)))
        for daemon in self.seats:
            await asyncio.to_thread(self._check_exit, daemon)
        unexpected_lines = [
            line
            for daemon in self.daemons.started
            for line in daemon.unexpected_output()
            if not line.startswith("rota: ")
        ]
        if unexpected_lines:
            self.failures.add("daemons wrote lines that are no log events", "\n".join(unexpected_lines[:40]))

    def _check_exit(self, daemon: DaemonProcess) -> None:
        try:
            code = daemon.stop(within=30)
        except AssertionError as error:
            self.failures.add("a daemon did not stop", str(error)[-2000:])
            return
        if code != 0 and not daemon.events("handler.abandoned"):
            self.failures.add(f"a daemon stopped with {code}", daemon.output_text()[-2000:])

    async def _check_accepted_jobs(self, conn: Connection[Record]) -> None:
        lost = await conn.fetch(SELECT_LOST_JOBS, [*self.accepted])
        for row in lost:
            self.failures.add("an accepted job disappeared", f"job {row[0]}: {self.accepted[row[0]]}")
        counts = {str(row[0]): int(row[1]) for row in await conn.fetch(COUNT_STATES)}
        write_line(f"accepted jobs: {len(self.accepted)} remembered, {len(lost)} lost; all by state: {counts}")

    def report(self) -> None:
        """Print the figures of the run."""
        write_line("statements:", ", ".join(f"{count} {kind}" for kind, count in self.statements.most_common()))
        write_line("answers:", ", ".join(f"{count} {kind}" for kind, count in self.refusals.most_common()))
        acts = {kind: count for kind, count in self.done.items() if not kind.startswith("locked ")}
        write_line("hostile acts:", ", ".join(f"{count} {kind}" for kind, count in sorted(acts.items())))
        write_line(
            "locks granted:",
            ", ".join(f"{kind} ({count})" for kind, count in sorted(self.done.items()) if kind.startswith("locked ")),
        )
        write_line(f"load: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for what, times in (("commands", self.commands), ("pages", self.pages)):
            slowest = sorted(times, reverse=True)[:3]
            write_line(
                f"{what}: {len(times)} answered; slowest {', '.join(f'{name} {took:.2f} s' for took, name in slowest)}"
            )
        events = [
            event
            for daemon in self.daemons.started
            for event in daemon.events()
            if event.get("level") in {"warning", "error", "critical"}
        ]
        write_line("warnings and errors logged:")
        for name, count in Counter(event["event"] for event in events).most_common(25):
            example = next(each for each in events if each["event"] == name)
            trace = str(example.pop("traceback", example.pop("exception", "")))
            write_line(f"    {count} {name}, such as", json.dumps(example)[:400], trace[-1200:])
        write_line("not ready:", str(dict(self.unready.most_common(5))))
        write_line(f"daemons ended: {self.done['daemons ended']}")


SELECT_CALLABLE_FUNCTIONS = """
select proname, proargnames[:pronargs] as names, array(select format_type(kind, null) from unnest(proargtypes) as kind) as types
from pg_proc
where pronamespace = 'rota'::regnamespace and prokind = 'f' and prorettype <> 'trigger'::regtype
  and has_function_privilege($1, oid, 'execute')
order by 1
"""

SELECT_START_LATENESS = """
select job_id, extract(epoch from coalesce(started_at, clock_timestamp()) - run_at)::float8 as late
from rota.jobs where job_id = any ($1)
union all
select job_id, extract(epoch from started_at - scheduled_for)::float8 from rota.job_runs where job_id = any ($1)
union all
select job_id, extract(epoch from started_at - scheduled_for)::float8 from rota.dead_letters where job_id = any ($1)
"""
SELECT_FIRE_LATENESS = """
select fire.scheduled_for, fire.disposition,
    extract(epoch from coalesce(run.started_at, clock_timestamp()) - fire.scheduled_for)::float8 as late
from rota.fires as fire left join rota.job_runs as run using (job_id)
where fire.name = $1 and fire.disposition <> 'skipped_edit'
"""
SELECT_LOST_JOBS = """
select id from unnest($1::int8[]) as id
where id not in (select job_id from rota.jobs union all select job_id from rota.job_runs
                 union all select job_id from rota.dead_letters)
"""
DROP_BOUNDS = """
do $$
declare
    each record;
begin
    for each in
        select conrelid::regclass as name, conname from pg_constraint
        where contype = 'c' and conrelid in ('rota.jobs'::regclass, 'rota.schedule_definitions'::regclass)
          and conname !~ '^(state|running|exactly)'
    loop
        execute format('alter table %s drop constraint %I', each.name, each.conname);
    end loop;
end $$
"""

COUNT_STATES = "select state, count(*) from rota.job_status group by 1 order by 2 desc"


def words_of_rota_sql() -> list[str]:
    """Return every word of rota's SQL, which includes the names of the functions that it calls."""
    sql = Path(__file__).parents[2] / "sql"
    return sorted({word for file in sql.rglob("*.sql") for word in re.findall(r"\b[a-z_0-9]{3,}\b", file.read_text())})


async def create_logins_and_functions(role_database: RoleDatabase, *, unbounded: bool) -> None:
    """Create the logins and the stranger's functions. With `unbounded`, drop the constraints on column values."""
    async with role_database.connect() as root:
        await root.execute(f"create role {role_database.prefix}_stranger login password 'secret'")
        await root.execute(f"create role {role_database.prefix}_low login password 'secret'")
        await root.execute(f"grant usage on schema rota to {role_database.prefix}_low")
        await root.execute(f"grant execute on function rota.complete to {role_database.prefix}_low")
        names = "array[" + ",".join(f"'{name}'" for name in words_of_rota_sql()) + "]"
        if unbounded:
            await root.execute(DROP_BOUNDS)
        await root.execute(CREATE_HOSTILE_FUNCTIONS.replace("$names", names))


async def run(fuzz: Fuzz, *, daemons: int) -> None:
    """Start everything, wait until the time is up, and check."""
    async with fuzz.role_database.connect() as root:
        await root.execute(SET_SAFE_SEARCH_PATH)
        for row in await root.fetch(SELECT_CALLABLE_FUNCTIONS, f"{fuzz.role_database.prefix}_client"):
            fuzz.rows.functions.append((row["proname"], dict(zip(row["names"] or [], row["types"], strict=True))))
    write_line("functions of clients:", ", ".join(name for name, _ in fuzz.rows.functions))
    fuzz.ports = [free_port() for _ in range(daemons)]
    fuzz.seats = [fuzz.launch(port) for port in fuzz.ports]
    for seat in fuzz.seats:
        await asyncio.to_thread(seat.wait_for, "node.started", within=START_TIMEOUT_S)
    length = fuzz.ends_at
    fuzz.ends_at = time.monotonic() + length
    scraping = threading.Thread(target=fuzz.scrape_pages)
    scraping.start()
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(fuzz.run_statements(number, "app", fuzz.rows.client, pause=0.01))
            group.create_task(fuzz.run_statements(3, "op", fuzz.rows.operator, pause=0.1))
            for number in range(6):
                group.create_task(Sessions(fuzz.role_database, fuzz.seed + number, fuzz.done).run(lambda: fuzz.is_over))
            for number in range(2):
                clients = Clients(lambda: fuzz.ports, fuzz.seed + number, fuzz.done)
                group.create_task(clients.run(lambda: fuzz.is_over))
            group.create_task(fuzz.insert_canaries())
            group.create_task(fuzz.restart_ended_daemons())
            group.create_task(fuzz.run_reading_commands())
    finally:
        fuzz.ends_at = 0.0
        scraping.join()
    await fuzz.check_end_state()
    fuzz.report()


def main() -> int:
    """Run one seed; return 0 if nothing failed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    options.add_argument("--minutes", type=float, default=0.0, help="how long; 0 goes on until Ctrl-C")
    options.add_argument("--daemons", type=int, default=2)
    options.add_argument("--unbounded", action="store_true", help="drop the constraints first, as if rows were older")
    given = options.parse_args()
    write_line(f"seed {given.seed}")
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # asyncio warns of each write to a closed connection
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rota-fuzz-")))
        server = stack.enter_context(start_test_server())
        role_database = stack.enter_context(module_role_database(server, "fuzz"))
        runner = stack.enter_context(asyncio.Runner(loop_factory=asyncio.new_event_loop))
        runner.run(create_logins_and_functions(role_database, unbounded=given.unbounded))
        daemons = stack.enter_context(Daemons(folder, role_database.dsn("node"), app="fuzz_app:app", environ=ENVIRON))
        seconds = given.minutes * 60 or float("inf")
        fuzz = Fuzz(
            role_database,
            daemons,
            Shell(folder, {"DATABASE_URL": role_database.dsn("op")}),
            given.seed,
            seconds,
            given.unbounded,
        )

        async def run_with_web_server() -> None:
            async with AsyncExitStack() as inner:
                hook = await inner.enter_async_context(bad_web_server(given.seed))
                (folder / "rota.toml").write_text(CONFIG.format(hook=hook, low=role_database.dsn("low")))
                await run(fuzz, daemons=given.daemons)

        runner.run(run_with_web_server())
    failures = fuzz.failures
    if failures.seen:
        write_line(f"\nseed {given.seed}: {sum(failures.seen.values())} failures of {len(failures.seen)} kinds")
        write_line(
            *(
                f"\n- {count} times: {kind}\n    {failures.examples[kind][:1200]}"
                for kind, count in failures.seen.most_common()
            )
        )
        return 1
    write_line(f"seed {given.seed}: no failures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
