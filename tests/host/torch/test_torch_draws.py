"""Random numbers of a step on the host device, where torch draws them in every replay."""

from __future__ import annotations

import torch
import torch_cases as cases
from torch import nn

from trlow.torch import StaticDataParallel
from trlow.torch.batches import BatchShape
from trlow.torch.measure import may_update_early, readiness
from trlow.torch.member import Member
from trlow.torch.work import Work

BATCH = cases.batches(1)[0]


def noisy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, cases.CLASSES))


def member_of(factory):
    return Member(
        0,
        torch.device("cpu"),
        Work(factory, cases.cross_entropy, cases.sgd, None, 1, None, 1),
    )


def test_a_step_draws_what_torch_would_and_compile_nothing():
    module = noisy()
    optimizer = cases.sgd(module.parameters())
    torch.manual_seed(7)
    wanted = []
    for _ in range(6):
        loss = cases.cross_entropy(module, BATCH)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    state = torch.get_rng_state()
    with StaticDataParallel(
        noisy, cases.cross_entropy, cases.host(1), optimizer=cases.sgd
    ) as static:
        torch.manual_seed(7)
        static.compile(BATCH)
        found = [static.step(BATCH).item() for _ in range(6)]
    torch.testing.assert_close(found, wanted, **cases.LOSSES)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_draws_is_noticed():
    shape = BatchShape(BATCH, 1)
    for factory, draws in ((noisy, True), (cases.mlp, False)):
        member = member_of(factory)
        readiness([member], shape, shape.cut(BATCH))
        assert member.draws is draws


def test_numbers_that_differ_do_not_pass_for_weights_that_are_needed():
    """The trial of early updates compares two steps, which have to draw the same."""
    shape = BatchShape(BATCH, 1)
    member = member_of(noisy)
    readiness([member], shape, shape.cut(BATCH))
    assert may_update_early(member, shape, shape.cut(BATCH)[0])
