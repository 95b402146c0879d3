"""Rules that no linter knows: import directions, task ownership, SQL access, broad excepts, and tests without sleeps."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rota

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(rota.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"

LONG_NAME_WORDS = 6
"""A test's name of at least this many words after `test` needs no docstring."""


def _parse_files(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text("utf-8"))


def _find_nodes(folder: Path, node_types: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    for name, tree in _parse_files(folder):
        for node in ast.walk(tree):
            if isinstance(node, node_types):
                yield name, node


def _location(name: str, node: ast.AST) -> str:
    return f"{name}:{getattr(node, 'lineno', 0)}"


def test_no_layer_imports_a_layer_above_it() -> None:
    """The layers are domain, db, handlers, lifecycle, services, daemon and cli."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("leaf", ["errors", "cron", "domain/payload", "runtime/clock"])
def test_leaf_modules_import_only_other_leaf_modules(leaf: str) -> None:
    """Every module may import them. Imports under TYPE_CHECKING do not count."""
    module = PACKAGE / f"{leaf}.py"
    trees = [
        ast.parse(path.read_text("utf-8")) for path in ([module] if module.exists() else (PACKAGE / leaf).glob("*.py"))
    ]
    assert trees
    imported = {
        node.module
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rota")
    }
    assert {name for name in imported if not name.startswith(f"rota.{leaf.replace('/', '.')}.")} <= {
        "rota.errors",
        "rota.runtime.clock",
    }


UNGROUPED_TASK_FUNCTIONS = {"create_task", "gather", "ensure_future", "wait", "as_completed"}


def test_every_task_belongs_to_a_task_group() -> None:
    """A task that is never awaited hides its errors; gather and wait leave siblings running."""
    violations = []
    for name, tree in _parse_files(PACKAGE):
        groups = _task_group_names(tree)
        for node in ast.walk(tree):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in UNGROUPED_TASK_FUNCTIONS
            ):
                continue
            receiver = node.func.value
            owner = receiver.id if isinstance(receiver, ast.Name) else ""
            if owner == "asyncio" or (node.func.attr in {"create_task", "ensure_future"} and owner not in groups):
                violations.append(_location(name, node))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                violations += [_location(name, node) for alias in node.names if alias.name in UNGROUPED_TASK_FUNCTIONS]
    assert not violations


def _task_group_names(tree: ast.Module) -> set[str]:
    """Return the names of task groups: targets of `async with asyncio.TaskGroup()`, and annotated parameters."""
    groups = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                if ast.unparse(item.context_expr) == "asyncio.TaskGroup()" and isinstance(item.optional_vars, ast.Name):
                    groups.add(item.optional_vars.id)
        elif isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "asyncio.TaskGroup":
            groups.add(node.arg)
    return groups


def test_only_the_database_layer_imports_the_sql_files() -> None:
    """The files under sql/ are used through typed functions, whose contracts are tested."""
    outside = [
        _location(name, node)
        for name, node in _find_nodes(PACKAGE, (ast.ImportFrom, ast.Import))
        if not name.startswith("db/")
        and (
            (isinstance(node, ast.ImportFrom) and node.module == "rota.db.sql")
            or any(alias.name == "rota.db.sql" for alias in node.names)  # type: ignore[attr-defined]
            or (
                isinstance(node, ast.ImportFrom)
                and node.module == "rota.db"
                and any(a.name == "sql" for a in node.names)
            )
        )
    ]
    assert not outside


def test_only_run_forever_contains_an_endless_loop() -> None:
    """It handles errors, backoff and stopping in one place. A loop with a deadline does not count."""
    allowed = {
        "supervision/loop.py": "run_forever itself",
        "embedded/": "waits for the lock of a data folder with a deadline",
        "bench/": "foreground commands that run until they have measured",
        "commands/": "foreground commands that run until Ctrl-C",
    }
    forever = [
        _location(name, node)
        for name, node in _find_nodes(PACKAGE, ast.While)
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value
        if not name.startswith(tuple(allowed))
    ]
    assert not forever


# Files that may catch every exception without raising again, with the reason. Elsewhere this would hide bugs.
ALLOWED_BROAD_EXCEPTS = {
    "lifecycle/executor.py": "the call of the handler",
    "handlers/__init__.py": "a handler's own backoff function, whose failure must not change the outcome",
    "child.py": "the call of a handler that runs in a process",
    "handlers/python.py": "passes the error of that process to the waiting call",
    "supervision/supervisor.py": "a crashed loop, which is logged, counted and restarted",
    "daemon/main_loop.py": "an error that ended the event loop while jobs run",
    "daemon/daemon.py": "an error of the drain, which counts as the next stop request",
    "lifecycle/call_outcome.py": "an exception of the handler whose attributes raise",
    "lifecycle/settle.py": "one outcome that cannot be written beside others that can",
    "lifecycle/scheduler.py": "planning of one schedule, which is stopped with the error as its reason",
    "handlers/failure.py": "an exception whose own __str__ raises",
    "domain/payload.py": "a result of objects that raise when they are inspected",
    "client/many.py": "an error during a COPY, which is raised after the COPY has ended",
}


def test_only_the_listed_files_have_a_broad_except_that_does_not_raise() -> None:
    """Each listed file still needs it."""
    found = set()
    for name, node in _find_nodes(PACKAGE, ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)
        if broad and not isinstance(node.body[-1], ast.Raise):
            found.add(name)
    assert found == set(ALLOWED_BROAD_EXCEPTS)


def test_no_test_calls_sleep() -> None:
    """A sleep is too long on a fast machine and too short on a slow one."""
    sleeps = []
    for name, tree in _parse_files(TESTS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "asyncio.sleep", "sleep"}:
                is_zero_sleep = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
                # The programs in support/peers/ run other systems and do not use waiting.py.
                if not name.startswith(("support/waiting.py", "support/peers/")) and not is_zero_sleep:
                    sleeps.append(_location(name, node))
    assert not sleeps


def test_every_test_has_a_long_name_or_a_docstring() -> None:
    silent = [
        _location(name, node)
        for name, node in _find_nodes(TESTS, (ast.FunctionDef, ast.AsyncFunctionDef))
        if node.name.startswith("test_")  # type: ignore[attr-defined]
        and node.name.count("_") < LONG_NAME_WORDS  # type: ignore[attr-defined]
        and not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
    assert not silent
