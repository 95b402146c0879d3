"""Print a pin for everything that is installed beside rota, as deploy/constraints.txt holds them."""

from __future__ import annotations

from importlib.metadata import distributions

INSTALLERS = {"pip", "rota", "setuptools", "uv", "wheel"}


def pins() -> list[str]:
    """`name==version` lines, by name; no addresses, so that every index serves them."""
    found = {(each.metadata["Name"], each.version) for each in distributions()}
    return sorted((f"{name}=={version}" for name, version in found if name.lower() not in INSTALLERS), key=str.lower)


if __name__ == "__main__":
    print(*pins(), sep="\n")  # noqa: T201 - this is what it is for
