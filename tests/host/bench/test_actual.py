"""Requested and actual: variables that workers get, and the log of a pass that is not timed."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from trlow.bench import table
from trlow.bench.job import Job
from trlow.bench.process import WorkerProcess
from trlow.bench.request import Request
from trlow.bench.sweep import Sweep
from trlow.bench.variant import Variant

# Answers like a worker on two GPUs; with a log it writes what NCCL would.
STUB = """
import json, sys
log, algo, proto, version = sys.argv[1:]
hello = dict(ranks=2, devices=[0, 1], platform="cuda", names=["x", "x"], buses=["a", "b"],
             peer_access=True, libraries={}, nccl_version=int(version))
for line in sys.stdin:
    do = json.loads(line)
    if do["do"] == "call":
        with open(log, "a") as file:
            print(f"h:1:2 [0] NCCL INFO AllReduce: {do['size']} Bytes -> Algo {algo} proto {proto} "
                  "channel{Lo..Hi}={0..3}", file=file)
    found = hello if do["do"] == "hello" else dict(time_us=1.0, unit_us=[1.0], enqueue_us=1.0)
    print(json.dumps(dict(found, ok=True, wrong=0, named=[])), flush=True)
"""


@pytest.fixture
def swept():
    """A run of Ring and Tree by stubs of an NCCL that always takes Ring, with all variables."""
    seen: list[tuple[str, dict[str, str]]] = []

    def call(version: int, collective: str = "all_reduce") -> Sweep:
        def begin(job: Job, variables: Mapping[str, str]) -> WorkerProcess:
            seen.append((job.variant.name, dict(variables)))
            log = variables.get("NCCL_DEBUG_FILE", "/dev/null")
            words = [log, "RING", "LL128", str(version)]
            return WorkerProcess([sys.executable, "-c", STUB, *words])

        request = Request(
            collective=collective,
            sizes=(8, 1024),
            rounds=1,
            places=("out-of-place",),
            variants=tuple(Variant(algo=algo, proto="LL128") for algo in ("Ring", "Tree")),
        )
        sweep = Sweep(request, start_worker=begin)
        sweep.run()
        return sweep

    call.seen = seen
    return call


def test_what_nccl_took_stands_beside_what_was_forced(swept):
    found = swept(22809).result
    assert [str(row.actual) for row in found.rows] == ["Ring/LL128 x4"] * 4
    assert [row.disagrees for row in found.rows] == [False, True, False, True]
    shown = table.table_of(found)
    actual = [row[shown.columns.index("actual")] for row in shown.rows]
    assert actual == ["Ring/LL128 x4", "Ring/LL128 x4 (not as forced)"] * 2


def test_only_the_untimed_pass_has_a_log_and_the_probe_forces_nothing(swept):
    swept(22809)
    forced = [{"NCCL_ALGO": algo, "NCCL_PROTO": "LL128"} for algo in ("Ring", "Tree")]
    assert [name for name, _ in swept.seen] == ["default"] + ["Ring/LL128", "Tree/LL128"] * 2
    assert [variables for _, variables in swept.seen[:3]] == [{}, *forced]
    for (_, variables), expected in zip(swept.seen[3:], forced, strict=True):
        file = variables.pop("NCCL_DEBUG_FILE")
        assert file
        debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
        assert variables == {**expected, **debug}


def test_from_2_31_on_no_variable_forces_what_a_call_can_choose(swept):
    swept(23203)
    assert [variables for _, variables in swept.seen[:3]] == [{}, {}, {}]


def test_an_algorithm_that_a_collective_lacks_starts_no_worker(swept):
    found = swept(22809, "broadcast").result
    assert [row.measured for row in found.rows] == [True, False, True, False]
    assert "NCCL has no Tree broadcast" in found.rows[1].reason
    assert {name for name, _ in swept.seen} == {"default", "Ring/LL128"}
