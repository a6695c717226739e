"""What compile, saving, loading and closing do to weights, buffers and the optimizer."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402

from trlow.errors import UsageError  # noqa: E402
from trlow.torch import StaticDataParallel  # noqa: E402

pytestmark = pytest.mark.timeout(60)
OPTIMIZERS = {
    "AdamW": cases.adamw,
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD, momentum": cases.sgd,
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=2),
}


def static_of(factory=cases.normed, ranks=2, **options):
    options = {"optimizer": cases.adamw, **options}
    return StaticDataParallel(factory, cases.cross_entropy, cases.host(ranks), **options)


# ------------------------------------------------------------------------------ compile


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_after_compile_the_optimizer_begins_as_a_new_one_does(optimizer):
    """The measured step and the warm-up leave no history: one rank gives plain torch's bytes."""
    given = cases.batches(5)
    make = OPTIMIZERS[optimizer]
    _, state = cases.plain(cases.mlp, make, given)
    with static_of(cases.mlp, 1, optimizer=make) as static:
        static.compile(given[0])
        cases.assert_same(static.state_dict(), cases.mlp().state_dict())
        cases.trained(static, given)
        cases.assert_same(static.state_dict(), state)


def test_compile_leaves_weights_and_buffers():
    module = cases.normed()
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.add_(1)
    with static_of() as static:
        static.load_state_dict(module.state_dict())
        for _ in range(2):
            static.compile(cases.batches(1)[0])
            cases.assert_same(static.state_dict(), module.state_dict())
            cases.assert_ranks_same(static)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD, momentum", "NAdam", "Rprop"])
def test_compile_in_the_middle_goes_on_with_the_optimizers_history(optimizer):
    """For batches of another size, say: a training goes on as if it had not been compiled again."""
    given = cases.batches(8)
    states = []
    for again in (False, True):
        with static_of(optimizer=OPTIMIZERS[optimizer]) as static:
            cases.trained(static, given[:4])
            if again:
                static.compile(cases.batches(1, rows=4)[0])
                static.compile(given[0])
            cases.trained(static, given[4:])
            states.append(static.state_dict())
    cases.assert_same(*states)


def test_compile_for_another_shape_takes_batches_of_that_shape():
    with static_of() as static:
        cases.trained(static, cases.batches(2))
        other = cases.batches(2, rows=6)
        static.compile(other[0])
        assert len([static.step(batch).item() for batch in other]) == 2
        with pytest.raises(UsageError, match="compiled for"):
            static.step(cases.batches(1)[0])


# ------------------------------------------------------------------------------ state dicts


def test_state_dicts_are_interchangeable_with_the_plain_modules():
    given = cases.batches(4)
    with static_of() as static:
        cases.trained(static, given)
        state = static.state_dict()
        module = cases.normed()
        module.load_state_dict(state)  # strict
        cases.assert_same(module.state_dict(), state)
        cases.assert_same(static.module.state_dict(), state)
        static.step(given[0])
        cases.assert_same(module.state_dict(), state)  # a copy: a step does not change it
        static.load_state_dict(module.state_dict())
        cases.assert_same(static.state_dict(), state)
        cases.assert_ranks_same(static)


def test_a_state_loaded_before_compile_is_the_one_trained_from():
    given = cases.batches(4)
    with static_of(cases.mlp) as first:
        cases.trained(first, given)
        state = first.state_dict()
    after = []
    for before in (True, False):
        with static_of(cases.mlp) as static:
            if not before:
                static.compile(given[0])
            static.load_state_dict(state)
            cases.assert_same(static.state_dict(), state)
            cases.trained(static, given)
            after.append(static.state_dict())
    cases.assert_same(*after)
    assert not torch.equal(after[0]["0.weight"], state["0.weight"])


def test_after_close_module_and_state_dict_work_and_lie_in_their_own_memory():
    given = cases.batches(3)
    with static_of() as static:
        cases.trained(static, given)
        state = static.state_dict()
    cases.assert_same(static.state_dict(), state)
    module = static.module
    cases.assert_same(module.state_dict(), state)
    optimizer = cases.sgd(module.parameters())
    for batch in given:  # plain torch goes on with it
        optimizer.zero_grad()
        cases.cross_entropy(module, batch).backward()
        optimizer.step()
    copy.deepcopy(module).eval()(given[0][0])
    static.load_state_dict(state)
    cases.assert_same(static.module.state_dict(), state)


def test_a_state_of_another_module_is_refused_by_name():
    with static_of() as static:
        state = static.state_dict()
        with pytest.raises(UsageError, match=r"0\.weight.*\(1, 2\).*\(16, 8\)"):
            static.load_state_dict({**state, "0.weight": torch.zeros(1, 2)})
        with pytest.raises(UsageError, match="other"):
            static.load_state_dict({**state, "other": torch.zeros(1)})
        cases.assert_same(static.state_dict(), state)


def test_a_refused_state_changes_nothing():
    """The wrong tensor is the last one: none of those before it has been copied."""
    with static_of() as static:
        state = static.state_dict()
        wrong = {name: tensor + 1 for name, tensor in state.items()}
        wrong["3.bias"] = torch.zeros(1)
        with pytest.raises(UsageError, match=r"3\.bias"):
            static.load_state_dict(wrong)
        cases.assert_same(static.state_dict(), state)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD, momentum", "NAdam"])
def test_a_saved_training_goes_on_like_one_that_was_not_interrupted(optimizer, tmp_path):
    given = cases.batches(8)
    options = {"optimizer": OPTIMIZERS[optimizer]}
    with static_of(**options) as static:
        cases.trained(static, given)
        whole = static.state_dict()
    with static_of(**options) as static:
        cases.trained(static, given[:4])
        static.optimizer.param_groups[0]["lr"] *= 1.0
        saved = {"module": static.state_dict(), "optimizer": static.optimizer_state_dict()}
        torch.save(saved, tmp_path / "saved.pt")
    with static_of(**options) as static:
        loaded = torch.load(tmp_path / "saved.pt")
        static.compile(given[0])
        static.load_state_dict(loaded["module"])
        static.load_optimizer_state_dict(loaded["optimizer"])
        cases.trained(static, given[4:])
        cases.assert_same(static.state_dict(), whole)


def test_an_optimizer_state_is_that_of_plain_torch():
    """Both ways: saved here and loaded there, with the rate that counts."""
    given = cases.batches(6)
    with static_of(cases.mlp, 1) as static:
        cases.trained(static, given[:3])
        static.optimizer.param_groups[0]["lr"] = 0.5
        module = cases.mlp()
        module.load_state_dict(static.state_dict())
        optimizer = cases.adamw(module.parameters())
        optimizer.load_state_dict(static.optimizer_state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.5
        for batch in given[3:]:
            optimizer.zero_grad()
            cases.cross_entropy(module, batch).backward()
            optimizer.step()
        cases.trained(static, given[3:])
        cases.assert_same(static.state_dict(), module.state_dict())


def test_an_optimizer_state_of_other_parameters_is_refused():
    with static_of() as static, static_of(cases.transformer) as other:
        static.compile(cases.batches(1)[0])
        other.compile(cases.token_batches(1)[0])
        with pytest.raises(UsageError, match="other parameters"):
            static.load_optimizer_state_dict(other.optimizer_state_dict())


# ------------------------------------------------------------------------------ close


def test_close_twice_and_without_compile():
    static = static_of()
    static.close()
    static.close()
    with static_of() as other:
        cases.trained(other, cases.batches(2))
        other.close()
    other.close()


def test_after_close_steps_are_refused():
    with static_of() as static:
        cases.trained(static, cases.batches(2))
    for call in (static.step, static.compile):
        with pytest.raises(UsageError, match="closed; make a new StaticDataParallel"):
            call(cases.batches(1)[0])


def test_a_loss_outlives_close():
    with static_of() as static:
        static.compile(cases.batches(1)[0])
        loss = static.step(cases.batches(1)[0])
    assert loss.item() == float(loss) > 0


def test_nothing_of_a_life_stays_behind_and_the_module_has_no_hooks():
    with static_of() as static:
        cases.trained(static, cases.batches(2))
        module = static.module
    alive = [weakref.ref(part) for part in (static, *static.modules())]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())
    del static, module
    gc.collect()
    assert [part() for part in alive] == [None] * len(alive)
