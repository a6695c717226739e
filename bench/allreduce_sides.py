"""The two sides of `allreduce.py`, each as a fresh process: trlow's worker, and nccl-tests."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from allreduce_worker import Work

KI, MI = 1 << 10, 1 << 20
FACTOR = {"small": 8, "large": 2}  # nccl-tests' -f
LIMIT_S = 90  # seconds for one process of one side
Found = dict[int, float]  # bytes -> us per call


class SideError(Exception):
    """One process of one side failed; its round does not count."""


@dataclass(frozen=True)
class Sweep:
    """One process of nccl-tests: sizes from `least` to `most` by a factor."""

    name: str
    least: int
    most: int
    calls: int
    launches: int

    def sizes(self) -> Iterator[int]:
        """Bytes of each call, as nccl-tests takes them."""
        size = self.least
        while size <= self.most:
            yield size
            size *= FACTOR[self.name]

    def works(self, repeats: int) -> list[Work]:
        """The same for trlow."""
        return [Work(size, self.most, self.calls, self.launches, repeats) for size in self.sizes()]


def trlow_side(
    arguments: argparse.Namespace,
    works: Sequence[Work],
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """One fresh process that measures `works`; `extra` are settings as NAME=VALUE."""
    command = [sys.executable, str(Path(__file__).with_name("allreduce_worker.py"))]
    command += ["--device", arguments.device, "--gpus", arguments.gpus]
    for setting in (*arguments.setting, *extra):
        command += ["--setting", setting]
    command += ["--works", json.dumps([asdict(work) for work in works])]
    told = run(command, env)
    found: list[dict[str, Any]] = json.loads(told.splitlines()[-1])
    return found


def nccl_tests_side(
    arguments: argparse.Namespace,
    sweep: Sweep,
    library: str,
    env: Mapping[str, str] | None = None,
) -> Found:
    """One process of nccl-tests. Raises if it found a wrong sum."""
    ranks = len(arguments.gpus_list)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [str(arguments.nccl_tests), "-t", str(ranks), "-g", "1", "-o", "sum"]
        command += ["-d", "float", "-b", str(sweep.least), "-e", str(sweep.most)]
        command += ["-f", str(FACTOR[sweep.name]), "-n", str(sweep.calls)]
        command += ["-G", str(sweep.launches), "-J", str(output)]
        own = {"NCCL_TESTS_DEVICE": str(arguments.gpus_list[0])}
        own["LD_LIBRARY_PATH"] = os.pathsep.join(
            (str(Path(library).parent), os.environ.get("LD_LIBRARY_PATH", ""))
        )
        told = run(command, {**own, **(env or {})})
        lines = in_place(output, told)
    wrong = [nbytes for nbytes, _, count in lines if count]
    if wrong or not lines:
        raise SideError(f"nccl-tests found wrong sums at {wrong}:\n{told}")
    return {nbytes: us for nbytes, us, _ in lines}


def in_place(output: Path, told: str) -> list[tuple[int, float, float]]:
    """(bytes, us, wrong elements) of each in-place line: of the JSON, else of the printed table."""
    try:
        lines = json.loads(output.read_text())["results"]
    except (OSError, ValueError, KeyError):
        # size count type redop root | time algbw busbw wrong | time algbw busbw wrong
        cells = [line.split() for line in told.splitlines() if line[:1] not in {"#", ""}]
        rows = [row for row in cells if len(row) == 13 and row[0].isdigit()]
        return [(int(row[0]), float(row[9]), float(row[12])) for row in rows]
    places = [(int(line["size"]), line["in_place"]) for line in lines]
    return [(nbytes, float(one["time"]), float(one["nwrong"])) for nbytes, one in places]


def run(command: Sequence[str], env: Mapping[str, str] | None) -> str:
    """Run one side to its end. Raises SideError with everything it said."""
    environment = {**report.environment(), **(env or {})}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=LIMIT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SideError(f"{error}\n{error.stdout}\n{error.stderr}") from error
    return done.stdout
