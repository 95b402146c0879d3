"""Enqueue from a web application: the order and its job commit together, or neither does.

With SQLAlchemy here; the same works with asyncpg, psycopg and Django.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

import rota

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

metadata = sa.MetaData()
orders = sa.Table("shop_orders", metadata, sa.Column("id", sa.BigInteger, primary_key=True), sa.Column("item", sa.Text))


async def place_order(engine: AsyncEngine, item: str) -> int:
    """Store an order, and enqueue the job that sends its receipt. Returns the order's id."""
    async with engine.begin() as conn:
        order = (await conn.execute(sa.insert(orders).values(item=item).returning(orders.c.id))).scalar_one()
        await rota.enqueue(conn, "send_receipt", {"order": order}, unique_key=f"order:{order}")
    return int(order)
