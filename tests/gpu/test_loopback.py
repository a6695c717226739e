"""What a process listens on while the communicators of two GPUs are alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(90)]

TESTS = Path(__file__).parent.parent
SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(TESTS)!r})
from listening import listening, others
import trlow
from trlow import range_op

device, ranks, loopback_only = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True"
table = trlow.RegionTable("t", (trlow.Region("G", trlow.F32, "gradients"),), ())
builder = trlow.PlanBuilder(table)
builder.add("G", "g", (1000,))
plan = builder.build()
stage = trlow.Stage("COMM", trlow.Stream.UPDATE, (range_op.sum_all_reduce(plan.range("g")),))
settings = trlow.Settings(
    device=device, gpus=f"0-{{ranks - 1}}", deadline_s=30.0, loopback_only=loopback_only
)
with trlow.Runtime(settings, plan) as runtime:
    replay = runtime.capture(trlow.Program.single("sum", (stage,)))
    replay.run(2)
    print(*listening())
    print(*others())
    print(*sorted(name for name in os.environ if name.startswith("NCCL_")))
"""


def seen(device, ranks, *, loopback_only):
    """What the process listened on, this machine's other addresses, and NCCL variables set."""
    kept = {  # what the machine itself says of NVLink multicast stays
        key: value
        for key, value in os.environ.items()
        if not key.startswith("NCCL_") or "NVLS" in key
    }
    environment = {**kept, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, "-W", "error", "-c", SCRIPT]
    command += [device, str(ranks), str(loopback_only)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    addresses, others, variables = (set(line.split()) for line in done.stdout.splitlines())
    return addresses, others, variables - set(kept)


@pytest.mark.gpu(2)
def test_with_loopback_only_nothing_listens_beyond_loopback(device):
    addresses, _, variables = seen(device, 2, loopback_only=True)
    assert addresses <= {"127.0.0.1", "::1"}
    if device == "cuda":
        assert addresses, "NCCL listens somewhere, so the test looks in the wrong place"
        assert variables == {"NCCL_SOCKET_IFNAME", "NCCL_RAS_ENABLE", "NCCL_OOB_NET_ENABLE"}


@pytest.mark.gpu(2)
def test_without_it_something_does_and_no_variable_is_set(device):
    if device == "host":
        pytest.skip("the host device listens on nothing")
    addresses, others, variables = seen(device, 2, loopback_only=False)
    if not others:
        pytest.skip("loopback is the only interface here")
    assert addresses - {"127.0.0.1", "::1"}
    assert variables == set()


@pytest.mark.gpu(1)
@pytest.mark.parametrize("loopback_only", [True, False])
def test_one_rank_listens_on_nothing_and_sets_nothing(device, loopback_only):
    addresses, _, variables = seen(device, 1, loopback_only=loopback_only)
    assert (addresses, variables) == (set(), set())
