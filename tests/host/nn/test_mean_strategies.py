"""Training with each mean strategy: where the division happens changes nothing but rounding."""

from __future__ import annotations

import numpy as np
import pytest

from trlow.errors import ModelError, SettingsError
from trlow.nn import bn, conv, fc, flatten, gap, relu, seq
from trlow.nn.compiler import compile_model
from trlow.range_op import MEAN_STRATEGIES
from trlow.schedule import Training

pytestmark = pytest.mark.timeout(90)

NORMED = seq(conv(4, 3), bn(), relu(), conv(6, 3), relu(), gap(), fc(7))
DENSE = seq(flatten(), fc(12), relu(), fc(8), relu(), fc(7))


def trained(open_task, persistent, data, model, ranks, strategy, **training):
    """(everything persistent of each rank, history) after two epochs."""
    with open_task(model, data, ranks=ranks, batch=12, mean_strategy=strategy, **training) as task:
        history = task.fit(2)
        states = [persistent(task, rank) for rank in range(ranks)]
    losses = [(e.train_loss, e.val_loss, e.val_top1) for e in history]
    return states, losses


@pytest.mark.parametrize("replay", ["fused", "staged"])
@pytest.mark.parametrize("model", [NORMED, DENSE], ids=["cnn", "mlp"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_strategies_train_the_same_weights(
    ranks, model, replay, make_data, open_task, persistent
):
    """To the bit where 1/N is a power of two: it scales each number without rounding it."""
    data = make_data(48)
    runs = {
        strategy: trained(open_task, persistent, data, model, ranks, strategy, replay=replay)
        for strategy in MEAN_STRATEGIES
    }
    expected, losses = runs["deferred"]
    for strategy, (states, found) in runs.items():
        for state in states:
            for name, values in state.items():
                assert values.tobytes() == states[0][name].tobytes(), (strategy, name)
                if ranks == 3:  # eight steps of fp32 rounding, 1/3 being rounded first or last
                    np.testing.assert_allclose(
                        values, expected[0][name], rtol=1e-5, atol=1e-6, err_msg=name
                    )
                else:
                    assert values.tobytes() == expected[0][name].tobytes(), (strategy, name)
        np.testing.assert_allclose(found, losses, rtol=1e-5 if ranks == 3 else 1e-7)


def test_each_bucket_may_have_its_own_strategy():
    chosen = {"DEEP_COMM": "avg", "FIRST_COMM": "premulsum"}
    compiled = compile_model(
        NORMED, input_shape=(6, 6, 1), local_batch=4, world_size=2, mean_strategy=chosen
    )
    (phase, _) = compiled.programs["train"].phases
    ops = {
        stage.name: [group[0].op for group in stage.groups() if stage.name in chosen]
        for stage in phase
    }
    assert {name: ops[name] for name in chosen} == {
        "DEEP_COMM": ["avg"],
        "FIRST_COMM": ["premulsum"],
    }
    assert compiled.mean_scale == 1.0
    assert dict(compiled.means) == chosen


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ("mean", ["'mean'", "premulsum"]),
        ({"DEEP_COMM": "avg"}, ["FIRST_COMM", "give each bucket one"]),
        ({"DEEP_COMM": "avg", "FIRST_COMM": "avg", "LAST": "avg"}, ["'LAST'", "DEEP_COMM"]),
        ({"DEEP_COMM": "deferred", "FIRST_COMM": "avg"}, ["deferred", "all of them or for none"]),
    ],
)
def test_a_choice_that_cannot_be_is_refused(chosen, words):
    with pytest.raises(ModelError) as caught:
        compile_model(
            NORMED, input_shape=(6, 6, 1), local_batch=4, world_size=2, mean_strategy=chosen
        )
    for word in words:
        assert word in str(caught.value)


def test_training_knows_the_strategies():
    assert Training().mean_strategy == "deferred"
    with pytest.raises(SettingsError, match="mean_strategy 'ring'"):
        Training(mean_strategy="ring")
