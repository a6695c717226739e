"""The README's examples are run as they stand, so they cannot rot."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def examples() -> tuple[str, str]:
    """The low level, and what goes on from there with another library."""
    first, second = re.findall(
        r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    return first, second


def example() -> str:
    return examples()[0]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TRLOW_DEADLINE_S": "20"},
    )


def test_the_example_runs_and_says_nothing():
    done = run(example())
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_example_would_notice_a_wrong_mean():
    wrong = example().replace("1 / ranks", "2 / ranks")
    assert wrong != example()
    done = run(wrong)
    assert done.returncode == 1
    assert "AssertionError" in done.stderr


def test_the_example_has_about_25_lines():
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 27


def test_torch_sees_the_memory_as_the_readme_says():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: the README's example with it was not run")
    done = run("".join(examples()))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
