"""Which locks the members of each role can take: docs/locks.md lists them, and this compares it with the running server."""

from __future__ import annotations

import asyncio
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from role_logins import RoleDatabase, module_role_database
from rota.db.blockers import find_blockers
from waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncpg import Connection, Record

    from servers import Server

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "locks.md"

LOGINS = ("app", "op", "node")
"""Members of rota_client, rota_operator and rota_daemon, in the order of the document's columns."""

MODES = (
    "ACCESS EXCLUSIVE",
    "EXCLUSIVE",
    "SHARE ROW EXCLUSIVE",
    "SHARE",
    "SHARE UPDATE EXCLUSIVE",
    "ROW EXCLUSIVE",
    "ROW SHARE",
    "ACCESS SHARE",
)

RELATIONS = """
select relname from pg_class
where relnamespace = 'rota'::regnamespace and relkind in ('r', 'p', 'v') and not relispartition
order by 1
"""


@pytest.fixture(scope="module")
def place(server: Server) -> Iterator[RoleDatabase]:
    """The schema with its roles."""
    with module_role_database(server, "locks") as made:
        yield made


async def _may(conn: Connection[Record], statement: str) -> bool:
    transaction = conn.transaction()
    await transaction.start()
    try:
        await conn.execute(statement)
    except asyncpg.InsufficientPrivilegeError:
        return False
    else:
        return True
    finally:
        await transaction.rollback()


async def _strongest_lock(conn: Connection[Record], relation: str) -> str:
    for mode in MODES:
        if await _may(conn, f"lock table rota.{relation} in {mode} mode nowait"):
            return mode
    return ""


async def test_b3_the_document_lists_the_table_locks_of_each_role(place: RoleDatabase) -> None:
    """A lock on a view reaches the tables beneath it with the rights of the view's owner, so that each relation is tried."""
    text = DOCUMENT.read_text("utf-8").split("## Row locks")[0]
    documented = {
        row[1]: tuple(cell.strip() for cell in row[2].split("|"))
        for row in re.finditer(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE)
    }
    real: dict[str, tuple[str, ...]] = {}
    async with (
        place.connect() as root,
        place.connect("app") as app,
        place.connect("op") as op,
        place.connect("node") as node,
    ):
        for (relation,) in await root.fetch(RELATIONS):
            real[relation] = tuple([await _strongest_lock(conn, relation) for conn in (app, op, node)])
    assert documented == {relation: modes for relation, modes in real.items() if any(modes)}


@pytest.mark.parametrize("login", ["app", "op"])
async def test_b3_clients_and_operators_lock_rows_of_schedules_and_limits_only(place: RoleDatabase, login: str) -> None:
    """FOR UPDATE, and the weaker row locks, need UPDATE on a column at least."""
    async with place.connect() as root, place.connect(login) as conn:
        for (relation,) in await root.fetch(RELATIONS):
            for mode in ("update", "no key update", "share", "key share"):
                may = await _may(conn, f"select 1 from rota.{relation} for {mode}")
                assert may == (relation == "schedules" or (login, relation) == ("op", "limits")), (relation, mode)


async def test_b3_a_login_without_a_role_locks_nothing(place: RoleDatabase) -> None:
    """Not even the schema is visible to it."""
    async with place.connect() as root, place.connect("app") as stranger:
        relations = [row[0] for row in await root.fetch(RELATIONS)]
        await root.execute(f"revoke {place.prefix}_client from {place.prefix}_app")
        try:
            for relation in relations:
                assert await _strongest_lock(stranger, relation) == ""
        finally:
            await root.execute(f"grant {place.prefix}_client to {place.prefix}_app")


@pytest.mark.parametrize(("login", "believed"), [("app", False), ("node", True)])
async def test_only_a_daemons_login_can_make_its_blocker_a_finding(
    place: RoleDatabase, login: str, believed: bool
) -> None:
    """Any login may name its session as daemons do and wait for a lock of its choice."""
    async with place.connect() as holder, place.connect(login) as waiter, place.connect("op") as reader:
        await holder.execute("select pg_advisory_lock(4242)")
        await waiter.execute("set application_name = 'rota 01234567'")
        waiting = asyncio.create_task(waiter.execute("select pg_advisory_xact_lock(4242)"))
        blocked = "select exists (select from pg_locks where pid = $1 and not granted and waitstart is not null)"
        await eventually(lambda: reader.fetchval(blocked, waiter.get_server_pid()))
        found = await find_blockers(reader, pid=None, at_least=timedelta(0))
        assert [blocker.pid for blocker in found] == ([holder.get_server_pid()] if believed else [])
        await holder.execute("select pg_advisory_unlock(4242)")
        await waiting
