"""What all tests share: how many GPUs there are, timeouts, hypothesis' settings, a small plan."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

import trlow
from trlow import range_op
from trlow.dtype import F32, I32

# Property tests share two cores with whatever else runs, so a slow example is no failure; a hang
# meets pytest's timeout. CI draws the same examples every time; elsewhere every run draws new ones.
hypothesis.settings.register_profile(
    "trlow", deadline=None, derandomize=os.environ.get("CI") == "true", print_blob=True
)
hypothesis.settings.load_profile("trlow")

# A shell that starts a command in the background has it ignore Ctrl-C, and all its children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def gpu_count() -> int:
    """Device files of NVIDIA's driver: counting them loads no library into the test process."""
    return sum(path.name[len("nvidia") :].isdigit() for path in Path("/dev").glob("nvidia*"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more GPUs than there are; the reason stands in the summary."""
    if os.environ.get("TRLOW_TEST_DEVICE") == "host":
        return  # tests/gpu runs on the host device, which has as many devices as one asks for
    there = gpu_count()
    for item in items:
        needed = gpus_needed(item)
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, there are {there}"))


def gpus_needed(item: pytest.Item) -> int:
    """The most that any of its marks asks for: of the file, the function or one parameter."""
    marks = item.iter_markers("gpu")
    counts = (mark.args[0] if mark.args else mark.kwargs.get("n", 1) for mark in marks)
    return max(counts, default=0)


# ---------------------------------------------------- timeouts where pytest-timeout is missing
# pyproject.toml's `timeout` and the marker mean the same without the plugin, except that the run
# ends with the test that hung: the stacks of all threads are written, and the process exits with 1.

STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Own the ini options that --strict-config would refuse as unknown."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take; 0 is for ever")
        parser.addini("timeout_method", "only for pytest-timeout; without it always a thread")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, which is not captured at this point."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): ends a run whose test takes longer")
        config.stash[STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Set-up, test and teardown together under one timeout."""
    file = item.config.stash.get(STDERR, None)
    if file is None:
        return (yield)
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout") or 0)
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


TABLE = trlow.RegionTable(
    "test",
    (
        trlow.Region("W_BUCKET_0", F32, "weights", persistent=True, parameter="BUCKET_0"),
        trlow.Region("G_BUCKET_1", F32, "gradients, late", parameter="BUCKET_1"),
        trlow.Region("G_BUCKET_0", F32, "gradients, early", parameter="BUCKET_0"),
        trlow.Region("I_A_DATA", F32, "input"),
        trlow.Region("I_B_DATA", F32, "input"),
        trlow.Region("F_FEATURE", F32, "feature"),
        trlow.Region("S_SCALAR", F32, "scalars"),
        trlow.Region("S_SCALAR_INT", I32, "flags"),
    ),
    (
        trlow.BucketSpec("DEEP_COMM", "G_BUCKET_0", "G_BUCKET_0"),
        trlow.BucketSpec("FIRST_COMM", "G_BUCKET_1", "G_BUCKET_1"),
    ),
)


@dataclass(frozen=True)
class Small:
    """A plan, and the ranges that the tests use."""

    plan: trlow.MemoryPlan

    @property
    def early(self):
        return self.plan.range("early")

    @property
    def late(self):
        return self.plan.range("late")

    @property
    def factor(self):
        return self.plan.range("factor")

    def mean_program(self, name="mean"):
        """COMP_1 doubles nothing; UPDATE reduces both buckets to their mean over ranks."""
        return trlow.Program.single(
            name,
            (
                trlow.Stage(
                    "DEEP_COMM",
                    trlow.Stream.UPDATE,
                    (range_op.mean_all_reduce(self.early, factor=self.factor),),
                ),
                trlow.Stage(
                    "FIRST_COMM",
                    trlow.Stream.UPDATE,
                    (range_op.mean_all_reduce(self.late, factor=self.factor),),
                ),
            ),
        )

    def feed_program(self):
        """Each step copies its input to the feature and sums it over ranks into a bucket."""

        def phase(mine, following):
            source = self.plan.range(f"{mine}.data")
            return (
                trlow.Stage(
                    f"XFER_{following.upper()}",
                    trlow.Stream.TRANS,
                    (
                        range_op.feed_copy(
                            following.upper(), self.plan.span(f"I_{following.upper()}_DATA")
                        ),
                    ),
                ),
                trlow.Stage(
                    "FORWARD",
                    trlow.Stream.COMP_1,
                    (range_op.copy(self.plan.range("feature"), source),),
                ),
                trlow.Stage(
                    "COMM",
                    trlow.Stream.UPDATE,
                    (range_op.sum_all_reduce(self.plan.range("feature")),),
                ),
                trlow.Stage(
                    "COLLECT",
                    trlow.Stream.COMP_2,
                    (
                        range_op.accumulate_metrics(
                            self.plan.range("w"),
                            self.plan.range("feature"),
                            self.plan.range("one"),
                            self.plan.range("skip"),
                        ),
                    ),
                ),
            )

        return trlow.Program.alternating("feed", phase("a", "b"), phase("b", "a"))


@pytest.fixture
def small():
    builder = trlow.PlanBuilder(TABLE)
    builder.add("W_BUCKET_0", "w", (6,))
    builder.add("G_BUCKET_0", "early", (1000,))
    builder.add("G_BUCKET_1", "late", (24,))
    builder.add("I_A_DATA", "a.data", (6,))
    builder.add("I_B_DATA", "b.data", (6,))
    builder.add("F_FEATURE", "feature", (6,))
    builder.add("S_SCALAR", "factor", (1,))
    builder.add("S_SCALAR", "one", (1,))
    builder.add("S_SCALAR_INT", "skip", (1,))
    return Small(builder.build())
