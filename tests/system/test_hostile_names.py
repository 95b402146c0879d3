"""Another user's functions, operators, types and tables under every name that rota uses: none is ever called."""

from __future__ import annotations

import os
import re
from contextlib import nullcontext
from typing import TYPE_CHECKING

import asyncpg
import pytest

import rota
from command_line import Shell
from fleets import Fleet
from pgbouncer_server import find_pgbouncer, pgbouncer
from rota.db.migrate import migrate
from rota.db.sql import MIGRATIONS, ROLES, SQL

if TYPE_CHECKING:
    from pathlib import Path

    from asyncpg import Connection, Record

    from servers import Database, Server

WORDS_OF_OUR_SQL = sorted(
    set(re.findall(r"[a-z_][a-z0-9_]*", " ".join([*SQL.values(), *MIGRATIONS.values(), ROLES]).lower()))
)
"""Every word of rota's SQL. Those that name a function, type or table of pg_catalog get a hostile twin."""

CREATE_HOSTILE_OBJECTS = r"""
create schema hostile;
grant usage on schema hostile to public;
create sequence hostile.calls;
grant all on sequence hostile.calls to public;
do $plant$
declare
    each record;
    body constant text := $$ begin perform pg_catalog.nextval('hostile.calls'); raise exception 'hostile code was called'; end $$;
begin
    for each in
        select distinct proc.proname, pg_get_function_identity_arguments(proc.oid) as arguments,
            pg_get_function_result(proc.oid) as result
        from pg_proc as proc
        where proc.pronamespace = 'pg_catalog'::regnamespace
          and proc.proname = any (string_to_array(current_setting('hostile.words'), ' '))
        union all
        select word, arguments, 'text'
        from unnest(array['format', 'concat', 'concat_ws', 'array_prepend', 'array_append', 'array_to_string', 'left']) as word
        cross join unnest(array['text, text', 'text, text, text', 'text, text[]', 'text, integer', 'text, bigint']) as arguments
    loop
        begin
            execute format('create function hostile.%I(%s) returns %s language plpgsql as %L', each.proname,
                replace(each.arguments, 'ORDER BY', ','), each.result, body);
        exception when others then null;  -- an aggregate over "any", an internal type
        end;
    end loop;
    for each in
        select row_number() over () as number, oprname, oprleft::regtype as lefty, oprright::regtype as righty,
            oprresult::regtype as result
        from pg_operator
        where oprnamespace = 'pg_catalog'::regnamespace and oprleft <> 0
          and oprleft = any (
              '{int2,int4,int8,float8,numeric,text,name,bool,uuid,oid,interval,timestamptz,jsonb,anyarray}'::regtype[])
    loop
        begin
            execute format('create function hostile.operator_%s(%s, %s) returns %s language plpgsql as %L',
                each.number, each.lefty, each.righty, each.result, body);
            execute format('create operator hostile.%s (leftarg = %s, rightarg = %s, function = hostile.operator_%s)',
                each.oprname, each.lefty, each.righty, each.number);
        exception when others then null;
        end;
    end loop;
    for each in
        select typname as name, 'create domain hostile.%I as pg_catalog.xml' as statement from pg_type
        where typnamespace = 'pg_catalog'::regnamespace and typtype = 'b' and typelem = 0
          and typname = any (string_to_array(current_setting('hostile.words'), ' '))
        union all
        select relname, 'create table hostile.%I (mine text)' from pg_class
        where relnamespace = 'pg_catalog'::regnamespace and relkind in ('r', 'v')
          and relname = any (string_to_array(current_setting('hostile.words'), ' '))
    loop
        execute format(each.statement, each.name);
    end loop;
end $plant$;
"""

SELECT_IS_CALLED = "select is_called from hostile.calls"


async def _create_hostile_objects(root: Connection[Record], database: str) -> None:
    await root.execute("select set_config('hostile.words', $1, false)", " ".join(WORDS_OF_OUR_SQL))
    await root.execute(CREATE_HOSTILE_OBJECTS)
    functions = await root.fetchval("select count(*) from pg_proc where pronamespace = 'hostile'::regnamespace")
    operators = await root.fetchval("select count(*) from pg_operator where oprnamespace = 'hostile'::regnamespace")
    assert functions > 300
    assert operators > 200
    await root.execute(f"alter database {database} set search_path = hostile, pg_catalog, public")


@pytest.mark.parametrize("route", ["direct", "pooled"])
async def test_daemons_and_commands_run_no_code_of_other_users(database: Database, tmp_path: Path, route: str) -> None:
    """The search_path of the database begins with the hostile schema."""
    if route == "pooled" and find_pgbouncer() is None:
        pytest.skip("the package pgbouncer is not installed")
    async with Fleet(database.dsn, tmp_path) as fleet:
        await _create_hostile_objects(await fleet.connection(), database.name)
        with pgbouncer(database.dsn, tmp_path) if route == "pooled" else nullcontext(database.dsn) as dsn:
            daemon = fleet.daemons.start(dsn=dsn, WITNESS_DSN=f"{database.dsn}&options=-csearch_path%3Dpublic")
            done = await fleet.enqueue("noop")
            flaky = await fleet.enqueue(
                "flaky", {"fails": 1}, max_attempts=2, backoff_base="0.1 s", backoff_cap="0.2 s"
            )
            await fleet.execute("insert into rota.schedules (name, handler, every) values ('beat', 'noop', '1 second')")
            running = await fleet.enqueue("work", {"seconds": 600})
            await fleet.wait_for_state(done, "succeeded")
            await fleet.wait_for_state(flaky, "dead")
            rota_shell = Shell(tmp_path, {"DATABASE_URL": dsn, "ROTA_DIRECT_URL": database.dsn})
            commands = (
                ("migrate",),
                ("why", "beat"),
                ("job", "show", running),
                ("queue", "pause", "mail"),
                ("dead", "list"),
            )
            for command in (("check",), *(commands if route == "direct" else ())):
                result = await rota_shell(*command)
                assert result.code in {0, 1}, (command, result.err)
                assert "hostile" not in result.out + result.err, (command, result)
            assert (await rota_shell("job", "cancel", running)).code == 0
            await fleet.wait_for_state(running, "cancelled")
            assert daemon.events("service.failed") == []
            assert daemon.unexpected_output() == []
            assert daemon.stop() == 0

        assert await fleet.value(SELECT_IS_CALLED) is False


async def test_migrations_and_roles_run_no_code_of_other_users(server: Server) -> None:
    """They run as the owner or as a superuser, and such code would have those rights."""
    name = f"rota_hostile_{os.getpid()}"
    maintenance = await asyncpg.connect(server.dsn)
    try:
        await maintenance.execute(f"create database {name}")
        root = await asyncpg.connect(server.dsn_for(name))
        try:
            await _create_hostile_objects(root, name)
            prefix = f"rt{os.getpid()}_hostile"
            await migrate(server.dsn_for(name), role_prefix=prefix)
            assert await root.fetchval(SELECT_IS_CALLED) is False
        finally:
            await root.close()
    finally:
        await maintenance.execute(f"drop database {name} with (force)")
        for role in ("owner", "daemon", "operator", "client"):
            await maintenance.execute(f"drop role if exists rt{os.getpid()}_hostile_{role}")
        await maintenance.close()


async def test_statements_on_a_users_connection_run_no_code_of_other_users(database: Database) -> None:
    """They keep the user's search_path and name the schema of everything they use."""
    async with database.connect() as root:
        await _create_hostile_objects(root, database.name)
        async with database.connect() as user:
            job_id = (await rota.enqueue(user, "h", {"n": 1})).job_id
            await rota.enqueue_many(user, "h", [{"n": 2}, None])
            await rota.enqueue(user, "h", unique_key="k", on_conflict="replace")
            await user.execute("select rota.cancel($1)", job_id)
            await user.execute(
                "insert into rota.schedules (name, handler, cron) values ('s', 'h', '*/5 9 * * mon-fri')"
            )

        assert await root.fetchval(SELECT_IS_CALLED) is False


async def test_every_function_pins_its_search_path_or_names_each_schema(database: Database) -> None:
    """A body stored as text is parsed with the search_path of the calling session."""
    async with database.connect() as conn:
        unpinned = await conn.fetch(
            "select proname from pg_proc as proc where pronamespace = 'rota'::regnamespace and prosqlbody is null"
            " and not exists (select from unnest(proconfig) as setting where starts_with(setting, 'search_path='))"
        )
    assert {row[0] for row in unpinned} == {"fill_in_job", "is_duration", "keep_limited", "refuse_long_key"}
