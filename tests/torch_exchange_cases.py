"""Tests of how gradients get from rank to rank: copies give the bytes that NCCL gives.

For host/ and gpu/, which have the fixtures ``device`` and ``two`` (settings of two ranks) each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch_cases as cases
from torch import nn

from trlow import transport
from trlow.torch import StaticDataParallel

STEPS = 12


def wide():
    """Tensors on both sides of what is sent directly."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 300), nn.BatchNorm1d(300), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(300, 256), nn.ReLU(), nn.Linear(256, cases.CLASSES))


def convolutions():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, bias=False)]
    layers += [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, cases.CLASSES)]
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def frozen():
    module = wide()
    module[2].weight.requires_grad_(False)
    return module


class Tied(nn.Module):
    """One weight in two places, whose gradient is a sum."""

    def __init__(self):
        super().__init__()
        self.first, self.square = nn.Linear(8, 200), nn.Parameter(torch.randn(200, 200) / 16)
        self.last = nn.Linear(200, cases.CLASSES)

    def forward(self, rows):
        return self.last((self.first(rows) @ self.square).relu() @ self.square)


class Through(torch.autograd.Function):
    """A module whose backward gives all gradients at once, as a compiled one's does."""

    @staticmethod
    def forward(context, module, rows, *parameters):
        with torch.enable_grad():
            rows, *mine = [each.detach().requires_grad_() for each in (rows, *parameters)]
            names = [name for name, _ in module.named_parameters()]
            given = dict(zip(names, mine, strict=True))
            context.out = torch.func.functional_call(module, given, (rows,))
        context.inputs = rows, *mine
        return context.out.detach()

    @staticmethod
    def backward(context, gradient):
        return None, *torch.autograd.grad(context.out, context.inputs, gradient)


class AtOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = wide()

    def forward(self, rows):
        return Through.apply(self.inner, rows, *self.inner.parameters())


def at_once():
    return AtOnce()


def tied():
    torch.manual_seed(0)
    return Tied()


def adamw(parameters):
    on_gpu = torch.cuda.is_available()
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True, capturable=on_gpu)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.05, fused=True)


def groups(parameters):
    mine = list(parameters)
    return torch.optim.AdamW(
        [{"params": mine[::2], "weight_decay": 0.1}, {"params": mine[1::2], "lr": 1e-4}],
        lr=1e-3,
        fused=True,
        capturable=torch.cuda.is_available(),
    )


class Hooked:
    """The first of every two optimizers has a hook, so a kernel cannot take its step."""

    def __init__(self):
        self.made = 0

    def __call__(self, parameters):
        made = sgd(parameters)
        if self.made % 2 == 0:
            made.register_step_post_hook(lambda *_: None)
        self.made += 1
        return made


CASES = {
    "one bucket": {},
    "buckets": {"buckets": 4},
    "adamw": {"optimizer": adamw, "buckets": 3},
    "groups": {"optimizer": groups, "buckets": 3},
    "torch's own step": {"optimizer": plain},
    "one rank is hooked": {"optimizer": Hooked(), "buckets": 3},
    "channels last": {"factory": convolutions, "buckets": 3},
    "frozen": {"factory": frozen, "buckets": 2},
    "tied": {"factory": tied, "buckets": 2},
    "all at once": {"factory": at_once, "bucket_nbytes": 1 << 16},
    "all at once, cut": {"factory": at_once, "buckets": 3},
    "added up": {"accumulate": 2, "buckets": 2},
    "clipped": {"clip_norm": 0.1, "buckets": 2},
    "narrow": {"wire": torch.bfloat16, "buckets": 2},
    "bfloat16": {"autocast": torch.bfloat16, "buckets": 2},
    "float16": {"autocast": torch.float16, "buckets": 2},
}


def batches(factory):
    return cases.batches(STEPS, shape=(3, 8, 8) if factory is convolutions else (8,))


def state_of(module):
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def trained(two, exchange, factory=wide, optimizer=sgd, **options):
    """Losses and weights; on both ranks the same."""
    static = StaticDataParallel(
        factory, cases.cross_entropy, two, optimizer=optimizer, exchange=exchange, **options
    )
    with static:
        assert static.exchange == exchange
        losses = cases.trained(static, batches(factory))
        first, other = map(state_of, static.modules())
        cases.assert_same(first, other)
        numbers = range(len(static._members[0].buckets))
        direct = sum(len(static._members[0].direct(k)) for k in numbers)
    return losses, first, direct


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Small gradients, too, go through the host in parts; not all are whole."""
    monkeypatch.setattr(transport, "PART_NBYTES", 6000)


@pytest.mark.parametrize("way", ["peer", "host"])
@pytest.mark.parametrize("name", CASES)
def test_copies_train_to_the_bytes_of_an_all_reduce(device, two, name, way):
    by_copies = replace(two, transport=way)
    losses, weights, direct = trained(by_copies, "copy", **CASES[name])
    other_losses, other_weights, none = trained(two, "nccl", **CASES[name])
    assert losses == other_losses
    cases.assert_same(weights, other_weights)
    assert not none
    gathered = {
        "torch's own step",
        "one rank is hooked",
        "added up",
        "clipped",
        "narrow",
        "float16",
    }
    if way == "host":
        gathered |= {"one bucket", "all at once"}  # which are the last
    assert bool(direct) is (device == "cuda" and name not in gathered)


@pytest.mark.parametrize("way", ["peer", "host"])
def test_copies_can_be_compiled_again(two, way):
    given, by_copies = cases.batches(6), replace(two, transport=way)
    with StaticDataParallel(
        wide, cases.cross_entropy, by_copies, optimizer=sgd, exchange="copy"
    ) as static:
        first = cases.trained(static, given[:3])
        static.compile(given[0])
        again = cases.trained(static, given[3:])
    whole, *_ = trained(two, "nccl")
    assert [*first, *again] == pytest.approx(whole[:6], rel=1e-5)
