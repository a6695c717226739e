"""Every kernel on one GPU against the host device: same bytes, or a reduction's tolerance."""

from __future__ import annotations

import os
import subprocess
import sys

import every_kernel
import kernel_cases
import numpy as np
import pytest

from trlow.kernel import declarations

pytestmark = [pytest.mark.gpu(1), pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def benches(device):
    with every_kernel.benches(device) as both:
        yield both


@pytest.mark.parametrize("name", sorted(declarations()))
def test_a_kernel_agrees_with_the_host_device_at_odd_counts_and_offsets(benches, name):
    for case in kernel_cases.cases(name):
        every_kernel.compare(*benches, case)


def changed(bench, change):
    class Changed:
        def run(self, case):
            arrays = bench.run(case)
            change(arrays[0])
            return arrays

    return Changed()


def flip_a_bit(array):
    array.view(np.uint8)[-1] ^= 1


def add_a_thousandth(array):
    array *= np.float32(1.001)


@pytest.mark.parametrize(
    ("name", "change"),
    [("scale_f32", flip_a_bit), ("copy", flip_a_bit), ("fc_fwd", add_a_thousandth)],
)
def test_a_difference_is_seen(benches, name, change):
    tested, reference = benches
    with pytest.raises(AssertionError, match=f"{name}: .* differs"):
        every_kernel.compare(tested, changed(reference, change), kernel_cases.cases(name)[0])


def test_a_byte_behind_an_array_is_seen(benches):
    case = kernel_cases.Case("clear", {"nbytes": 1003}, 1, 1003)
    with pytest.raises(AssertionError, match="clear wrote beside an array"):
        benches[0].run(case, extra=1)


def test_the_script_says_how_each_kernel_agrees(device):
    command = [sys.executable, every_kernel.__file__, "--device", device, "--only", "clear"]
    command.append("--exact")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=80,
        env={**os.environ, "PYTHONPATH": ".:tests"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "every kernel agrees"
