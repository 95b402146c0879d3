"""Hostile values for every column that a client may write, and statements with them, drawn from a seed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

Value = str | None
"""A value as text, which the statement casts to the column's type; None is NULL."""

INTERVALS = (
    *("0", "1 us", "-1 us", "1 s", "-1 s", "3 s", "2.999999 s", "24 hours", "1 day", "1 day 1 us", "-1 day 25 hours"),
    *("366 days", "366 days 1 us", "8784 hours", "31622400 s", "365 days 86400 s", "1 mon", "1 mon -29 days", "1 year"),
    *(
        "106751000 days -2562023976 hours",
        "-106751000 days 2562024024 hours",
        "106751000 days -2562023999 hours -59 min",
    ),
    *("2147483647 days -2147483646 days", "2562047788 hours", "178000000 years", "-178000000 years", "infinity"),
    *("-infinity", "2147483647 days", "1 day -23 hours -59 min -57 s", "-2000000 days 48000024 hours", "1000000 s"),
    *("200 days -4799 hours", "-366 days 17568 hours", "732 days -8784 hours"),
)
INSTANTS = (
    *("epoch", "infinity", "-infinity", "1970-01-01 00:00:00.000001+00", "1969-12-31 23:59:59.999999+00", "now"),
    *("2199-12-31 23:59:59.999999+00", "2199-01-01+00", "2198-12-30+00", "2200-01-01 00:00+00", "4713-01-01 BC"),
    *("294276-12-31 23:59:59.999999+00", "9999-12-31 23:59:59+00", "10000-01-01+00", "0001-01-01+00", "yesterday"),
    *("tomorrow", "1970-01-02 00:00+14", "2026-03-29 02:30 Europe/Vienna", "2026-10-25 02:30 Europe/Vienna"),
    *("2038-01-19 03:14:08+00", "2000-02-29+00", "1970-12-31+00", "2100-02-28 23:59:60+00"),
)
HOSTILE_TEXTS = (
    *("", " ", "x", "x" * 200, "x" * 201, "x" * 500, "x" * 501, "x" * 10_000, "\U0001d11e" * 200, "e\u0301" * 100),
    *(
        "\u202egnp.exe",
        "\u2400",
        "\u0130stanbul",
        "\ufeffbom",
        "\u2028",
        "\u0085",
        "\x01",
        "\t",
        "a\nb",
        "\x7f",
        "\x1b[31m",
    ),
    *(
        "\x00",
        "\ud800",
        "\U0010ffff",
        "\uffff",
        "\U0001f469\u200d\U0001f4bb",
        "\u3164",
        "[bold red]",
        "[/]",
        "[/bold]",
        "\\",
    ),
    *(
        "'",
        '"',
        "'; drop table rota.jobs; --",
        "$1",
        "%s%n",
        "%",
        "{}",
        "{0}",
        "--help",
        "-",
        "*",
        "NULL",
        "null",
        "default",
    ),
    *(
        "a,b",
        "a:b",
        "a=b",
        "\\x41",
        "../../etc/passwd",
        "<script>",
        "rota:x",
        "None",
        "other",
        "handler:ok",
        "queue:default",
    ),
    *(
        "\u0660\u0661",
        "\u00a0",
        "\u200b",
        "ok ",
        " ok",
        "OK",
        "\u043ek",
        "1",
        "-1",
        "1e9",
        "true",
        "{a,b}",
        '{"a":1}',
        "_" * 63,
    ),
)
ZONES = (
    *(
        "UTC",
        "utc",
        "Europe/Vienna",
        "europe/vienna",
        "Factory",
        "localtime",
        "posixrules",
        "Antarctica/Troll",
        "Europe",
    ),
    *("Australia/Lord_Howe", "Africa/Casablanca", "Asia/Kathmandu", "Pacific/Apia", "America/Nuuk", "EST5EDT", "GMT0"),
    *("Etc/GMT+12", "Etc/GMT-14", "right/UTC", "posix/UTC", "zone", "Europe/", "leapseconds", "A//B", "Mars/Olympus"),
    *(
        "+05:00",
        "UTC+3",
        "<x>-3",
        "..",
        "__init__",
        "con",
        "Europe/Vienna/",
        "x" * 64,
        "x" * 65,
        "Asia/Calcutta",
        "/etc/passwd",
    ),
)
CRONS = (
    *("* * * * * *", "* * * * *", "*/5 * * * * *", "0 0 29 2 *", "0 0 30 2 *", "0 0 31 2 1", "@daily", "@reboot", "L"),
    *("*/61 * * * *", "59 23 31 12 7", "0-59/59 * * * *", "0 0 L * *", "0 0 * * 5#5", "0 0 * * L5", "0 0 29 2 5#5"),
    *(
        " * * * * * ",
        "\u0660 * * * *",
        "0 0 1 jan mon",
        "99999999999999999999 * * * *",
        "1-1 1-1 1-1 1-1 1-1",
        "* * * *",
    ),
    *(
        "* * * * * * *",
        "? * * * *",
        "H H * * *",
        "5/15 * * * *",
        "50-10 * * * *",
        "0 2 * * *",
        "30 2 * * *",
        "0 0 31 * *",
    ),
    *(
        ",".join(map(str, range(60))) + " * * * *",
        "1," * 490 + "1 * * * *",
        "1," * 600 + "1 * * * *",
        "*\t*\t*\t*\t*",
        "",
    ),
    *(
        "0 0 29 2 0l",
        "0 0 l 2 *",
        "*/60 */24 * * *",
        "0 0 1-31/31 * *",
        "@yearly",
        "@every 5m",
        "0 0 0 1 1 *",
        "0 24 * * *",
    ),
)
JSONS = (
    *(
        "{}",
        "null",
        "1",
        '"x"',
        "[]",
        "true",
        '{"n":1e5000}',
        '{"n":-1e-5000}',
        "9" * 5000,
        "1e400",
        "-0",
        "0.1" + "0" * 400,
    ),
    *(
        "[" * 50 + "]" * 50,
        "[" * 100 + "]" * 100,
        "[" * 101 + "]" * 101,
        "[" * 5000 + "]" * 5000,
        '{"a":' * 99 + "1" + "}" * 99,
    ),
    *(
        '"\\u0000"',
        '"\\ud800"',
        '{"\\ud83d\\ude00":1}',
        '{"__proto__":1,"__class__":2}',
        '{"":{"":{}}}',
        '{"a":1,"a":2}',
    ),
    *(
        '{"order":7}',
        '{"order":"7"}',
        '{"order":1e5000}',
        '{"order":null,"note":"\\u202e"}',
        '{"n":"S3CRET"}',
        '{"n":2147483648}',
    ),
    *(
        '{"path":"//evil/","json":1}',
        '{"path":"\\r\\nX: 1"}',
        '{"headers":{"X":"a\\r\\nb"}}',
        '{"headers":{"\\u00e9":"1"}}',
    ),
    *(
        '{"headers":[1,2]}',
        '{"url":"http://169.254.169.254/"}',
        '{"method":"TRACE"}',
        '{"json":{"a":[1e5000]}}',
        '{"path":7}',
    ),
    *(
        '{"headers":{"Content-Length":"5","Transfer-Encoding":"chunked"}}',
        '{"path":"..\\/..\\/%00"}',
        '{"traceparent":"00-zz"}',
    ),
)
HANDLERS = (
    *("ok", "fails", "ends", "returns", "slow", "thread", "typed", "writes", "transacts", "once", "apart", "http.hook"),
    *(
        "command.cat",
        "command.fails",
        "command.noise",
        "command.hangs",
        "sql.echo",
        "sql.fails",
        "sql.sleeps",
        "sql.analyze",
    ),
)
WEIGHTS = (20, 12, 8, 8, 3, 4, 4, 4, 4, 4, 1, 4, 1, 1, 1, 1, 2, 2, 2, 1)

JOB_COLUMNS: Mapping[str, str] = {
    "handler": "text",
    "payload": "jsonb",
    "queue": "text",
    "priority": "int2",
    "run_at": "timestamptz",
    "max_attempts": "int4",
    "backoff_base": "interval",
    "backoff_cap": "interval",
    "retry_for": "interval",
    "timeout": "interval",
    "lease": "interval",
    "delivery": "text",
    "start_by": "timestamptz",
    "unique_key": "text",
    "idempotency_key": "text",
    "meta": "jsonb",
}
ENQUEUE_ARGUMENTS: Mapping[str, str] = {
    **JOB_COLUMNS,
    "on_conflict": "text",
    "priority": "int4",
    "max_attempts": "int4",
}
SCHEDULE_COLUMNS: Mapping[str, str] = {
    **{
        name: kind
        for name, kind in JOB_COLUMNS.items()
        if name not in {"run_at", "start_by", "unique_key", "idempotency_key"}
    },
    "name": "text",
    "cron": "text",
    "every": "interval",
    "timezone": "text",
    "start_within": "interval",
    "start_at": "timestamptz",
    "end_at": "timestamptz",
    "paused": "boolean",
    "resume_at": "timestamptz",
    "misfire": "text",
    "on_time_within": "interval",
    "too_late_after": "interval",
    "catch_up_limit": "int4",
    "overlap": "text",
    "dst_gap": "text",
    "dst_fold": "text",
    "jitter": "interval",
    "expect_success_within": "interval",
    "description": "text",
    "owner": "text",
}
PUT_ARGUMENTS: Mapping[str, str] = {**SCHEDULE_COLUMNS, "priority": "int4"}
ENUMS: Mapping[str, tuple[str, ...]] = {
    "delivery": ("at_least_once", "at_most_once", "AT_MOST_ONCE"),
    "misfire": ("latest", "skip", "all", "none"),
    "overlap": ("skip", "allow", "queue_one", "replace", "x"),
    "dst_gap": ("after", "skip", "before"),
    "dst_fold": ("first", "both", "last"),
    "on_conflict": ("keep", "replace", "queue_one", "error", "ignore"),
    "timezone": ZONES,
    "cron": CRONS,
}
INTEGERS = (
    "-1",
    "0",
    "1",
    "5",
    "9",
    "10",
    "100",
    "1000",
    "1001",
    "32767",
    "32768",
    "40000",
    "2147483647",
    "-2147483648",
)

CANARY = "canary"
"""Name of the canary's queue, handler and schedule, which hostile rows do not use."""


class Statement(NamedTuple):
    """A statement with its arguments as text.

    `kind` names its subject, and `returns_jobs` says that it returns job_ids.
    """

    kind: str
    sql: str
    arguments: tuple[Value, ...] = ()
    types: tuple[str, ...] = ()
    returns_jobs: bool = False
    plain: bool = False
    """The statement is valid and must be accepted."""

    def __str__(self) -> str:
        def sql_literal(match: re.Match[str]) -> str:
            value = self.arguments[int(match[1]) - 1]
            if value is None:
                return "NULL"
            shown = value if len(value) <= 160 else f"{value[:80]}…({len(value)} characters)"
            return "'" + shown.encode("unicode_escape").decode().replace("'", "''") + "'"

        return re.sub(r"\$(\d+)::text", sql_literal, self.sql)


@dataclass(slots=True)
class Rows:
    """Draws statements.

    `jobs` and `schedules` were accepted recently and are targets of further statements. `functions` are those that
    rota_client may call, with the types of their arguments.
    """

    dice: random.Random
    jobs: list[int] = field(default_factory=list)
    schedules: list[str] = field(default_factory=list)
    functions: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    _made: int = 0

    def client(self) -> Statement:
        """Return a statement that rota_client may run."""
        makers: dict[Callable[[], Statement], int] = {
            self._plain_job: 4,
            self._job: 44,
            self._enqueue: 16,
            self._schedule: 9,
            self._put_schedule: 7,
            self._edit_schedule: 6,
            self._remove_schedule: 6 if len(self.schedules) < 150 else 40,
            self._cancel: 5,
            self._call: 6 if self.functions else 0,
            self._crowd: 1,
            self._read: 2,
        }
        return self._draw(makers)

    def operator(self) -> Statement:
        """Return a statement that rota_operator may run."""
        makers: dict[Callable[[], Statement], int] = {
            self._redrive: 5,
            self._reschedule: 4,
            self._operate_many: 5,
            self._operate_schedule: 5,
            self._pause: 2,
        }
        return self._draw(makers)

    def _draw(self, makers: Mapping[Callable[[], Statement], int]) -> Statement:
        (make,) = self.dice.choices([*makers], weights=[*makers.values()])
        self._made += 1
        return make()

    def text(self) -> str:
        """Draw a name, a key or a note."""
        if self.dice.random() < 0.2:  # incompressible text near or beyond the size limit of an index row
            length = self.dice.choice([200, 250, 500, 501])
            return "".join(
                chr(self.dice.choice([0x4E00, 0x10000, 0x20000]) + self.dice.randrange(5000)) for _ in range(length)
            )
        if self.dice.random() < 0.2:
            return f"name {self.dice.randrange(3000)}"
        return self.dice.choice(HOSTILE_TEXTS)

    def interval(self) -> str:
        """Draw an interval, often with huge parts that cancel each other."""
        if self.dice.random() < 0.4:
            days = self.dice.choice([1, 30, 366, 10_000, 100_000_000]) * self.dice.choice([1, -1])
            return (
                f"{days} days {-24 * days + self.dice.choice([1, 24, 1000, 8784])} hours {self.dice.randrange(10)} us"
            )
        return self.dice.choice(INTERVALS)

    def instant(self) -> str:
        """Draw an instant within or outside the allowed range."""
        if self.dice.random() < 0.3:
            return f"{self.dice.randrange(1969, 2202)}-{self.dice.randrange(1, 13):02}-{self.dice.randrange(1, 32):02} 00:00+00"
        return self.dice.choice(INSTANTS)

    def json(self) -> str:
        """Draw a payload, occasionally a large one."""
        if self.dice.random() < 0.015:
            size = self.dice.choice([100_000, 1_040_000, 1_048_576, 1_100_000])
            return self.dice.choice(
                [
                    json.dumps(["secret" + str(n) for n in range(size // 16)]),
                    json.dumps({"text": "x" * (size - 12)}),
                    "[" + ",".join(["{}"] * (size // 4)) + "]",
                    json.dumps({f"k{n}": n for n in range(size // 20)}),
                ]
            )
        return self.dice.choice(JSONS)

    def _value(self, column: str, kind: str) -> Value:
        if self.dice.random() < 0.08:
            return None
        if column == "handler" and self.dice.random() < 0.7:
            return self.dice.choices(HANDLERS, weights=WEIGHTS)[0]
        if column in ENUMS and self.dice.random() < 0.9:
            return self.dice.choice(ENUMS[column])
        if column == "unique_key" and self.dice.random() < 0.5:
            return f"key {self.dice.randrange(20)}"
        match kind:
            case "interval":
                return self.interval()
            case "timestamptz" | "timestamp with time zone":
                return self.instant()
            case "jsonb":
                return self.json()
            case "int2" | "int4" | "int8" | "smallint" | "integer" | "bigint":
                return self.dice.choice(INTEGERS)
            case "boolean":
                return self.dice.choice(["true", "false"])
            case _:
                return self.text()

    def _values(self, columns: Mapping[str, str], given: Mapping[str, Value]) -> dict[str, Value]:
        """Draw values for one or more columns in addition to those given."""
        count = self.dice.choice([1, 1, 1, 2, 3, len(columns)])
        drawn = self.dice.sample([*columns], count)
        return {**given, **{name: self._value(name, columns[name]) for name in drawn}}

    def _plain_job(self) -> Statement:
        return Statement("plain", "insert into rota.jobs (handler) values ('ok') returning job_id", (), (), True, True)

    def _job(self) -> Statement:
        handler = self.dice.choices(HANDLERS, weights=WEIGHTS)[0]
        values = self._values(JOB_COLUMNS, {"handler": handler})
        return _insert("jobs", values, JOB_COLUMNS, "returning job_id", returns_jobs=True)

    def _enqueue(self) -> Statement:
        handler = self.dice.choices(HANDLERS, weights=WEIGHTS)[0]
        values = self._values(ENQUEUE_ARGUMENTS, {"handler": handler})
        return _call("select job_id from rota.enqueue(%s)", values, ENQUEUE_ARGUMENTS, "enqueue", returns_jobs=True)

    def _timing(self) -> dict[str, Value]:
        name = f"fuzz {self._made}" if self.dice.random() < 0.8 else self.text()
        handler = self.dice.choice(["ok", "ok", "fails", "slow", "http.hook", "nobody's"])
        given: dict[str, Value] = {"name": name, "handler": handler}
        if self.dice.random() < 0.5:
            return given | {"cron": self.dice.choice(CRONS)}
        return given | {"every": self.dice.choice(["1 s", "2 s", "5 s", "1 min", "1 day", self.interval()])}

    def _schedule(self) -> Statement:
        return _insert("schedules", self._values(SCHEDULE_COLUMNS, self._timing()), SCHEDULE_COLUMNS, "returning name")

    def _put_schedule(self) -> Statement:
        given = self._timing()
        if self.schedules and self.dice.random() < 0.5:
            given["name"] = self.dice.choice(self.schedules)
        values = self._values(PUT_ARGUMENTS, given)
        values = {name: value for name, value in values.items() if name != "name" or value != CANARY}
        return _call("select rota.put_schedule(%s)", values, PUT_ARGUMENTS, "put_schedule")

    def _edit_schedule(self) -> Statement:
        columns = {name: kind for name, kind in SCHEDULE_COLUMNS.items() if name != "name"}
        values = self._values(columns, {})
        names = [*values]
        sets = ", ".join(f"{name} = ${at}::text::{columns[name]}" for at, name in enumerate(names, 1))
        sql = f"update rota.schedules set {sets} where name = ${len(names) + 1}::text"
        types = tuple(columns[name] for name in names)
        return Statement("update schedules", sql, (*values.values(), self._schedule_name()), (*types, "text"))

    def _remove_schedule(self) -> Statement:
        if not self.schedules:
            return self._schedule()
        name = self.schedules.pop(self.dice.randrange(len(self.schedules)))
        return Statement("delete schedules", "delete from rota.schedules where name = $1::text", (name,), ("text",))

    def _schedule_name(self) -> str:
        return self.dice.choice(self.schedules) if self.schedules and self.dice.random() < 0.9 else self.text()

    def _job_id(self) -> str:
        if self.jobs and self.dice.random() < 0.9:
            return str(self.dice.choice(self.jobs))
        return self.dice.choice(["0", "-1", "9223372036854775807", "-9223372036854775808", "1"])

    def _cancel(self) -> Statement:
        arguments = (self._job_id(), self.dice.choice([None, "true", "false"]), self.dice.choice([None, self.text()]))
        return Statement(
            "cancel",
            "select rota.cancel($1::text::int8, $2::text::boolean, $3::text)",
            arguments,
            ("int8", "boolean", "text"),
        )

    def _call(self) -> Statement:
        """Call a function with an argument for each parameter."""
        name, arguments = self.dice.choice(self.functions)
        values: dict[str, Value] = {
            argument: self._job_id() if argument == "job_id" else self._value(argument, kind)
            for argument, kind in arguments.items()
        }
        if values.get("name") == CANARY:
            values["name"] = "other"
        return _call(f"select rota.{name}(%s)", values, arguments, f"call {name}")

    def _crowd(self) -> Statement:
        """Insert jobs of many unserved queues and handlers."""
        start = self.dice.randrange(3000)
        what = self.dice.choice(["'ok', 'queue ' || n", "'unknown ' || n, 'default'", "'unknown ' || n, 'queue ' || n"])
        rows = f"generate_series({start}, {start + 300}) as n"
        sql = f"insert into rota.jobs (handler, queue) select {what} from {rows} returning job_id"
        return Statement("crowd", sql, returns_jobs=True, plain=True)

    def _read(self) -> Statement:
        view = self.dice.choice(["job_status", "schedules", "fire_history", "meta"])
        return Statement(
            f"select {view}", f"select count(seen::text) from (table rota.{view} limit 3000) as seen", plain=True
        )

    def _redrive(self) -> Statement:
        if self.dice.random() < 0.5:
            values: dict[str, Value] = {
                "handler": self.dice.choice([None, "fails", "ends", self.text()]),
                "limit": self.dice.choice(["1", "50", "0", "10001", None]),
                "spread": self.dice.choice([None, "1 s", self.interval()]),
                "include_at_most_once": self.dice.choice([None, "true"]),
                "note": self.text(),
            }
            types = {
                "handler": "text",
                "limit": "int4",
                "spread": "interval",
                "include_at_most_once": "boolean",
                "note": "text",
            }
            return _call("select * from rota.redrive_many(%s)", values, types, "redrive_many")
        values = {"job_id": self._job_id(), "payload": self.dice.choice([None, self.json()]), "note": self.text()}
        return _call(
            "select rota.redrive(%s)", values, {"job_id": "int8", "payload": "jsonb", "note": "text"}, "redrive"
        )

    def _reschedule(self) -> Statement:
        values = {"job_id": self._job_id(), "run_at": self.instant()}
        return _call("select rota.reschedule(%s)", values, {"job_id": "int8", "run_at": "timestamptz"}, "reschedule")

    def _operate_many(self) -> Statement:
        name = self.dice.choice(["cancel_many", "retry_now", "discard_many"])
        values: dict[str, Value] = {
            "handler": self.dice.choice([*HANDLERS[1:], self.text()]),
            "limit": self.dice.choice(["1", "20", "-1", "2147483647"]),
        }
        types = {"handler": "text", "limit": "int4"}
        if name != "retry_now":
            values["before"] = self.dice.choice([None, self.instant()])
            types["before"] = "timestamptz"
        return _call(f"select * from rota.{name}(%s)", values, types, name)

    def _operate_schedule(self) -> Statement:
        schedule = self._schedule_name()
        calls: tuple[tuple[str, dict[str, Value], dict[str, str]], ...] = (
            ("run_schedule_now", {"name": schedule}, {"name": "text"}),
            (
                "pause_schedule",
                {"name": schedule, "reason": self.text(), "resume_at": self.dice.choice([None, self.instant()])},
                {"name": "text", "reason": "text", "resume_at": "timestamptz"},
            ),
            ("resume_schedule", {"name": schedule}, {"name": "text"}),
            (
                "backfill_schedule",
                {"name": schedule, "instants": "{" + ",".join(f'"{self.instant()}"' for _ in range(3)) + "}"},
                {"name": "text", "instants": "timestamptz[]"},
            ),
        )
        name, values, types = self.dice.choice(calls)
        return _call(f"select rota.{name}(%s)", values, types, name)

    def _pause(self) -> Statement:
        name = self.dice.choice(["pause_queue", "resume_queue", "pause_handler", "resume_handler"])
        what = self.dice.choice([text for text in HOSTILE_TEXTS if text not in {"*", "default"}])
        values: dict[str, Value] = {"name": what}
        return _call(f"select rota.{name}(%s)", values, {"name": "text"}, name)


def _insert(
    table: str, values: Mapping[str, Value], types: Mapping[str, str], ending: str, *, returns_jobs: bool = False
) -> Statement:
    places = ", ".join(f"${at}::text::{types[name]}" for at, name in enumerate(values, 1))
    sql = f"insert into rota.{table} ({', '.join(values)}) values ({places}) {ending}"
    return Statement(table, sql, tuple(values.values()), tuple(types[name] for name in values), returns_jobs)


def _call(
    template: str, values: Mapping[str, Value], types: Mapping[str, str], kind: str, *, returns_jobs: bool = False
) -> Statement:
    places = ", ".join(f'"{name}" => ${at}::text::{types[name]}' for at, name in enumerate(values, 1))
    return Statement(
        kind, template % places, tuple(values.values()), tuple(types[name] for name in values), returns_jobs
    )
