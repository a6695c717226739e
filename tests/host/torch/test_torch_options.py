"""Options of a step against plain torch: accumulation, clipping, autocast, schedules, the wire."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from trlow.errors import UsageError  # noqa: E402
from trlow.torch import StaticDataParallel  # noqa: E402

pytestmark = pytest.mark.timeout(60)
STEPS = 20


def static_of(factory=cases.mlp, ranks=2, **options):
    options = {"optimizer": cases.adamw, "buckets": 2, **options}
    loss = options.pop("loss", cases.cross_entropy)
    return StaticDataParallel(factory, loss, cases.host(ranks), **options)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def joined(given, number):
    """Batches ``number`` times as large."""
    groups = [given[i : i + number] for i in range(0, len(given), number)]
    return [tuple(map(torch.cat, zip(*group, strict=True))) for group in groups]


# ------------------------------------------------------------------------------ accumulate, clip


@pytest.mark.parametrize("accumulate", [2, 3])
def test_accumulated_steps_are_one_of_a_larger_batch(accumulate):
    given = cases.batches(6 * accumulate)
    _, state = cases.plain(cases.mlp, cases.sgd, joined(given, accumulate))
    with static_of(optimizer=cases.sgd, accumulate=accumulate) as static:
        static.compile(given[0])
        for number, batch in enumerate(given, 1):
            before = static.state_dict()
            static.step(batch)
            same = torch.equal(before["0.weight"], static.state_dict()["0.weight"])
            assert same == (number % accumulate != 0)
        cases.assert_close(static.state_dict(), state)
        cases.assert_ranks_same(static)


def test_the_loss_of_every_micro_step_is_its_own():
    given = cases.batches(4)
    with static_of(optimizer=lambda p: torch.optim.SGD(p, lr=0.0), accumulate=2) as static:
        mine = cases.trained(static, given)
    module = cases.mlp()
    want = [cases.cross_entropy(module, batch).item() for batch in given]
    torch.testing.assert_close(mine, want, **cases.LOSSES)


@pytest.mark.parametrize("accumulate", [0, -1, 1.5, True, "2"])
def test_an_accumulation_that_is_no_count_is_refused(accumulate):
    with pytest.raises(UsageError, match="accumulate must be an int of at least 1"):
        static_of(accumulate=accumulate)


@pytest.mark.parametrize(("clip", "ranks"), [(0.1, 1), (0.1, 4), (1e9, 4)])
def test_clipping_is_that_of_torch(clip, ranks):
    """The norm is that of the whole batch's gradient, over all buckets; far above it, nothing."""
    given = cases.batches(STEPS)
    _, state = cases.plain(cases.mlp, cases.sgd, given, clip=clip)
    _, without = cases.plain(cases.mlp, cases.sgd, given)
    with static_of(ranks=ranks, optimizer=cases.sgd, clip_norm=clip) as static:
        cases.trained(static, given)
        cases.assert_close(static.state_dict(), state)
        cases.assert_ranks_same(static)
        if clip < 1:
            with pytest.raises(AssertionError):
                cases.assert_close(static.state_dict(), without)


@pytest.mark.parametrize("clip", [0, -1.0, float("nan"), "1"])
def test_a_norm_that_is_no_number_above_0_is_refused(clip):
    with pytest.raises(UsageError, match="clip_norm"):
        static_of(clip_norm=clip)


def test_clipping_and_accumulating_together():
    given = cases.batches(12)
    _, state = cases.plain(cases.mlp, cases.sgd, joined(given, 3), clip=0.1)
    with static_of(optimizer=cases.sgd, clip_norm=0.1, accumulate=3) as static:
        cases.trained(static, given)
        cases.assert_close(static.state_dict(), state)


# ------------------------------------------------------------------------------ autocast


def test_autocast_to_bfloat16_trains_float32_weights():
    given = cases.batches(STEPS)
    losses, _ = cases.plain(cases.mlp, cases.adamw, given)
    seen = []

    def loss(module, batch):
        out = module(batch[0])
        seen.append(out.dtype)
        return nn.functional.cross_entropy(out.float(), batch[1])

    with static_of(loss=loss, autocast=torch.bfloat16) as static:
        mine = cases.trained(static, given)
        assert set(seen) == {torch.bfloat16}
        assert {each.dtype for each in static.module.parameters()} == {torch.float32}
        cases.assert_ranks_same(static)
    # 8 bits of a factor: a hundredth of a loss of about 1.
    torch.testing.assert_close(mine, losses, rtol=3e-2, atol=3e-2)
    assert mine != losses
    assert mine[-1] < mine[0]


def scales(static):
    static.synchronize()  # a loss that was read says of rank 0 alone that its step is done
    return [float(member.update.scale) for member in static._members]


def test_autocast_to_float16_skips_a_step_that_overflows_and_halves_the_scale_on_all_ranks():
    """One row of rank 0 overflows; every rank skips, and the next steps go on."""
    given = cases.batches(8)
    with static_of(autocast=torch.float16, optimizer=fused) as static:
        static.compile(given[0])
        assert scales(static) == [65536.0] * 2
        for batch in given[:3]:
            static.step(batch)
        before = static.state_dict()
        history = static.optimizer_state_dict()
        data, labels = given[3]
        data = data.clone()
        data[0] = 1e30
        static.step((data, labels)).item()
        cases.assert_same(static.state_dict(), before)
        for index, values in static.optimizer_state_dict()["state"].items():
            cases.assert_same(values, history["state"][index])
        assert scales(static) == [32768.0] * 2
        losses = [static.step(batch).item() for batch in given[4:]]
        assert scales(static) == [32768.0] * 2
        assert all(loss == loss for loss in losses)
        assert not torch.equal(static.state_dict()["0.weight"], before["0.weight"])
        cases.assert_ranks_same(static)


def test_the_loss_scale_leaves_no_trace_in_losses_or_weights():
    given = cases.batches(STEPS)
    losses, state = cases.plain(cases.mlp, fused, given)
    with static_of(autocast=torch.float16, optimizer=fused) as static:
        mine = cases.trained(static, given)
        torch.testing.assert_close(mine, losses, rtol=1e-2, atol=1e-2)  # 11 bits of a factor
        for name, tensor in static.state_dict().items():
            # A rate of 1e-2 in each of 20 steps; the sign of a gradient near zero may differ.
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=2e-2)


def test_float16_goes_on_with_its_scale_after_a_compile():
    given = cases.batches(3)
    with static_of(autocast=torch.float16, optimizer=fused) as static:
        static.compile(given[0])
        static.step((given[0][0] * 6e4, given[0][1])).item()
        assert scales(static) == [32768.0] * 2
        static.compile(given[0])
        assert scales(static) == [32768.0] * 2


def test_float16_with_an_optimizer_that_cannot_skip_is_refused_with_the_remedy():
    with pytest.raises(UsageError, match=r"AdamW can do that with fused=True only"):
        static_of(autocast=torch.float16)


@pytest.mark.parametrize(
    ("option", "value"), [("autocast", torch.float64), ("autocast", "bf16"), ("wire", torch.int8)]
)
def test_an_unknown_dtype_is_refused_with_the_known_ones(option, value):
    with pytest.raises(UsageError, match=rf"{option}=.*choose one of None, torch\.bfloat16"):
        static_of(**{option: value})


# ------------------------------------------------------------------------------ schedules

SCHEDULES = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=STEPS + 1, cycle_momentum=False
    ),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.CosineAnnealingLR(o, 15)],
        [5],
    ),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_torch_gives_the_weights_of_plain_torch(name):
    """Bit for bit on one rank. A warning of the schedule would be an error here."""
    given = cases.batches(STEPS)
    make = SCHEDULES[name]
    _, state = cases.plain(cases.mlp, cases.sgd, given, schedule=make)
    _, constant = cases.plain(cases.mlp, cases.sgd, given)
    with static_of(ranks=1, optimizer=cases.sgd) as static:
        schedule = make(static.optimizer)
        static.compile(given[0])
        for batch in given:
            static.step(batch)
            schedule.step()
        cases.assert_same(static.state_dict(), state)
        assert not torch.equal(state["0.weight"], constant["0.weight"])


def test_groups_have_rates_of_their_own():
    def optimizer(parameters):
        first, *others = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.01)

    given = cases.batches(6)

    def schedule(made):
        return lr_scheduler.LambdaLR(made, [lambda _: 1.0, lambda step: 0.0 if step > 2 else 2.0])

    _, state = cases.plain(cases.mlp, optimizer, given, schedule=schedule)
    with static_of(ranks=1, optimizer=optimizer) as static:
        assert [group["lr"] for group in static.optimizer.param_groups] == [0.1, 0.01]
        made = schedule(static.optimizer)
        static.compile(given[0])
        for batch in given:
            static.step(batch)
            made.step()
        cases.assert_same(static.state_dict(), state)


def test_a_rate_set_by_hand_counts_from_the_next_step_on_every_rank():
    given = cases.batches(3)
    with static_of(ranks=4, optimizer=cases.sgd) as static:
        static.compile(given[0])
        static.step(given[0])
        before = static.state_dict()
        static.optimizer.param_groups[0]["lr"] = 0.0
        static.step(given[1])
        cases.assert_same(static.state_dict(), before)
        static.optimizer.param_groups[0]["lr"] = 0.1
        static.compile(given[0])  # a compile does not forget it
        static.step(given[2])
        assert not torch.equal(static.state_dict()["0.weight"], before["0.weight"])
        cases.assert_ranks_same(static)


# ------------------------------------------------------------------------------ dtypes, strides


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_a_short_wire_rounds_gradients_and_nothing_else(wire):
    given = cases.batches(STEPS)
    losses, state = cases.plain(cases.mlp, cases.sgd, given)
    with static_of(ranks=4, optimizer=cases.sgd, wire=wire) as static:
        mine = cases.trained(static, given)
        cases.assert_ranks_same(static)
        now = static.state_dict()
    # A gradient of about 0.1 is off by 2**-9 of itself in each of 20 steps of 0.05 / (1 - 0.9).
    for name, tensor in now.items():
        torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-2)
    torch.testing.assert_close(mine, losses, rtol=0, atol=1e-2)
    assert not torch.equal(now["0.weight"], state["0.weight"])


@pytest.mark.parametrize("options", [{"clip_norm": 0.1}, {"accumulate": 2}])
def test_a_short_wire_goes_with_clipping_and_accumulation(options):
    number = options.get("accumulate", 1)
    given = cases.batches(6 * number)
    clip = options.get("clip_norm")
    _, state = cases.plain(cases.mlp, cases.sgd, joined(given, number), clip=clip)
    with static_of(optimizer=cases.sgd, wire=torch.bfloat16, **options) as static:
        cases.trained(static, given)
        for name, tensor in static.state_dict().items():
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-2)


def last_format(factory):
    return lambda: factory().to(memory_format=torch.channels_last)


def test_channels_last_stays_and_changes_no_result():
    given = cases.batches(5, shape=(3, 8, 8))
    given = [(d.to(memory_format=torch.channels_last), labels) for d, labels in given]
    _, state = cases.plain(last_format(cases.convnet), cases.sgd, given)
    seen = []

    def loss(module, batch):
        seen.append(batch[0].is_contiguous(memory_format=torch.channels_last))
        return cases.cross_entropy(module, batch)

    with static_of(last_format(cases.convnet), optimizer=cases.sgd, loss=loss) as static:

        def strides():
            return [p.stride() for module in static.modules() for p in module.parameters()]

        before = strides()
        assert static.module[0].weight.stride() == (27, 1, 9, 3)
        cases.trained(static, given)
        assert strides() == before
        cases.assert_close(static.state_dict(), state)
        cases.assert_ranks_same(static)
        assert all(seen)
    assert static.module[0].weight.stride() == (27, 1, 9, 3)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.out = nn.Linear(16, 32, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens):
        return self.out(self.embedding(tokens).mean(1))


def tied():
    torch.manual_seed(0)
    return Tied()


def test_tied_weights_stay_one():
    given = cases.token_batches(STEPS)
    _, state = cases.plain(tied, cases.sgd, given)
    with static_of(tied, optimizer=cases.sgd) as static:
        cases.trained(static, given)
        module = static.module
        assert module.out.weight is module.embedding.weight
        cases.assert_close(static.state_dict(), state)
        cases.assert_ranks_same(static)
    assert static.module.out.weight is static.module.embedding.weight


def frozen():
    module = cases.mlp()
    module[0].requires_grad_(False)
    return module


def test_frozen_parameters_keep_their_bytes():
    given = cases.batches(STEPS)
    trainable = lambda p: cases.adamw([each for each in p if each.requires_grad])  # noqa: E731
    _, state = cases.plain(frozen, trainable, given)
    with static_of(frozen) as static:
        cases.trained(static, given)
        mine = static.state_dict()
        assert torch.equal(mine["0.weight"], cases.mlp()[0].weight)
        cases.assert_close(mine, state)
        cases.assert_ranks_same(static)


class Mixed(nn.Module):
    """Layers in float32, then bfloat16, then float32."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.middle = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.last = nn.Linear(16, cases.CLASSES)

    def forward(self, x):
        return self.last(self.middle(self.first(x).to(torch.bfloat16)).float())


def mixed():
    torch.manual_seed(0)
    return Mixed()


@pytest.mark.parametrize("options", [{}, {"wire": torch.bfloat16}, {"clip_norm": 0.5}])
def test_layers_of_several_dtypes_train_in_buckets_of_one_each(options):
    given = cases.batches(STEPS)
    losses, _ = cases.plain(mixed, cases.sgd, given, clip=options.get("clip_norm"))
    with static_of(mixed, optimizer=cases.sgd, **options) as static:
        mine = cases.trained(static, given)
        cases.assert_ranks_same(static)
        parameters = dict(static.module.named_parameters())
        assert parameters["middle.weight"].dtype is torch.bfloat16
        for bucket in static._members[0].buckets:
            assert len({parameters[name].dtype for name in bucket.names}) == 1
    torch.testing.assert_close(mine, losses, rtol=3e-2, atol=3e-2)  # bfloat16 weights
    assert mine[-1] < mine[0]


def test_a_parameter_of_float64_is_refused_by_name():
    with static_of(lambda: cases.mlp().double()) as static:
        data, labels = cases.batches(1)[0]
        with pytest.raises(UsageError, match=r"parameter 0\.weight is torch\.float64"):
            static.compile((data.double(), labels))


def test_a_batch_of_nested_dicts_and_lists_reaches_the_loss_as_it_is():
    def loss(module, batch):
        assert list(batch) == ["x", "rest"]
        return cases.cross_entropy(module, (batch["x"], batch["rest"][0]))

    given = cases.batches(5)
    _, state = cases.plain(cases.mlp, cases.sgd, given)
    with static_of(optimizer=cases.sgd, loss=loss) as static:
        nested = [{"x": data, "rest": [labels]} for data, labels in given]
        cases.trained(static, nested)
        cases.assert_close(static.state_dict(), state)
