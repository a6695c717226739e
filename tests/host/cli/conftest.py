"""The command line: in this process for speed, as a process of its own where that matters."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from trlow.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def trlow(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run one command in this process; the exit code is that of the process it would have been."""

    def call(*arguments: object) -> Outcome:
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return call


@pytest.fixture
def process() -> Callable[..., Outcome]:
    """Run `python -m trlow` with every warning an error."""

    def call(*arguments: object, env: dict[str, str] | None = None) -> Outcome:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-m", "trlow", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=100,
            env=env,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call
