"""Running statistics of batch norms: the mean of the ranks' own, or rank 0's, after each batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch import nn  # noqa: E402

from trlow.errors import UsageError  # noqa: E402
from trlow.torch import StaticDataParallel  # noqa: E402

pytestmark = pytest.mark.timeout(60)
RANKS = 4


def still(parameters):
    return torch.optim.SGD(parameters, lr=0.0)


def static_of(factory=cases.normed, **options):
    options = {"optimizer": still, **options}
    return StaticDataParallel(factory, cases.cross_entropy, cases.host(RANKS), **options)


def own(factory, state, batch):
    """What each rank's own norm would hold after its part of ``batch``, from ``state``."""
    found = []
    for part in batch[0].chunk(RANKS):
        module = factory().train()
        module.load_state_dict(state)
        module(part)
        found.append({k: v for k, v in module.state_dict().items() if "running" in k})
    return found


@pytest.mark.parametrize("statistics", ["mean", "rank0"])
def test_statistics_after_each_batch(statistics):
    with static_of(statistics=statistics) as static:
        given = cases.batches(6)
        static.compile(given[0])
        for batch in given:
            before = static.state_dict()
            static.step(batch)
            each = own(cases.normed, before, batch)
            state = static.state_dict()
            for name, first in each[0].items():
                if statistics == "rank0":
                    assert torch.equal(state[name], first), name
                else:
                    mean = torch.stack([one[name] for one in each]).mean(0)
                    torch.testing.assert_close(state[name], mean, rtol=1e-6, atol=1e-7)
                    assert not torch.equal(state[name], first)  # so that the two ways differ
            cases.assert_ranks_same(static)


def test_batches_are_counted_from_the_first_step():
    with static_of() as static:
        given = cases.batches(5)
        static.compile(given[0])
        assert static.state_dict()["1.num_batches_tracked"] == 0
        cases.trained(static, given)
        assert [int(m[1].num_batches_tracked) for m in static.modules()] == [5] * RANKS


def test_batches_go_on_being_counted_behind_a_loaded_state():
    module = cases.normed()
    module[1].num_batches_tracked.fill_(100)
    with static_of() as static:
        given = cases.batches(3)
        static.load_state_dict(module.state_dict())
        cases.trained(static, given)
        static.compile(given[0])  # again: what was counted stays
        cases.trained(static, given[:2])
        assert [int(m[1].num_batches_tracked) for m in static.modules()] == [105] * RANKS


def test_every_micro_step_of_an_accumulation_is_a_batch():
    with static_of(accumulate=2, statistics="rank0") as static:
        given = cases.batches(4)
        state = cases.normed().state_dict()
        for batch in given:
            state = {**state, **own(cases.normed, state, batch)[0]}
        cases.trained(static, given)
        mine = static.state_dict()
        assert mine["1.num_batches_tracked"] == 4
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(mine[name], state[name])


def test_a_norm_without_running_statistics_has_none_to_reduce():
    def factory():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 4)
        )

    with static_of(factory, optimizer=cases.adamw) as static:
        losses = cases.trained(static, cases.batches(20))
        assert losses[-1] < losses[0]
        cases.assert_ranks_same(static)


def test_a_norm_in_evaluation_mode_keeps_its_statistics():
    """``static.module.eval()`` between steps: the module is the caller's to look with."""
    with static_of(optimizer=cases.adamw) as static:
        given = cases.batches(4)
        cases.trained(static, given)
        before = static.state_dict()
        module = static.module
        module.eval()
        with torch.no_grad():
            module(given[0][0])
        module.train()
        cases.assert_same(before, static.state_dict())


def test_sync_batch_norm_is_refused_with_the_reason_and_its_name():
    def factory():
        return nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.SyncBatchNorm(4)))

    with pytest.raises(UsageError, match=r"1\.0 is a SyncBatchNorm.*torch\.distributed"):
        static_of(factory)


def test_statistics_of_another_name_are_refused():
    with pytest.raises(UsageError, match=r"statistics='sum': choose one of mean, rank0"):
        static_of(statistics="sum")
