"""The table of tests/README.md names every invariant once, and only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def rows() -> list[list[str]]:
    lines = (TESTS / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if re.fullmatch(r"\d+b?", row[0])]


def named(text: str) -> list[tuple[str, str | None]]:
    """Every (file, test or None) in backquotes; `…::test` is of the file named before it."""
    found: list[tuple[str, str | None]] = []
    for name in re.findall(r"`([^`]+\.py(?:::\w+)?|…::\w+)`", text):
        file, _, test = name.partition("::")
        found.append((found[-1][0] if file == "…" else file, test or None))
    return found


def test_every_invariant_stands_there_once_and_in_order():
    numbers = [str(number) for number in range(1, 41)]
    numbers.insert(numbers.index("32") + 1, "32b")
    assert [row[0] for row in rows()] == numbers
    assert all(named(row[2]) for row in rows())


def test_every_test_that_is_named_exists():
    missing = []
    for row in rows():
        for file, test in named(row[2]):
            path = TESTS / file
            if not path.is_file():
                missing.append(file)
            elif test is not None:
                functions = {
                    node.name
                    for node in ast.parse(path.read_text(encoding="utf-8")).body
                    if isinstance(node, ast.FunctionDef)
                }
                if test not in functions:
                    missing.append(f"{file}::{test}")
    assert missing == []
