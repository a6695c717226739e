"""On two GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch_exchange_cases import (  # noqa: E402, F401  the tests themselves
    parts,
    sgd,
    state_of,
    test_copies_can_be_compiled_again,
    test_copies_train_to_the_bytes_of_an_all_reduce,
    wide,
)

from trlow.torch import StaticDataParallel  # noqa: E402

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(60), pytest.mark.usefixtures("torch_threads")]


@pytest.fixture
def two(gpu_settings):
    return gpu_settings(2)


def test_two_gpus_that_reach_each_other_copy_by_themselves(device, two):
    with StaticDataParallel(wide, cases.cross_entropy, two, optimizer=sgd) as static:
        assert static.exchange == ("copy" if device == "cuda" else "nccl")
        assert static.transport == ("peer" if device == "cuda" else None)


def test_many_steps_with_a_rank_that_comes_late_are_those_of_an_all_reduce(device, two):
    """A copy that comes before its inbox is free, or an update ahead of it, changes bytes."""
    given, ends = cases.batches(8), []
    kind = "cuda" if device == "cuda" else "cpu"
    places = [(rank, torch.device(kind, rank if kind == "cuda" else 0)) for rank in range(2)]
    for exchange, way in (("nccl", "auto"), ("copy", "peer"), ("copy", "host")):
        by = replace(two, transport=way)
        with StaticDataParallel(
            wide, cases.cross_entropy, by, optimizer=sgd, exchange=exchange, buckets=3
        ) as static:
            static.compile(given[0])
            shards = [
                [tuple(p.chunk(2)[rank].to(where) for p in batch) for rank, where in places]
                for batch in given
            ]
            for number in range(300):
                if device == "cuda" and number % 7 == 3:  # the inputs of one rank come late
                    with torch.cuda.device(number % 2):
                        torch.cuda._sleep(2_000_000)
                static.step(shards=shards[number % 8])
            first, other = map(state_of, static.modules())
            cases.assert_same(first, other)
            ends.append(first)
    cases.assert_same(*ends[:2])
    cases.assert_same(*ends[1:])
