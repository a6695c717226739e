"""A fork of a process that has used the host device, and of one that has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(90)

TESTS = Path(__file__).parents[2]


def forking(device, when):
    # Python itself warns of a fork beside threads, which is what is tested.
    flags = ["-W", "error", "-W", "ignore::DeprecationWarning"]
    command = [sys.executable, *flags, str(TESTS / "forking.py"), device, when]
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_after_use_everything_is_refused_in_the_child_and_the_parent_goes_on():
    refused = [f"{name} refused" for name in ("capture", "replay", "copy", "count", "anew")]
    assert forking("host", "after") == [*refused, "the parent goes on"]


def test_before_use_both_work():
    assert forking("host", "before") == ["the child works", "the parent works"]
