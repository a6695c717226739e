"""On the host device, and what is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch_exchange_cases import (  # noqa: E402, F401  the tests themselves
    parts,
    test_copies_can_be_compiled_again,
    test_copies_train_to_the_bytes_of_an_all_reduce,
)

from trlow.errors import UsageError  # noqa: E402
from trlow.torch import StaticDataParallel  # noqa: E402
from trlow.torch.peers import ranks_copy  # noqa: E402

pytestmark = pytest.mark.timeout(60)


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


class Gpus:
    """What is asked of a platform, with one answer for every pair."""

    name = "cuda"

    def __init__(self, *, reach=True):
        self.reach = reach

    def reaches(self, device, peer):
        return self.reach and device != peer


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_two_gpus_copy_unless_told_otherwise(transport):
    assert ranks_copy("auto", Gpus(), (0, 1), "plain", transport)
    assert ranks_copy("copy", Gpus(), (2, 5), "plain", transport)
    assert not ranks_copy("nccl", Gpus(), (0, 1), "plain", transport)
    assert not ranks_copy("auto", Gpus(), (0,), "plain", transport)
    assert not ranks_copy("auto", Gpus(), (0, 1, 2), "plain", transport)
    assert not ranks_copy("auto", Gpus(), (0, 1), "window", transport)


def test_gpus_that_do_not_reach_each_other_copy_through_the_host_alone():
    apart = Gpus(reach=False)
    assert ranks_copy("auto", apart, (0, 1), "plain", "host")
    assert ranks_copy("copy", apart, (0, 1), "plain", "host")
    assert not ranks_copy("auto", apart, (0, 1), "plain", "peer")
    with pytest.raises(UsageError, match="device 0 does not reach the memory of device 1"):
        ranks_copy("copy", apart, (0, 1), "plain", "peer")


@pytest.mark.parametrize(
    ("exchange", "asked", "transport"),
    [("copy", "host", "host"), ("copy", "auto", "peer"), ("nccl", "host", None)],
)
def test_a_module_says_how_its_gradients_are_copied(exchange, asked, transport):
    with static_of(exchange=exchange, transport=asked) as static:
        assert static.transport == transport
        static.compile(cases.batches(1)[0])
        assert transport in {None, static._captured.runtime.settings.transport}
