"""How bench/collectives.py compares the two sides of its rounds, and where they run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(scope="module")
def collectives():
    sys.path.insert(0, str(BENCH))
    try:
        import collectives
    finally:
        sys.path.remove(str(BENCH))
    return collectives


def row(size, mine, theirs):
    return {"size": size, "trlow": mine, "nccl-tests": theirs}


def test_rounds_are_compared_in_pairs(collectives):
    """Both sides of a round are fast or slow together: medians of each side may be of two kinds."""
    part = collectives.Part("threads", 8, 1024, 400, 0)
    found = collectives.judged(part, row(8, [6.1, 8.9, 9.0], [6.0, 6.2, 8.8]))
    assert (found["more_us"], found["bar_us"], found["met"]) == (pytest.approx(0.2), 2.0, True)
    found = collectives.judged(part, row(8, [9.0, 6.0, 9.1], [6.0, 8.9, 6.1]))
    assert (found["more_us"], found["met"]) == (pytest.approx(3.0), False)


@pytest.mark.parametrize(
    ("nbytes", "launches", "reference", "bar"),
    [
        (8, 0, 10.0, 2.0),
        (512 << 10, 0, 100.0, 2.0),
        (8, 200, 5.0, 0.5),
        (512 << 10, 200, 100.0, 5.0),
        (1 << 20, 0, 20.0, 1.0),
        (4 << 20, 0, 100.0, 3.0),
        (4 << 20, 20, 100.0, 3.0),
    ],
)
def test_bars(collectives, nbytes, launches, reference, bar):
    part = collectives.Part("group", 8, 1 << 30, 20, launches)
    assert part.bar(nbytes, reference) == pytest.approx(bar)
    for more, met in ((0.9 * bar, True), (1.1 * bar, False)):
        assert collectives.judged(part, row(nbytes, [reference + more], [reference]))["met"] is met


def test_one_side_alone_is_not_judged(collectives):
    part = collectives.Part("group", 8, 1024, 20, 0)
    assert "met" not in collectives.judged(part, row(8, [1.0], []))


def test_each_round_has_cpus_of_its_own_and_all_come_back(collectives):
    every = os.sched_getaffinity(0)
    seen = []
    for index in range(len(every)):
        with collectives.on_cpus(1, index):
            seen.append(os.sched_getaffinity(0))
    assert sorted(map(sorted, seen)) == [[cpu] for cpu in sorted(every)]
    with pytest.raises(ValueError, match="planted"), collectives.on_cpus(1, 0):
        raise ValueError("planted")
    assert os.sched_getaffinity(0) == every
    with collectives.on_cpus(0, 3):
        assert os.sched_getaffinity(0) == every
