"""On the host device, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch_exchange_cases import (  # noqa: E402, F401  the tests themselves
    test_copies_can_be_compiled_again,
    test_copies_train_to_the_bytes_of_an_all_reduce,
)

from trlow.errors import UsageError  # noqa: E402
from trlow.torch import StaticDataParallel  # noqa: E402

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def device():
    return "host"


@pytest.fixture
def two():
    return cases.host(2)


def static_of(ranks=2, exchange="auto", **settings):
    given = cases.host(ranks, **settings)
    return StaticDataParallel(
        cases.mlp, cases.cross_entropy, given, optimizer=cases.sgd, exchange=exchange
    )


@pytest.mark.parametrize("exchange", ["auto", "nccl"])
def test_the_host_device_has_no_copy_engines_and_says_what_it_takes(exchange):
    with static_of(exchange=exchange) as static:
        assert static.exchange == "nccl"


@pytest.mark.parametrize(
    ("ranks", "settings", "says"),
    [
        (1, {}, "two ranks, not 1"),
        (3, {"any_world_size": True}, "two ranks, not 3"),
        (2, {"arena": "window", "allow_unabortable": True}, "a window is for NCCL"),
    ],
)
def test_copies_where_there_can_be_none_are_refused_with_the_reason(ranks, settings, says):
    with pytest.raises(UsageError, match=says):
        static_of(ranks, "copy", **settings)


def test_an_unknown_exchange_is_refused_with_those_that_are_known():
    with pytest.raises(UsageError, match="exchange='p2p': choose one of auto, nccl, copy"):
        static_of(exchange="p2p")
