"""Execute prepared queries and read their plans and page counts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from daemon_queries import sql_literal
from rota.db.sql import SQL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncpg import Connection, Record


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of an executed query."""

    root: dict[str, Any]

    def nodes(self) -> Iterator[dict[str, Any]]:
        """Yield every node, from the top."""
        yield from _below(self.root)

    @property
    def buffers(self) -> int:
        """Return the number of pages that were read, in memory or not."""
        return int(self.root["Shared Hit Blocks"]) + int(self.root["Shared Read Blocks"])

    @property
    def indexes(self) -> set[str]:
        """Return the names of the indexes that were used."""
        return {node["Index Name"] for node in self.nodes() if "Index Name" in node}

    @property
    def sequentially_scanned(self) -> set[str]:
        """Return the tables that were scanned sequentially and had pages to read."""
        scans = [node for node in self.nodes() if node["Node Type"] == "Seq Scan"]
        return {scan["Relation Name"] for scan in scans if scan["Shared Hit Blocks"] + scan["Shared Read Blocks"]}

    @property
    def sorted_tables(self) -> set[str]:
        """Return the tables whose rows were sorted."""
        sorts = [node for node in self.nodes() if "Sort" in node["Node Type"]]
        return {node["Relation Name"] for sort in sorts for node in _below(sort) if "Relation Name" in node}

    @property
    def most_rows_sorted(self) -> int:
        """Return the largest number of rows in a single sort."""
        sorts = [node for node in self.nodes() if node["Node Type"] == "Sort"]
        return max((int(below["Actual Rows"]) for sort in sorts for below in sort["Plans"][-1:]), default=0)

    @property
    def most_rows_filtered(self) -> int:
        """Return the largest number of rows that a single node read and discarded."""
        return max((_discarded_rows(node) for node in self.nodes()), default=0)


def _below(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _below(child)


def _discarded_rows(node: dict[str, Any]) -> int:
    names = ("Rows Removed by Filter", "Rows Removed by Join Filter", "Rows Removed by Index Recheck")
    return int(max(node.get(name, 0) for name in names) * node.get("Actual Loops", 1))


async def prepare(conn: Connection[Record], name: str) -> None:
    """PREPARE the query under its own name, as a daemon's connection does."""
    await conn.execute(f"prepare {name} as {SQL[name]}")


async def explain(conn: Connection[Record], name: str, *arguments: Any) -> Plan:
    """Execute the prepared query in a transaction that is rolled back, and return its plan."""
    given = f"({', '.join(sql_literal(argument) for argument in arguments)})" if arguments else ""
    transaction = conn.transaction()
    await transaction.start()
    try:
        text = await conn.fetchval(f"explain (analyze, buffers, timing off, format json) execute {name}{given}")
    finally:
        await transaction.rollback()
    return Plan(json.loads(text)[0]["Plan"])
