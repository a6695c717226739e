"""Whether a weight may change as soon as its gradient is ready."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from trlow.torch.batches import BatchShape  # noqa: E402
from trlow.torch.measure import may_update_early  # noqa: E402
from trlow.torch.member import Member  # noqa: E402
from trlow.torch.work import Work  # noqa: E402

pytestmark = pytest.mark.timeout(60)


class Twice(nn.Module):
    """One weight, used in two places; ``how`` may take one of them out of its gradient."""

    def __init__(self, how):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, cases.CLASSES)
        self.square = nn.Parameter(torch.randn(8, 8))
        self.how = how

    def forward(self, rows):
        hidden = self.first(rows) @ self.how(self.square)
        return self.last((hidden @ self.square).relu())


class Masks(torch.autograd.Function):
    """Its backward compares a weight that autograd does not know of: no NaN comes of it."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.weight = weight.data
        return rows * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (ctx.weight.abs() >= 0), None


class Masked(nn.Module):
    """Reads ``scale`` in the backward of ``first``, behind its own gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, cases.CLASSES)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, rows):
        hidden = Masks.apply(self.first(rows), self.scale.detach())
        return self.last(hidden * self.scale)


class Recomputed(nn.Module):
    """Its middle is computed again in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, cases.CLASSES)
        self.middle = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, rows):
        return self.last(checkpoint(self.middle, self.first(rows), use_reentrant=False))


MODULES = {
    "mlp": (cases.mlp, True),
    "batch norm": (cases.normed, True),
    "convolutions": (cases.convnet, True),
    "a shared weight": (lambda: Twice(lambda weight: weight), True),
    "a copy": (lambda: Twice(lambda weight: weight.detach().clone()), True),
    "detached": (lambda: Twice(lambda weight: weight.detach()), False),
    "a mask": (Masked, False),
    "data": (lambda: Twice(lambda weight: weight.data), False),
    "checkpointed": (Recomputed, True),
}


def member_of(factory, **options):
    given = {"autocast": None, "accumulate": 1, "clip_norm": None, "world_size": 1, **options}
    work = Work(factory, cases.cross_entropy, cases.adamw, **given)
    return Member(0, torch.device("cpu"), work)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_weight_may_change_early_unless_it_is_still_needed(name, autocast):
    factory, early = MODULES[name]
    (batch,) = cases.batches(1, shape=(3, 8, 8)) if name == "convolutions" else cases.batches(1)
    member = member_of(factory, autocast=autocast)
    shape = BatchShape(batch, 1)
    before = {name: weight.detach().clone() for name, weight in member.trainable.items()}
    # Under autocast a product reads a cast copy, of its own memory.
    copied = autocast is not None and name != "a mask"
    assert may_update_early(member, shape, shape.cut(batch)[0]) is (early or copied)
    assert all(parameter.grad is None for parameter in member.trainable.values())
    cases.assert_same(member.trainable, before)
    member.forward_backward(shape, shape.cut(batch)[0])  # nothing is probed any more
