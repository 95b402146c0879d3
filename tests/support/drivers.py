"""Open a connection of every supported driver in a transaction, which the test ends."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import asyncpg
import django
import psycopg
import sqlalchemy
from django.conf import settings
from django.db import connection, connections, transaction
from django.db.utils import ConnectionHandler
from psycopg.rows import dict_row
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sqlalchemy_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


def _url(dsn: str, dialect: str) -> sqlalchemy.URL:
    return sqlalchemy.make_url(dsn).set(drivername=f"postgresql+{dialect}")


@asynccontextmanager
async def with_asyncpg(dsn: str) -> AsyncIterator[Any]:
    """An asyncpg connection in a transaction."""
    conn = await asyncpg.connect(dsn)
    try:
        async with conn.transaction():
            yield conn
    finally:
        await conn.close()


@asynccontextmanager
async def with_asyncpg_pool(dsn: str) -> AsyncIterator[Any]:
    """A connection of an asyncpg pool in a transaction."""
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire() as conn, conn.transaction():
        yield conn


@asynccontextmanager
async def with_psycopg(dsn: str) -> AsyncIterator[Any]:
    """A psycopg AsyncConnection with dict rows. Its transaction opens implicitly."""
    async with await psycopg.AsyncConnection.connect(dsn, row_factory=dict_row) as conn:
        yield conn


@asynccontextmanager
async def _engine(dsn: str, dialect: str) -> AsyncIterator[sqlalchemy_async.AsyncEngine]:
    engine = sqlalchemy_async.create_async_engine(_url(dsn, dialect))
    try:
        yield engine
    finally:
        await engine.dispose()


@asynccontextmanager
async def with_sqlalchemy(dsn: str, dialect: str = "asyncpg") -> AsyncIterator[Any]:
    """An SQLAlchemy AsyncConnection in a transaction."""
    async with _engine(dsn, dialect) as engine, engine.begin() as conn:
        yield conn


@asynccontextmanager
async def with_sqlalchemy_psycopg(dsn: str) -> AsyncIterator[Any]:
    """The same over psycopg."""
    async with with_sqlalchemy(dsn, "psycopg") as conn:
        yield conn


@asynccontextmanager
async def with_sqlalchemy_session(dsn: str) -> AsyncIterator[Any]:
    """An SQLAlchemy AsyncSession in a transaction."""
    async with _engine(dsn, "asyncpg") as engine:
        maker = sqlalchemy_async.async_sessionmaker(engine)
        async with maker.begin() as session:
            yield session


ASYNC: dict[str, Callable[[str], Any]] = {
    "asyncpg": with_asyncpg,
    "asyncpg-pool": with_asyncpg_pool,
    "psycopg": with_psycopg,
    "sqlalchemy": with_sqlalchemy,
    "sqlalchemy-psycopg": with_sqlalchemy_psycopg,
    "sqlalchemy-session": with_sqlalchemy_session,
}


@contextmanager
def with_psycopg_sync(dsn: str) -> Iterator[Any]:
    """A psycopg Connection."""
    with psycopg.connect(dsn, row_factory=dict_row) as conn:
        yield conn


@contextmanager
def with_sqlalchemy_sync(dsn: str, dialect: str = "psycopg") -> Iterator[Any]:
    """An SQLAlchemy Connection in a transaction."""
    engine = sqlalchemy.create_engine(_url(dsn, dialect))
    try:
        with engine.begin() as conn:
            yield conn
    finally:
        engine.dispose()


@contextmanager
def with_sqlalchemy_psycopg2(dsn: str) -> Iterator[Any]:
    """The same over psycopg2."""
    with with_sqlalchemy_sync(dsn, "psycopg2") as conn:
        yield conn


@contextmanager
def with_sqlalchemy_session_sync(dsn: str) -> Iterator[Any]:
    """An SQLAlchemy Session in a transaction."""
    engine = sqlalchemy.create_engine(_url(dsn, "psycopg"))
    try:
        with orm.Session(engine) as session, session.begin():
            yield session
    finally:
        engine.dispose()


@contextmanager
def with_scoped_session(dsn: str) -> Iterator[Any]:
    """A scoped session, as Flask-SQLAlchemy provides."""
    engine = sqlalchemy.create_engine(_url(dsn, "psycopg"))
    session = orm.scoped_session(orm.sessionmaker(engine))
    try:
        with session.begin():
            yield session
    finally:
        session.remove()
        engine.dispose()


@contextmanager
def with_django(dsn: str) -> Iterator[Any]:
    """Django's connection in an atomic block."""
    os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"  # allow it although the test runs in an event loop
    if not settings.configured:
        settings.configure(DATABASES={}, USE_TZ=True)
        django.setup()
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query))
    login = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts.path[1:],
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or query.get("host", "")),
        "PORT": str(parts.port or query.get("port", "")),
    }
    connections["default"] = ConnectionHandler({"default": login})["default"]
    try:
        with transaction.atomic():
            yield connection
    finally:
        connection.close()
        del connections["default"]


SYNC: dict[str, Callable[[str], Any]] = {
    "psycopg": with_psycopg_sync,
    "sqlalchemy": with_sqlalchemy_sync,
    "sqlalchemy-psycopg2": with_sqlalchemy_psycopg2,
    "sqlalchemy-session": with_sqlalchemy_session_sync,
    "sqlalchemy-scoped": with_scoped_session,
    "django": with_django,
}
