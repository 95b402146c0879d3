"""Imports go one way, tasks have owners, SQL has one door, and tests wait for facts: what no linter knows about rota."""

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


def _trees(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path.relative_to(folder).as_posix(), ast.parse(path.read_text("utf-8"))


def _found(folder: Path, is_it: type[ast.AST] | tuple[type[ast.AST], ...]) -> Iterator[tuple[str, ast.AST]]:
    for name, tree in _trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, is_it):
                yield name, node


def _at(name: str, node: ast.AST) -> str:
    return f"{name}:{getattr(node, 'lineno', 0)}"


def test_imports_go_one_way() -> None:
    """domain, db, handlers, lifecycle, services, daemon, cli: a layer that knows one above it can't be understood alone."""
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("leaf", ["errors", "cron", "domain/payload", "runtime/clock"])
def test_leaves_import_nothing_of_rota_but_other_leaves(leaf: str) -> None:
    """Anyone may import them, so they must drag nothing along; outside of TYPE_CHECKING, where they run."""
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


LOOSE = {"create_task", "gather", "ensure_future", "wait", "as_completed"}


def test_every_task_belongs_to_a_group() -> None:
    """A task that nobody awaits hides its errors and outlives its owner; gather and wait leave siblings running."""
    loose = []
    for name, tree in _trees(PACKAGE):
        groups = _groups_in(tree)
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOOSE):
                continue
            receiver = node.func.value
            owner = receiver.id if isinstance(receiver, ast.Name) else ""
            if owner == "asyncio" or (node.func.attr in {"create_task", "ensure_future"} and owner not in groups):
                loose.append(_at(name, node))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
                loose += [_at(name, node) for alias in node.names if alias.name in LOOSE]
    assert not loose


def _groups_in(tree: ast.Module) -> set[str]:
    """The names that stand for task groups: `async with asyncio.TaskGroup() as name`, and parameters annotated so."""
    groups = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncWith):
            for item in node.items:
                if ast.unparse(item.context_expr) == "asyncio.TaskGroup()" and isinstance(item.optional_vars, ast.Name):
                    groups.add(item.optional_vars.id)
        elif isinstance(node, ast.arg) and node.annotation and ast.unparse(node.annotation) == "asyncio.TaskGroup":
            groups.add(node.arg)
    return groups


def test_only_the_database_layer_reads_sql() -> None:
    """The files under sql/ have one door: typed functions, whose contracts are tested."""
    outside = [
        _at(name, node)
        for name, node in _found(PACKAGE, (ast.ImportFrom, ast.Import))
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


def test_only_the_loop_loops_for_ever() -> None:
    """One place knows how to go on after an error, how long to pause, and how to be stopped. A bounded wait isn't a loop."""
    spared = {
        "supervision/loop.py": "the loop",
        "embedded/": "waits for the lock of a data folder, with a deadline",
        "bench/": "measures until it has measured: a command in the foreground",
        "commands/": "what a person looks at until Ctrl-C",
    }
    forever = [
        _at(name, node)
        for name, node in _found(PACKAGE, ast.While)
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value
        if not name.startswith(tuple(spared))
    ]
    assert not forever


# What a handler raises becomes a value here. Anywhere else a broad except that raises nothing would hide a fault of ours.
BROAD = {
    "lifecycle/executor.py": "the one around handlers",
    "handlers/__init__.py": "a handler's own backoff function, which must not decide about the job by failing",
    "child.py": "the same, in the process of a handler that has one of its own",
    "handlers/python.py": "carries that process's error to the call that waits for it",
    "supervision/supervisor.py": "a loop that crashes, which is logged, counted and restarted",
    "daemon/main_loop.py": "an error that left the event loop while jobs are under way",
    "daemon/daemon.py": "an error of the drain, which is taken for the next order to stop",
    "lifecycle/call_outcome.py": "an exception of the handler's own class that raises when it is read",
    "lifecycle/settle.py": "one outcome that can not be written, beside others that can",
    "lifecycle/scheduler.py": "planning of one schedule, which is pure: the schedule is stopped with the error as its reason",
    "handlers/failure.py": "an exception whose own __str__ raises",
    "domain/payload.py": "a result made of objects that raise when they are looked at",
    "client/many.py": "an error in the middle of a COPY, which has to wait for its end before it leaves",
}


def test_errors_are_swallowed_where_it_is_written_down_here() -> None:
    """And all of these places are still needed. Catching everything to tidy up and raise again is another matter."""
    found = set()
    for name, node in _found(PACKAGE, ast.ExceptHandler):
        assert isinstance(node, ast.ExceptHandler)
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(kind is None or ast.unparse(kind) in {"Exception", "BaseException"} for kind in caught)
        if broad and not isinstance(node.body[-1], ast.Raise):
            found.add(name)
    assert found == set(BROAD)


def test_tests_wait_for_facts() -> None:
    """A sleep is too long on a fast machine and too short on a slow one."""
    sleeps = []
    for name, tree in _trees(TESTS):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {"time.sleep", "asyncio.sleep", "sleep"}:
                turn = node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value == 0
                # The programs in support/peers/ run other systems, with nothing of ours.
                if not name.startswith(("support/waiting.py", "support/peers/")) and not turn:
                    sleeps.append(_at(name, node))
    assert not sleeps


def test_every_test_says_what_it_proves() -> None:
    """Nobody dares to change or delete a test whose purpose is unknown. A long name is enough."""
    silent = [
        _at(name, node)
        for name, node in _found(TESTS, (ast.FunctionDef, ast.AsyncFunctionDef))
        if node.name.startswith("test_")  # type: ignore[attr-defined]
        and node.name.count("_") < LONG_NAME_WORDS  # type: ignore[attr-defined]
        and not ast.get_docstring(node)  # type: ignore[arg-type]
    ]
    assert not silent
