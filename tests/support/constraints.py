"""Print a version pin for each installed dependency of rota, in the format of deploy/constraints.txt."""

from __future__ import annotations

from importlib.metadata import distributions

INSTALLERS = {"pip", "rota", "setuptools", "uv", "wheel"}


def pins() -> list[str]:
    """Return `name==version` lines sorted by name, without index addresses."""
    found = {(each.metadata["Name"], each.version) for each in distributions()}
    return sorted((f"{name}=={version}" for name, version in found if name.lower() not in INSTALLERS), key=str.lower)


if __name__ == "__main__":
    print(*pins(), sep="\n")  # noqa: T201 - this is what it is for
