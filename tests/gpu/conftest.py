"""What the GPU tests share: the device under test, settings for n of it, and a summary block.

TRLOW_TEST_DEVICE=host runs the same tests on the host device: that proves the tests before they
meet a GPU, and says nothing about one.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trlow.settings import Settings

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))  # every_kernel.py is a script, and imported by a test
DEVICE = os.environ.get("TRLOW_TEST_DEVICE") or "cuda"


@pytest.fixture(scope="session")
def device() -> str:
    """The platform under test: "cuda", or "host" with TRLOW_TEST_DEVICE=host."""
    return DEVICE


@pytest.fixture(scope="session")
def gpu_settings(device):
    """``gpu_settings(n, **fields)``: Settings for the first n devices of the platform."""

    def settings(n: int = 1, **fields) -> Settings:
        chosen = {
            "device": device,
            "gpus": "0" if n == 1 else f"0-{n - 1}",
            "any_world_size": True,
            "deadline_s": 20.0,
            "host_devices": max(4, n),
        }
        return Settings(**{**chosen, **fields})

    return settings


@pytest.fixture
def torch_threads(device):
    """On the host device two ranks share two cores."""
    import torch  # not every machine has it

    before = torch.get_num_threads()
    if device == "host":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ------------------------------------------------------------------------------ the summary


OUTCOMES = ("passed", "failed", "error", "skipped")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter) -> Iterator[None]:
    """Last of all: which machine these results are of, and how many tests did not run."""
    yield
    counts = {
        outcome: len({report.nodeid for report in found if is_of_a_gpu_test(report)})
        for outcome in OUTCOMES
        for found in (terminalreporter.stats.get(outcome, ()),)
    }
    if not any(counts.values()):
        return
    terminalreporter.section("GPU tests")
    terminalreporter.line(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    if counts["skipped"]:
        terminalreporter.line(f"NOT RUN: {counts['skipped']} tests, for the reasons listed above")
    if counts["skipped"] < sum(counts.values()):
        for line in machine():
            terminalreporter.line(line)


def is_of_a_gpu_test(report: object) -> bool:
    file = getattr(report, "nodeid", "").split("::", maxsplit=1)[0]
    return (ROOT / file).is_relative_to(HERE)


def machine() -> list[str]:
    """GPU names, driver, CUDA and NCCL, as another process sees them; never raises."""
    what = "HOST DEVICE, no GPU was tested" if DEVICE == "host" else "CUDA"
    lines = [f"device under test: {what}", f"python: {platform.python_version()}"]
    try:
        command = [sys.executable, "-m", "trlow", "doctor", "--json"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return [*lines, f"trlow doctor gave no answer: {' '.join(str(error).split())}"]
    lines += [
        f"GPU {gpu['index']}: {gpu['name']}, compute capability {gpu['compute_capability']}"
        for gpu in found["gpus"]
    ] or ["GPUs: none"]
    titles = {"cuda": "CUDA of the driver", "cudart": "CUDA runtime", "nccl": "NCCL"}
    titles |= {"nvrtc": "NVRTC"}
    libraries = {library["name"]: library for library in found["libraries"]}
    lines.append(f"driver: {driver_version()}")
    for name, title in titles.items():
        library = libraries.get(name) or {}
        where = f"{library['version']} ({library['path']})" if library.get("path") else "missing"
        lines.append(f"{title}: {where}")
    nccl = {k: v for k, v in found["environment"].items() if k.startswith("NCCL_")}
    return [*lines, "NCCL variables: " + (" ".join(f"{k}={v}" for k, v in nccl.items()) or "none")]


def driver_version() -> str:
    """The kernel driver's own number, which no CUDA call tells."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "missing (no nvidia-smi)"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    versions = sorted(set(done.stdout.split("\n")) - {""})
    return ", ".join(versions) or f"unknown ({done.stderr.strip()})"
