"""`trlow bench` in this process; its workers are processes of their own on the host device."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from trlow.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@pytest.fixture
def bench(capsys):
    """Run `trlow bench …`; the exit code is that of the process it would have been."""

    def call(*arguments: object) -> Outcome:
        try:
            code = main(["bench", *map(str, arguments)])
        except SystemExit as exit_:
            code = exit_.code
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return call


@pytest.fixture
def measured(bench, tmp_path):
    """The JSON of a run on two host ranks that has to succeed."""

    def call(*arguments: object) -> dict:
        path = tmp_path / "found.json"
        quick = ("--device", "host", "--gpus", "0-1", "--rounds", 1, "-n", 3, "-w", 1)
        outcome = bench(arguments[0], *quick, "--json", path, *arguments[1:])
        assert (outcome.code, outcome.err) == (0, ""), outcome
        return json.loads(path.read_text())

    return call
