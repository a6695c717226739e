"""Every dtype and operation gives exactly the predicted result, on the host device."""

from __future__ import annotations

import numpy as np
import pytest

from trlow.bench.checking import check
from trlow.bench.crew import Crew
from trlow.bench.exact import OPS, is_float
from trlow.bench.job import Job
from trlow.device import Platform
from trlow.dtype import DTYPES
from trlow.settings import Settings

PLACES = ("out-of-place", "in-place")


@pytest.fixture
def platform():
    return Platform.open(Settings(device="host", host_devices=8))


def wrong(platform, devices, **values) -> list[tuple[int, list]]:
    crew = Crew(platform, Job(most=1 << 17, places=PLACES, **values), devices, 20.0)
    try:
        return [check(crew, 24 * 512, place) for place in PLACES]
    finally:
        crew.close()


@pytest.mark.parametrize("op", OPS)
def test_reductions_of_every_dtype_and_operation_are_exact(platform, op):
    for name, dtype in DTYPES.items():
        if op == "avg" and not is_float(dtype):
            continue  # an integer average truncates, and is refused
        for collective, launches, devices in (
            ("all_reduce", 0, range(8)),
            ("reduce_scatter", 1, range(2)),
        ):
            values = {"collective": collective, "dtype": name, "op": op, "launches": launches}
            assert wrong(platform, tuple(devices), **values) == [(0, [])] * 2, (name, collective)


@pytest.mark.parametrize("root", [0, 2])
def test_every_root_is_exact_on_three_ranks(platform, root):
    for name in ("broadcast", "reduce"):
        values = {"collective": name, "dtype": "float32", "root": root}
        assert wrong(platform, (0, 1, 2), **values) == [(0, [])] * 2


def test_a_buffer_larger_than_the_staging_memory_is_compared_to_its_end(platform, monkeypatch):
    monkeypatch.setattr("trlow.bench.seat.STAGING_NBYTES", 1 << 16)
    monkeypatch.setattr("trlow.bench.checking.STAGING_NBYTES", 1 << 16)
    job = Job(collective="all_reduce", dtype="float16", most=1 << 20)
    crew = Crew(platform, job, (0, 1), 20.0)
    try:
        assert check(crew, 1 << 20, "in-place") == (0, [])
        seat = crew.seats[1]
        last = seat.data("recv") + (1 << 20) - 2
        crew.on_ranks(lambda one: one is seat and one.upload(last, np.array([7], np.uint16)))
        got = seat.download(last, 1, np.empty(0, np.uint16))
        assert got.tolist() == [7]
    finally:
        crew.close()
