"""Configuration: sources of values, validation, and masking of secrets."""

from __future__ import annotations

import inspect
import json
import tomllib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from asyncpg import connect_utils
from hypothesis import given
from hypothesis import strategies as st

from rota.config import Config, format_duration, load, mask_dsn, parse_duration
from rota.errors import ConfigError, NoDatabase

if TYPE_CHECKING:
    from pathlib import Path

CANARY = "S3CRET-canary"
URL = f"postgresql://shop:{CANARY}@db.example:5432/shop?sslmode=require&sslpassword={CANARY}"


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in an empty folder, so that no rota.toml of the machine is read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load_config(toml: str = "", overrides: dict[str, Any] | None = None, /, **environ: str) -> Config:
    return load(write_file(toml) if toml else None, overrides, environ)


def write_file(toml: str) -> Path:
    from pathlib import Path

    path = Path("given.toml")
    path.write_text(toml, encoding="utf-8")
    return path


def load_errors(toml: str = "", overrides: dict[str, Any] | None = None, /, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(toml, overrides, **environ)
    return str(caught.value).splitlines()


# Sources of values


def test_defaults_are_those_of_the_readme() -> None:
    """The lease is 30 s, history is kept for days, and HTTP listens on loopback only."""
    config = load_config()
    assert config.queues == {"default": 100, "*": 10}
    assert (config.lease.duration, config.lease.heartbeat) == (timedelta(seconds=30), None)
    assert (config.lease.reap_interval, config.poll_interval) == (timedelta(seconds=5), timedelta(seconds=1))
    assert (config.retention.job_runs, config.retention.dead_letters) == (timedelta(days=7), timedelta(days=90))
    assert config.http.host == "127.0.0.1"
    assert config.warnings == ()


def test_command_line_beats_environment_beats_file_beats_default() -> None:
    """Each value also carries its source."""
    config = load_config(
        "poll_interval = '2s'\n[lease]\nduration = '40s'\nreap_interval = '7s'\n[drain]\ntimeout = '40s'",
        {"lease.duration": "60s", "drain.grace": None},
        ROTA_LEASE="50s",
        ROTA_LEASE_REAP_INTERVAL="8s",
    )
    assert config.lease.duration == timedelta(seconds=60)
    assert config.lease.reap_interval == timedelta(seconds=8)
    assert config.drain.timeout == timedelta(seconds=40)
    assert [config.source(f"lease.{name}") for name in ("duration", "reap_interval", "heartbeat")] == [
        "the command line",
        "ROTA_LEASE_REAP_INTERVAL",
        "default",
    ]
    assert config.source("poll_interval") == "given.toml"


def test_the_file_is_read_from_the_given_path_or_the_current_folder(working_folder: Path) -> None:
    """--config beats ROTA_CONFIG, which beats ./rota.toml."""
    for name in ("rota", "environment", "flag"):
        (working_folder / f"{name}.toml").write_text(f"app = '{name}:app'")
    assert load(environ={}).app == "rota:app"
    assert load(environ={"ROTA_CONFIG": "environment.toml"}).app == "environment:app"
    assert load(working_folder / "flag.toml", environ={"ROTA_CONFIG": "environment.toml"}).app == "flag:app"


def test_an_unreadable_configuration_file_is_an_error() -> None:
    """A daemon that started on defaults after a typing error in a path would serve the wrong queues."""
    assert load_errors(ROTA_CONFIG="nowhere.toml") == [
        "nowhere.toml (from ROTA_CONFIG): can't be read (No such file or directory)"
    ]
    (line,) = load_errors("[lease\n")
    assert line.startswith("given.toml: is not valid TOML: ")
    assert "line 1" in line


@pytest.mark.parametrize(
    ("variable", "path"),
    [
        ("ROTA_APP", "app"),
        ("ROTA_POLL_INTERVAL", "poll_interval"),
        ("ROTA_QUEUES", "queues"),
        ("ROTA_LEASE", "lease.duration"),
        ("ROTA_LEASE_DURATION", "lease.duration"),
        ("ROTA_DRAIN_TIMEOUT", "drain.timeout"),
        ("ROTA_HTTP_HOST", "http.host"),
        ("ROTA_HTTP_PORT", "http.port"),
        ("ROTA_LOG_LEVEL", "log.level"),
        ("ROTA_LOG_FORMAT", "log.format"),
        ("ROTA_DATABASE_URL", "database.url"),
        ("DATABASE_URL", "database.url"),
        ("ROTA_DIRECT_URL", "database.direct_url"),
        ("ROTA_DATABASE_DIRECT_URL", "database.direct_url"),
        ("ROTA_DATABASE_POOL_SIZE", "database.pool_size"),
        ("ROTA_RETENTION_JOB_RUNS", "retention.job_runs"),
        ("ROTA_DEAD_LETTERS_HANDLER", "dead_letters.handler"),
    ],
)
def test_the_public_environment_variables_are_still_read(variable: str, path: str) -> None:
    """Deployments depend on these names."""
    values = {"queues": "mail:3", "log.level": "DEBUG", "log.format": "json", "http.port": "0", "app": "shop:app"}
    values |= {"database.url": URL, "database.direct_url": URL, "http.host": "::1", "dead_letters.handler": "alert"}
    config = load_config(
        **{variable: values.get(path, "10" if "pool" in path else "1h" if "retention" in path else "20s")}
    )
    assert config.source(path) == variable


def test_an_empty_variable_counts_as_unset() -> None:
    """Compose files pass on unset variables of the host as empty."""
    assert load_config(ROTA_LEASE="", ROTA_QUEUES=" ", ROTA_CONFIG="", DATABASE_URL="") == load_config()


def test_rota_database_url_beats_database_url() -> None:
    """Platforms set DATABASE_URL for the application, which may use another database."""
    assert load_config(DATABASE_URL="postgresql://a/a", ROTA_DATABASE_URL="postgresql://b/b").require_database() == (
        "postgresql://b/b"
    )


def test_a_setting_with_two_environment_variables_is_a_warning() -> None:
    """Otherwise one of the variables has no effect, without a message."""
    config = load_config(ROTA_LEASE="20s", ROTA_LEASE_DURATION="40s")
    assert config.lease.duration == timedelta(seconds=20)
    assert config.warnings == (("ROTA_LEASE_DURATION is ignored because ROTA_LEASE is set", "unset one of the two"),)


def test_a_list_of_queues_replaces_the_list_of_a_lower_source() -> None:
    """A node restricted to one queue must not also serve the queues of the file."""
    toml = '[queues]\ndefault = 5\n"*" = 1'
    assert load_config(toml).queues == {"default": 5, "*": 1}
    assert load_config(toml, ROTA_QUEUES="mail:10, a:b:0").queues == {"mail": 10, "a:b": 0}
    assert load_config(toml, {"queues": {"slow": 2}}, ROTA_QUEUES="mail:10").queues == {"slow": 2}


def test_the_configuration_object_can_not_be_changed() -> None:
    """`rota config` prints what holds for the life of the process."""
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.lease.duration = timedelta(seconds=1)
    with pytest.raises(TypeError):
        config.queues["mail"] = 1  # type: ignore[index]


# Validation


def test_all_errors_are_reported_together_with_value_source_and_remedy() -> None:
    assert load_errors(
        "[databse]\nurl = 'x'\n[drain]\ntimeout = true\n[http]\nprot = 1\n[log]\nlevel = 'loud'",
        {"app": "", "retention.fires": "5"},
        ROTA_LEASE="2s",
        ROTA_QUEUES="mail",
        DATABASE_URL="mysql://db/shop",
    ) == [
        "app = '' (from the command line): String should have at least 1 character",
        (
            "database.url = *** (from DATABASE_URL): write postgresql://user:password@host:5432/database?name=value, "
            "with @ : / ? # in a password as %40 and so on"
        ),
        "databse (from given.toml): no such setting; did you mean database?",
        "drain.timeout = True (from given.toml): write a duration such as 500ms, 30s, 5m, 1h or 7d",
        "http.prot (from given.toml): no such setting; did you mean http.port?",
        "lease.duration = '2s' (from ROTA_LEASE): choose 3s to 1d",
        "log.level = 'loud' (from given.toml): choose 'debug', 'info', 'warning' or 'error'",
        (
            "queues = 'mail' (from ROTA_QUEUES): write name:slots,name:slots (in the file, name = slots) "
            "with 0 to 10000 slots each"
        ),
        "retention.fires = '5' (from the command line): choose 1h to 36500d, or 0 for ever",
    ]


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("lease.duration", ["3s", "1d"], ["2.999s", "25h", "nan", "inf", "-5", "", "soon", "30 parsecs"]),
        ("lease.heartbeat", ["10s", 1], ["10.1s", "0"]),
        ("lease.wedged_after", ["10m"], ["1s"]),
        ("drain.timeout", [0, "1d"], ["-1s", "2d", [], float("nan"), float("inf"), 10**400]),
        ("poll_interval", ["50ms", "1m"], ["49ms", "61s"]),
        ("retention.job_runs", ["0", "1h", 604800], ["59m", "7"]),
        ("database.pool_size", [2, "100"], [1, "101", True, 5.0, "5.0", "", "٣"]),
        ("http.port", [0, 65535], [-1, 65536, "http", "tcp://10.0.0.1:80"]),
        ("queues", ["*:1", {"default": 10_000}], ["mail:", ":5", "mail:-1", "mail:10001", "a:1,a:2", {"": 1}, 5]),
        ("queues", ["a:0,b:1"], ["", " ", ",", " , ,", "default:0", "*:0", "a:0,b:0,*:0", {}, {"default": 0}]),
        ("queues", [{"mail": 1}], [{"mail": True}, {"mail": 1.5}, {"mail": None}, ["mail"]]),
    ],
)
def test_a_value_outside_the_bounds_of_its_setting_is_refused(path: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        assert load_config("", {path: value}).source(path) == "the command line"
    for value in bad:
        (line,) = load_errors("", {path: value})
        assert line.startswith(f"{path} = ")
        assert len(line) < 300


def test_the_heartbeat_must_be_at_most_a_third_of_the_effective_lease() -> None:
    """The file's heartbeat may fit the file's lease, but not the lease set in the environment."""
    toml = "[lease]\nduration = '30s'\nheartbeat = '10s'"
    assert load_config(toml).lease.heartbeat == timedelta(seconds=10)
    assert load_errors(toml, ROTA_LEASE="15s") == [
        "lease.heartbeat = '10s' (from given.toml): choose at most a third of lease.duration, which is 15s"
    ]


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors write one."""
    file = tmp_path / "rota.toml"
    file.write_text("[lease]\nduration = '42s'\n", encoding="utf-8-sig")
    assert load(file, {}, {"DATABASE_URL": URL}).lease.duration == timedelta(seconds=42)


@pytest.mark.parametrize(
    ("toml", "remedy"),
    [
        ("lease = 30", "is a section; write [lease] and its settings below"),
        ("pool_size = 30", "no such setting; did you mean database.pool_size?"),
        ("[database]\nduration = 1", "no such setting; did you mean lease.duration?"),
        ("[drain]\nwombat = 1", "no such setting; choose from timeout, grace"),
    ],
)
def test_an_unknown_key_in_the_file_is_an_error_with_a_suggestion(toml: str, remedy: str) -> None:
    """Otherwise a misspelt setting would be ignored."""
    (line,) = load_errors(toml)
    assert line.endswith(f"(from given.toml): {remedy}")


def test_a_variable_similar_to_a_setting_is_an_error() -> None:
    assert load_errors(ROTA_QUEUE="mail:1") == [
        "ROTA_QUEUE (from the environment): no such setting; did you mean ROTA_QUEUES?"
    ]


def test_an_unknown_variable_only_warns() -> None:
    """Another program may use the same prefix."""
    (warning,) = load_config(ROTA_WOMBAT="1").warnings
    assert warning.finding == "ROTA_WOMBAT is ignored because rota has no such setting"


@pytest.mark.parametrize("service", ["ROTA", "ROTA_HTTP", "ROTA_DATABASE", "ROTA_LEASE", "ROTA_LOG", "ROTA_QUEUE"])
def test_the_variables_of_a_kubernetes_service_are_ignored(service: str) -> None:
    """Kubernetes sets these in each pod of the namespace. The pod's owner can't unset them."""
    links = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "80",
        f"{service}_SERVICE_PORT_HTTP": "80",
        f"{service}_PORT": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP": "tcp://10.0.0.1:80",
        f"{service}_PORT_80_TCP_PROTO": "tcp",
        f"{service}_PORT_80_TCP_PORT": "80",
        f"{service}_PORT_80_TCP_ADDR": "10.0.0.1",
        f"{service}_PORT_53_UDP": "udp://[fd00::1]:53",
    }
    config = load_config(**links)
    assert (config.warnings, config.http.port) == ((), 9843)


def test_refused_values_are_shown_unless_they_may_be_secrets() -> None:
    assert load_errors("", {"http.port": "tcp://10.0.0.1:80"}) == [
        "http.port = 'tcp://10.0.0.1:80' (from the command line): choose a whole number from 0 to 65535"
    ]
    assert load_errors("", {"lease.duration": "password rotation"})[0].startswith(
        "lease.duration = 'password rotation'"
    )


# The database


def test_a_missing_database_url_is_an_error_only_for_commands_that_connect() -> None:
    """`rota config`, `rota cron` and `rota dev` work without one."""
    config = load_config()
    with pytest.raises(NoDatabase) as caught:
        config.require_database()
    assert caught.value.exit_code == 2
    for name in ("DATABASE_URL", "ROTA_DATABASE_URL", "--dsn", "rota.toml", "PGHOST", "rota dev"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("postgresql://,/shop", "before and after each comma"),
        ("postgresql://a,/shop", "before and after each comma"),
        ("postgresql://a,:5433/shop", "before and after each comma"),
        ("postgresql://a:0/shop", "1 to 65535"),
        ("postgresql://a:1,[::1]:65536/shop", "1 to 65535"),
        ("postgresql://a/shop?connect_timeout=-1", "whole number"),
        ("postgresql://a/shop?connect_timeout=nan", "whole number"),
        ("postgresql://a/shop?target_session_attrs=master", "read-write"),
    ],
)
def test_an_unusable_database_url_is_refused_at_start(url: str, remedy: str) -> None:
    """The driver reports these errors only when it connects, or reads an empty host as localhost."""
    (line,) = load_errors(DATABASE_URL=url)
    assert remedy in line


def test_a_command_handler_without_a_program_is_refused() -> None:
    (line,) = load_errors("[handlers.command.backup]\nargv = [' ']")
    assert "write the program first" in line


def test_the_listener_uses_its_own_url_when_one_is_configured() -> None:
    """LISTEN through PgBouncer delivers no notifications, without an error."""
    pooled, direct = "postgresql://pooler/shop", "postgresql://db/shop"
    assert load_config(DATABASE_URL=pooled).require_direct_database() == pooled
    assert load_config(DATABASE_URL=pooled, ROTA_DIRECT_URL=direct).require_direct_database() == direct
    assert load_config(DATABASE_URL=pooled, ROTA_DIRECT_URL=direct).require_database() == pooled


@pytest.mark.parametrize("variable", ["PGHOST", "PGDATABASE", "PGSERVICE"])
def test_libpq_variables_give_the_same_connection_as_in_libpq(
    variable: str, working_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rota works without a URL wherever psql does."""
    (working_folder / "services").write_text("[shop]\nhost=shop\ndbname=shop\n")
    libpq = {"PGUSER": "u", "PGSERVICEFILE": str(working_folder / "services"), "PGDATABASE": "shop", "PGHOST": "shop"}
    if variable == "PGSERVICE":
        libpq |= {"PGSERVICE": "shop", "PGHOST": "elsewhere", "PGDATABASE": "elsewhere"}
    for name in ("PGHOST", "PGDATABASE", "PGSERVICE", "PGPORT", "PGPASSWORD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in libpq.items():
        monkeypatch.setenv(name, value)
    dsn = load_config(**{variable: libpq[variable]}).require_database()
    parse = connect_utils._parse_connect_dsn_and_args  # type: ignore[attr-defined]
    unsaid = dict.fromkeys(inspect.signature(parse).parameters)
    addresses, parameters, *_ = parse(**unsaid | {"dsn": dsn})
    assert addresses == [("shop", 5432)]
    assert parameters.database == "shop"


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://",
        "postgres:///shop",
        "postgresql://db",
        "postgresql://shop:p%40ss@db:5432,standby:5433/shop?target_session_attrs=read-write",
        "postgresql://[::1]:5432/shop",
        "postgresql://shop@%2Frun%2Fpostgresql/shop",
        "postgresql:///shop?host=/run/postgresql&port=5433",
    ],
)
def test_every_form_of_url_that_the_driver_accepts_is_accepted(dsn: str) -> None:
    assert load_config(DATABASE_URL=dsn).require_database() == dsn


@pytest.mark.parametrize(
    ("query", "kept_query"),
    [
        ("?connect_timeout=5", ""),
        ("?sslmode=require&channel_binding=prefer", "?sslmode=require"),
        (
            "?keepalives=1&application_name=shop&keepalives_idle=30&options=-c%20x%3D1",
            "?application_name=shop&options=-c%20x%3D1",
        ),
        (
            "?gssencmode=disable&target_session_attrs=read-write&load_balance_hosts=random",
            "?target_session_attrs=read-write",
        ),
    ],
)
def test_url_parameters_that_only_libpq_knows_are_removed(query: str, kept_query: str) -> None:
    """Providers hand out such URLs. The driver would send the parameters to the server, which refuses them."""
    url = f"postgresql://shop:{CANARY}@db/shop"
    assert load_config(DATABASE_URL=url + query).require_database() == url + kept_query


@pytest.mark.parametrize("demand", ["channel_binding=require", "gssencmode=require", "require_auth=scram-sha-256"])
def test_security_parameters_that_the_driver_lacks_are_refused(demand: str) -> None:
    """Without them the connection would be less safe than requested."""
    with pytest.raises(
        ConfigError, match=rf"the driver does not support {demand.removesuffix('=scram-sha-256')}: .*verify-full"
    ) as caught:
        load_config(DATABASE_URL=f"postgresql://shop:{CANARY}@db/shop?sslmode=require&{demand}")
    assert CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "dsn",
    [
        f"host=db password={CANARY}",
        f"mysql://shop:{CANARY}@db/shop",
        f"postgresql+asyncpg://shop:{CANARY}@db/shop",
        f"postgresql://shop:{CANARY}@{CANARY}@db/shop",
        f"postgresql://shop:{CANARY}/x@db/shop",
        f"postgresql://shop:{CANARY}#x@db/shop",
        f"postgresql://shop:{CANARY}/shop",
        f"postgresql://shop:x@db/shop?{CANARY}",
        f"postgresql://shop:x@db/shop?sslpassword={CANARY}&oops",
    ],
)
def test_the_error_for_a_broken_url_does_not_show_the_password(dsn: str) -> None:
    """An unescaped password is what breaks most URLs."""
    for variable in ("DATABASE_URL", "ROTA_DIRECT_URL", "ROTA_HTTP_PORT", "ROTA_QUEUES", "ROTA_LEASE"):
        with pytest.raises(ConfigError) as caught:
            load_config(**{variable: dsn})
        assert variable in str(caught.value)
        if variable in {"DATABASE_URL", "ROTA_DIRECT_URL"} or "://" in dsn:
            assert CANARY not in str(caught.value)
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)


def test_the_database_url_may_be_read_from_a_secret_file(working_folder: Path) -> None:
    """systemd and containers provide secrets as files.

    Variables are visible to everyone who can inspect the unit or container.
    """
    (working_folder / "url").write_text(f"{URL}\n")
    (working_folder / "bad").write_text(f"mysql://shop:{CANARY}@db/shop")
    named = load_config(
        ROTA_DATABASE_URL_FILE=str(working_folder / "url"), ROTA_DIRECT_URL_FILE=str(working_folder / "url")
    )
    assert named.require_database() == named.require_direct_database() == URL
    assert (named.source("database.url"), named.warnings) == ("ROTA_DATABASE_URL_FILE", ())
    assert (
        load_config(DATABASE_URL="postgresql://a/a", DATABASE_URL_FILE="nowhere").require_database()
        == "postgresql://a/a"
    )
    from_file = load_config(DATABASE_URL="postgresql://a/a", ROTA_DATABASE_URL_FILE=str(working_folder / "url"))
    assert from_file.source("database.url") == "ROTA_DATABASE_URL_FILE"
    config = load_config(ROTA_DATABASE_URL="postgresql://a/a", ROTA_DATABASE_URL_FILE="nowhere")
    assert config.warnings[0].finding == "ROTA_DATABASE_URL_FILE is ignored because ROTA_DATABASE_URL is set"
    with pytest.raises(ConfigError, match=r"ROTA_DATABASE_URL_FILE .*: can't be read"):
        load_config(ROTA_DATABASE_URL_FILE=str(working_folder / "nowhere"))
    with pytest.raises(ConfigError, match="from ROTA_DIRECT_URL_FILE") as caught:
        load_config(ROTA_DIRECT_URL_FILE=str(working_folder / "bad"))
    assert CANARY not in str(caught.value)


def test_no_text_form_of_the_configuration_contains_the_password() -> None:
    """Covers str, repr, the printed file and tracebacks."""
    config = load_config(DATABASE_URL=URL, ROTA_DIRECT_URL=URL)
    for text in (repr(config), str(config), str(config.masked()), config.rendered(), config.model_dump_json()):
        assert CANARY not in text
    masked = "postgresql://shop:***@db.example:5432/shop?sslmode=require&sslpassword=***"
    assert config.masked()["database"] == {
        "url": masked,
        "direct_url": masked,
        "pool_size": 5,
        "handler_pool_size": 10,
    }
    assert config.require_database() == URL


def test_masking_does_not_change_a_url_without_secrets() -> None:
    dsn = "postgresql://shop@a:1,[::1]:2/shop?sslmode=require"
    assert mask_dsn(dsn) == dsn


# Printed configuration


def test_the_printed_configuration_shows_sources_and_can_be_read_back() -> None:
    """Users run `rota config > rota.toml` to start a configuration."""
    config = load_config(
        '[queues]\n"a \\"b" = 3\n[retention]\nfires = 0\n[lease]\nduration = 90', ROTA_POLL_INTERVAL="250ms"
    )
    rendered = config.rendered()
    again = load_config(rendered)
    assert {line.split("#")[-1].strip() for line in rendered.splitlines() if "=" in line} == {
        "default",
        "given.toml",
        "ROTA_POLL_INTERVAL",
    }
    assert again.masked() == config.masked()
    assert tomllib.loads(rendered)["lease"]["duration"] == "90s"
    assert json.loads(json.dumps(config.masked()))["retention"]["fires"] == 0


def test_each_setting_of_a_configured_handler_is_printed_with_its_source() -> None:
    """Settings absent from the handler's table are defaults, at every depth."""
    config = load_config('[handlers.http.endpoints.shop]\nurl = "https://shop.example/"\nheaders = { "X" = "1" }')
    shop = config.rendered().partition("[handlers.http.endpoints.shop]")[2].splitlines()
    sources = {line.split(" = ")[0]: line.split("#")[-1].strip() for line in shop if " = " in line}
    assert (sources["url"], sources["headers"], sources["method"]) == ("given.toml", "given.toml", "default")


def test_a_retention_of_forever_is_none_and_not_zero() -> None:
    """A pruner that read 0 as an age would delete all history."""
    assert load_config(ROTA_RETENTION_ATTEMPTS="0").retention.attempts is None


@pytest.mark.parametrize(
    ("stop_timeout", "warns"), [("20s", True), ("34", True), ("1min", False), ("1m 30s", False), ("infinity", False)]
)
def test_a_drain_longer_than_a_known_stop_timeout_warns(stop_timeout: str, *, warns: bool) -> None:
    """A supervisor that kills the daemon during the drain causes lost leases at each deployment."""
    warnings = load_config(ROTA_STOP_TIMEOUT=stop_timeout).warnings
    assert len(warnings) == warns
    if warns:
        assert "drain.timeout (30s)" in warnings[0].finding
        assert f"ROTA_STOP_TIMEOUT ({stop_timeout})" in warnings[0].finding
        assert "35s" in warnings[0].do


# Durations


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("30s", timedelta(seconds=30)),
        (" 1.5 h ", timedelta(minutes=90)),
        ("1h30m", timedelta(minutes=90)),
        ("7d", timedelta(days=7)),
        ("30", timedelta(seconds=30)),
        (30, timedelta(seconds=30)),
        (0.25, timedelta(milliseconds=250)),
    ],
)
def test_a_duration_without_a_unit_is_in_seconds(text: object, duration: timedelta) -> None:
    """ROTA_LEASE=30 and ROTA_LEASE=30s are the same lease."""
    assert parse_duration(text) == duration


@given(st.integers(min_value=0, max_value=10**12))
def test_a_printed_duration_reads_back_as_the_same_value(milliseconds: int) -> None:
    duration = timedelta(milliseconds=milliseconds)
    assert parse_duration(format_duration(duration)) == duration


HANDLERS = """
[handlers.http]
any_url = true
[handlers.http.endpoints.shop]
url = "https://shop.example/hook"
secret = "whsec_S3CRETS3CRETS3CRETS3CRET"
headers = { Authorization = "Bearer S3CRET" }
timeout = "5s"
[handlers.command.backup]
argv = ["pg_dump", "-Fc"]
permanent = [3]
[handlers.sql.refresh]
statement = "select refresh()"
url = "postgresql://low:S3CRET@db/app"
"""


def test_configured_handlers_are_read_and_their_secrets_masked(tmp_path: Path) -> None:
    """Users paste printed configurations into tickets."""
    file = tmp_path / "rota.toml"
    file.write_text(HANDLERS, encoding="utf-8")
    config = load(file, environ={})
    assert config.handlers.http is not None
    endpoint = config.handlers.http.endpoints["shop"]
    assert endpoint.timeout == timedelta(seconds=5)
    assert config.handlers.command is not None
    assert config.handlers.command["backup"].permanent == {3}
    text = config.rendered() + json.dumps(config.masked()) + repr(config)
    assert "S3CRET" not in text
    assert "https://shop.example/hook" in text
    assert "postgresql://low:***@db/app" in text


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[handlers.http.endpoints.x]\nurl = 'ftp://S3CRET'", "handlers.http.endpoints.x.url"),
        ("[handlers.http.endpoints.x]\nurl = 'https://x'\nsecret = 'S3CRET'", "whsec_"),
        ("[handlers.http.endpoints.x]\nurl = 'https://u:S3CRET@x'", "handlers.http.endpoints.x.url"),
        ("[handlers.command.x]\nargv = []", "handlers.command.x.argv"),
        ("[handlers.command.x]\nargv = ['a']\nshell = true", "handlers.command.x.shell"),
        ("[handlers.sql.x]\nstatement = 'select 1'", "handlers.sql.x.url"),
        ("[handlers.htpp]\nx = 1", "did you mean handlers.http"),
    ],
)
def test_the_error_for_a_configured_handler_shows_the_path_and_no_value(
    toml: str, message: str, tmp_path: Path
) -> None:
    """The value is often a secret."""
    file = tmp_path / "rota.toml"
    file.write_text(toml, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        load(file, environ={})
    assert message in str(refused.value)
    assert "S3CRET" not in str(refused.value)
