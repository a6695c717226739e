"""What all tests share: how many GPUs there are, and hypothesis' settings."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Property tests share two cores with whatever else runs, so a slow example is no failure; a hang
# meets pytest's timeout. CI draws the same examples every time; elsewhere every run draws new ones.
hypothesis.settings.register_profile(
    "trlow", deadline=None, derandomize=os.environ.get("CI") == "true", print_blob=True
)
hypothesis.settings.load_profile("trlow")


def gpu_count() -> int:
    """Device files of NVIDIA's driver: counting them loads no library into the test process."""
    return sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are; the reason stands in the summary."""
    there = gpu_count()
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        needed = marker.args[0] if marker.args else marker.kwargs.get("n", 1)
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, there are {there}"))
