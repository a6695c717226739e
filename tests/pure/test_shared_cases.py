"""Tests that stand in a module of their own run wherever that module is used, all of them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def shared() -> dict[str, set[str]]:
    """Modules beside the folders by name, with the tests in them."""
    found = {}
    for path in sorted(TESTS.glob("*.py")):
        functions = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)]
        tests = {each.name for each in functions if each.name.startswith("test_")}
        if tests:
            found[path.stem] = tests
    return found


def imported(path: Path, module: str) -> set[str] | None:
    """The tests that a file takes from a module; None where it takes none of them."""
    names = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }
    return {name for name in names if name.startswith("test_")} or None


@pytest.mark.parametrize("module", shared())
def test_every_user_of_a_shared_module_runs_all_of_its_tests(module):
    users = {path: imported(path, module) for path in TESTS.glob("*/**/test_*.py")}
    users = {path: names for path, names in users.items() if names is not None}
    folders = {path.relative_to(TESTS).parts[0] for path in users}
    assert folders == {"host", "gpu"}
    for path, names in users.items():
        assert names == shared()[module], path


def test_there_are_shared_modules():
    assert {"memset_cases", "torch_exchange_cases", "torch_rows_cases"} <= shared().keys()
