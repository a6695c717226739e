"""What cannot be is refused by its name, before anything runs, and leaves a module that works."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from torch import nn  # noqa: E402

from trlow.errors import SettingsError, UsageError  # noqa: E402
from trlow.torch import StaticDataParallel  # noqa: E402
from trlow.torch.batches import BatchShape  # noqa: E402

pytestmark = pytest.mark.timeout(60)
BATCH = cases.batches(1)[0]


def static_of(factory=cases.mlp, loss=cases.cross_entropy, ranks=2, **options):
    options = {"optimizer": cases.adamw, **options}
    return StaticDataParallel(factory, loss, cases.host(ranks), **options)


@pytest.fixture(scope="module")
def ready():
    """Compiled; what is refused here must not have changed it."""
    with static_of() as static:
        static.compile(BATCH)
        yield static


WRONG = {
    "fewer rows": ((BATCH[0][:8], BATCH[1][:8]), r"batch\[0\] is torch\.float32 \(8, 8\).*16, 8"),
    "one tensor alone": ((BATCH[0], BATCH[1][:8]), r"batch\[1\] is torch\.int64 \(8,\)"),
    "another width": ((BATCH[0][:, :4], BATCH[1]), r"batch\[0\] is torch\.float32 \(16, 4\)"),
    "another dtype": ((BATCH[0].double(), BATCH[1]), r"batch\[0\] is torch\.float64"),
    "a list": (list(BATCH), "the batch is built like"),
    "one more": ((*BATCH, BATCH[1]), "the batch is built like"),
    "a dict": ({"x": BATCH[0], "y": BATCH[1]}, "the batch is built like"),
    "a number": ((BATCH[0], 3), r"batch\[1\] is a int, no tensor"),
}


def test_a_nested_example_refuses_a_flat_batch_of_as_many_tensors():
    nested = BatchShape([list(BATCH), ()], 2)
    assert len(nested.cut([list(BATCH), ()])[0]) == 2
    with pytest.raises(UsageError, match="the batch is built like"):
        nested.cut(list(BATCH))


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_unlike_the_example_is_refused_by_its_place(ready, name):
    batch, message = WRONG[name]
    before = ready.state_dict()
    with pytest.raises(UsageError, match=message):
        ready.step(batch)
    cases.assert_same(ready.state_dict(), before)
    assert ready.step(BATCH).item() > 0


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([BATCH], "a list of 2 batches"),
        (BATCH[0], "a list of 2 batches"),
        ([BATCH, BATCH], r"batch\[0\] is torch\.float32 \(16, 8\).*\(8, 8\)"),
        ([(BATCH[0][:8], BATCH[1][:8]), BATCH[0][8:]], "the batch is built like"),
    ],
)
def test_shards_unlike_the_example_are_refused(ready, shards, message):
    with pytest.raises(UsageError, match=message):
        ready.step(shards=shards)


def test_a_batch_and_shards_or_neither_are_refused(ready):
    for arguments in ({}, {"batch": BATCH, "shards": [BATCH, BATCH]}):
        with pytest.raises(UsageError, match="a batch, or shards="):
            ready.step(**arguments)


EXAMPLES = {
    "rows that do not divide": ((BATCH[0][:7], BATCH[1]), r"batch\[0\].*\(7, 8\).*the 2 ranks"),
    "no rows": ((BATCH[0][:0], BATCH[1][:0]), r"batch\[0\] has shape \(0, 8\)"),
    "a scalar": ((BATCH[0], torch.tensor(1)), r"batch\[1\] has shape \(\)"),
    "a number": ((BATCH[0], 1.5), r"batch\[1\] is a float; a batch holds tensors only"),
    "a nested string": ({"x": [BATCH[0], "a"]}, r"batch\['x'\]\[1\] is a str"),
    "nothing": ((), "the example batch has no tensor"),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_that_cannot_be_cut_is_refused_and_what_was_compiled_goes_on(ready, name):
    batch, message = EXAMPLES[name]
    with pytest.raises(UsageError, match=message):
        ready.compile(batch)
    assert ready.step(BATCH).item() > 0


def test_a_step_before_compile_is_refused():
    with static_of() as static:
        with pytest.raises(UsageError, match=r"call compile\(example_batch\) first"):
            static.step(BATCH)
        with pytest.raises(UsageError, match=r"call compile\(example_batch\) first"):
            static.load_optimizer_state_dict({"state": {}, "param_groups": []})


def test_a_module_with_nothing_to_train_is_refused():
    for factory in (nn.ReLU, lambda: cases.mlp().requires_grad_(False)):
        with pytest.raises(UsageError, match="no parameter that requires a gradient"):
            static_of(factory)


def test_momentum_that_begins_in_another_way_is_refused():
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)

    with pytest.raises(UsageError, match=r"SGD with dampening=0\.5"):
        static_of(optimizer=optimizer)


def test_ranks_that_are_not_there_are_refused():
    from trlow import Settings

    with pytest.raises(SettingsError, match="beyond this machine"):
        StaticDataParallel(
            cases.mlp,
            cases.cross_entropy,
            Settings(device="host", gpus="0-7"),
            optimizer=cases.adamw,
        )


# -------------------------------------- what compile finds out: the weights stay, and a retry works


class Partly(nn.Module):
    """Uses its second layer if told to."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)
        self.all = False

    def forward(self, x):
        return self.used(x) + (self.unused(x) if self.all else 0)


def test_a_parameter_without_gradient_is_refused_by_name_and_remedy():
    made = []

    def factory():
        made.append(Partly())
        return made[-1]

    with static_of(factory) as static:
        before = static.state_dict()
        message = (
            r"2 parameters got no gradient, unused\.weight, unused\.bias.*requires_grad_\(False\)"
        )
        with pytest.raises(UsageError, match=message):
            static.compile(BATCH)
        cases.assert_same(static.state_dict(), before)
        for module in made:
            module.all = True
        static.compile(BATCH)
        cases.assert_same(static.state_dict(), before)
        assert static.step(BATCH).item() > 0


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda module, batch: module(batch[0]), r"\(8, 4\)"),
        (lambda module, batch: cases.cross_entropy(module, batch).item(), "float"),
        (lambda module, batch: None, "NoneType"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused_with_what_it_was(loss, got):
    with static_of(loss=loss) as static:
        with pytest.raises(UsageError, match=rf"must return a scalar tensor, it returned {got}"):
            static.compile(BATCH)


def test_a_loss_of_one_element_in_any_shape_is_a_scalar():
    with static_of(loss=lambda m, b: cases.cross_entropy(m, b).view(1, 1)) as static:
        assert cases.trained(static, [BATCH])[0] > 0


def test_a_refused_compile_of_the_second_rank_leaves_the_weights_of_the_first():
    """The measured step of rank 0 has run by then, its optimizer's too."""

    def loss(module, batch):
        if module is static._members[1].module:
            raise ValueError("not here")
        return cases.cross_entropy(module, batch)

    with static_of(loss=loss) as static:
        before = static.state_dict()
        with pytest.raises(ValueError, match="not here"):
            static.compile(BATCH)
        cases.assert_same(static.state_dict(), before)
        cases.assert_ranks_same(static)
