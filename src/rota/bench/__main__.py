"""`python -m rota.bench`: the same as `rota bench`."""

from __future__ import annotations

import sys

from rota.bench.commands import bench_app
from rota.errors import RotaError

if __name__ == "__main__":
    try:
        bench_app()
    except RotaError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
