import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow.errors import SettingsError
from trlow.schedule import Schedule, Training


def test_constant_is_constant():
    schedule = Schedule("constant", 0.3, 10)
    assert [schedule.rate(step) for step in range(12)] == [0.3] * 12


def test_cosine_falls_from_the_rate_to_zero():
    schedule = Schedule("cosine", 0.2, 100)
    rates = [schedule.rate(step) for step in range(101)]
    assert rates[0] == 0.2
    assert rates[50] == pytest.approx(0.1)
    assert rates[100] == 0
    assert all(a > b for a, b in pairwise(rates))


@given(
    kind=st.sampled_from(["constant", "cosine"]),
    steps=st.integers(1, 200),
    data=st.data(),
)
def test_warm_up_rises_in_a_line_to_the_rate(kind, steps, data):
    warmup = data.draw(st.integers(0, steps))
    schedule = Schedule(kind, 0.5, steps, warmup)
    for step in range(warmup):
        assert schedule.rate(step) == pytest.approx(0.5 * (step + 1) / warmup)
    if warmup < steps:
        assert schedule.rate(warmup) == 0.5
    assert all(0 <= schedule.rate(step) <= 0.5 for step in range(steps + 5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": math.nan},
        {"lr": math.inf},
        {"lr": -0.1},
        {"lr": "0.1"},
        {"lr": True},
        {"momentum": 1.0},
        {"momentum": -0.5},
        {"momentum": math.nan},
        {"weight_decay": -1e-4},
        {"weight_decay": math.nan},
        {"warmup_epochs": -1},
        {"warmup_epochs": 0.5},
        {"schedule": "linear"},
        {"optimizer": "adam"},
        {"replay": "eager"},
    ],
)
def test_training_refuses_what_has_no_meaning(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(SettingsError) as caught:
        Training(**wrong)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_rate_of_zero_is_a_rate():
    assert Training(lr=0.0).lr == 0.0


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(SettingsError, match="11 steps"):
        Schedule("cosine", 0.1, 10, 11)
