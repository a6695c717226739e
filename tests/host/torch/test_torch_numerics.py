"""A step of several ranks computes what plain torch does with the whole batch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402

from trlow.torch import StaticDataParallel  # noqa: E402

pytestmark = pytest.mark.timeout(60)
STEPS = 20
CASES = {
    "mlp, AdamW": (cases.mlp, cases.adamw, cases.batches(STEPS)),
    "mlp, SGD": (cases.mlp, cases.sgd, cases.batches(STEPS)),
    "convnet": (cases.convnet, cases.adamw, cases.batches(STEPS, shape=(3, 8, 8))),
    # The bias of attention's keys has no influence, so its gradient is nothing but rounding, which
    # AdamW would make as large as any other.
    "transformer": (cases.transformer, cases.sgd, cases.token_batches(STEPS)),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_with_plain_torch_and_with_each_other(name, ranks):
    factory, optimizer, given = CASES[name]
    losses, state = cases.plain(factory, optimizer, given)
    assert losses[-1] < losses[0]
    mine = []
    with StaticDataParallel(
        factory, cases.cross_entropy, cases.host(ranks), optimizer=optimizer, buckets=3
    ) as static:
        static.compile(given[0])
        for batch in given:
            mine.append(static.step(batch).item())
            cases.assert_ranks_same(static)
        torch.testing.assert_close(mine, losses, **cases.LOSSES)
        cases.assert_close(static.state_dict(), state)


def test_a_wrong_share_would_be_seen():
    """The tolerances tell a mean over ranks from a sum: with SGD that is another rate."""
    _, _, given = CASES["mlp, SGD"]
    _, state = cases.plain(cases.mlp, cases.sgd, given)

    def doubled(module, batch):
        return 2 * cases.cross_entropy(module, batch)

    with StaticDataParallel(cases.mlp, doubled, cases.host(2), optimizer=cases.sgd) as static:
        cases.trained(static, given)
        with pytest.raises(AssertionError):
            cases.assert_close(static.state_dict(), state)


def loop(factory, optimizer, given, ranks):
    """The step's own arithmetic without trlow: gradients of 1 / ranks, added in rank order."""
    modules = [factory().train() for _ in range(ranks)]
    optimizers = [optimizer(module.parameters()) for module in modules]
    share = torch.tensor(1.0 / ranks)
    for data, labels in given:
        parts = zip(data.chunk(ranks), labels.chunk(ranks), strict=True)
        for module, part in zip(modules, parts, strict=True):
            module.zero_grad()
            torch.autograd.backward(cases.cross_entropy(module, part), share)
        for same in zip(*(module.parameters() for module in modules), strict=True):
            total = sum(parameter.grad for parameter in same)
            for parameter in same:
                parameter.grad = total.clone()
        for each in optimizers:
            each.step()
    return modules[0].state_dict()


@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_are_those_of_a_loop_bit_for_bit(name):
    factory, optimizer, given = CASES[name]
    with StaticDataParallel(
        factory, cases.cross_entropy, cases.host(4), optimizer=optimizer
    ) as static:
        cases.trained(static, given)
        cases.assert_same(static.state_dict(), loop(factory, optimizer, given, 4))


@pytest.mark.parametrize("buckets", [1, 3])
def test_runs_are_the_same_bytes_in_whatever_order_the_device_works(buckets):
    given = cases.batches(STEPS)
    found = []
    for seed in (0, 1, 2):
        with StaticDataParallel(
            cases.normed,
            cases.cross_entropy,
            cases.host(4, host_schedule_seed=seed),
            optimizer=cases.adamw,
            buckets=buckets,
        ) as static:
            found.append((cases.trained(static, given), static.state_dict()))
    for losses, state in found[1:]:
        assert losses == found[0][0]
        cases.assert_same(state, found[0][1])


def test_weights_are_those_of_rank_0_where_a_factory_draws_others():
    given = cases.batches(3)
    made = []

    def factory():
        module = cases.mlp()
        with torch.no_grad():
            module[0].weight += len(made)
        made.append(module)
        return module

    with StaticDataParallel(
        factory, cases.cross_entropy, cases.host(2), optimizer=cases.sgd
    ) as static:
        cases.assert_ranks_same(static)
        cases.assert_same(static.state_dict(), cases.mlp().state_dict())
        cases.trained(static, given)
        cases.assert_ranks_same(static)


def test_shards_are_the_batch_cut_by_the_caller():
    given = cases.batches(5)
    states = []
    for cut in (False, True):
        with StaticDataParallel(
            cases.mlp, cases.cross_entropy, cases.host(2), optimizer=cases.sgd
        ) as static:
            static.compile(given[0])
            for data, labels in given:
                if cut:
                    static.step(shards=[*zip(data.chunk(2), labels.chunk(2), strict=True)])
                else:
                    static.step((data, labels))
            states.append(static.state_dict())
    cases.assert_same(*states)


def test_each_shard_reaches_its_own_rank():
    """A rank that took another's rows would tell another loss: each has its own here."""

    def mean(module, batch):
        return module(batch).mean()

    def factory():
        module = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(module.weight)
        return module

    with StaticDataParallel(
        factory, mean, cases.host(4), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    ) as static:
        static.compile(torch.zeros(8, 1))
        assert static.step(torch.arange(8.0).view(8, 1)).item() == 3.5
        seen = [part.flatten().tolist() for part in (m.inputs[0] for m in static._members)]
        assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_losses_may_be_read_late_and_in_any_order():
    given = cases.batches(STEPS)
    losses, _ = cases.plain(cases.mlp, cases.sgd, given)
    with StaticDataParallel(
        cases.mlp, cases.cross_entropy, cases.host(2), optimizer=cases.sgd
    ) as static:
        static.compile(given[0])
        told = [static.step(batch) for batch in given]
        backwards = [float(loss) for loss in reversed(told)]
    torch.testing.assert_close(backwards[::-1], losses, **cases.LOSSES)
    assert [loss.item() for loss in told] == backwards[::-1]  # also once it is closed


def test_one_rank_needs_no_nccl():
    given = cases.batches(3)
    with StaticDataParallel(
        cases.normed, cases.cross_entropy, cases.host(1), optimizer=cases.adamw
    ) as static:
        before = static._platform.host.trlowHostCalls(b"ncclCommInitAll")
        cases.trained(static, given)
        assert "nccl" not in static._platform.libraries
        assert static._platform.host.trlowHostCalls(b"ncclCommInitAll") == before
