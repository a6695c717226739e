"""The rounds of bench/collectives.py on the host device, beside a stand-in for nccl-tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
BENCH = Path(__file__).resolve().parents[3] / "bench"

# It answers as nccl-tests does, in its table: each of -N cycles 1 us slower than the one before.
STAND_IN = """
import sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for cycle in range(int(given["-N"]) - {missing}):
    for size in (8, 16):
        print(size, size // 4, "float", "sum", -1, 9, 0.1, 0.1, "N/A", 5 + cycle, 0.1, 0.1, "N/A")
"""


@pytest.fixture
def compared(tmp_path):
    """Rows, or what a refusal says."""

    def run(*options, missing=0):
        tests, found = tmp_path / "all_reduce_perf", tmp_path / "found.json"
        tests.write_text(f"#!{sys.executable}\n{STAND_IN.format(missing=missing)}")
        tests.chmod(0o700)
        script = [sys.executable, str(BENCH / "collectives.py"), "--device", "host"]
        chosen = ["--part", "eager,group", "--most", "16", "--nccl-tests", str(tests)]
        done = subprocess.run(
            [*script, *chosen, "--json", str(found), *options],
            env={**os.environ, "PYTHONPATH": str(BENCH.parent)},
            capture_output=True,
            text=True,
            timeout=50,
        )
        if done.returncode:
            return done.stderr
        return json.loads(found.read_text())["results"]["rows"]

    return run


def test_a_round_has_the_least_of_its_cycles_on_both_sides(compared):
    rows = compared("--cycles", "2", "--rounds", "2")
    assert [one["size"] for one in rows] == [8, 16]
    for one in rows:
        assert one["nccl-tests"] == [5.0, 5.0]
        assert one["nccl-tests cycles"] == [[5.0, 6.0, 7.0, 8.0, 9.0, 10.0]] * 2  # three to one
        assert [len(every) for every in one["trlow cycles"]] == [2, 2]
        assert one["trlow"] == [min(every) for every in one["trlow cycles"]]


def test_behind_its_budget_a_part_has_one_round(compared):
    rows = compared("--rounds", "9", "--budget", "0")
    assert {len(one["trlow"]) for one in rows} == {1}


def test_a_size_that_was_not_measured_in_each_cycle_is_refused(compared):
    assert "did not measure each size 6 times" in compared("--cycles", "2", missing=1)
