"""The app that the daemons of `rota bench growth` run: BENCH_HANDLERS handlers that do nothing."""

from __future__ import annotations

import os
from typing import Any

from rota.app import App
from rota.handlers.job import Job  # noqa: TC001  the codec reads the annotations at run time

HANDLERS_VARIABLE = "BENCH_HANDLERS"

app = App("bench")


async def noop(job: Job[Any]) -> None:
    """Do nothing, so that only rota's own cost is measured."""


def handler_name(number: int) -> str:
    """Return the name of the handler with this number, counted from 0."""
    return f"bench.growth.{number}"


for _number in range(int(os.environ.get(HANDLERS_VARIABLE, "1"))):
    app.handler(handler_name(_number))(noop)
