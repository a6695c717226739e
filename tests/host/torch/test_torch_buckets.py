"""How gradients are cut into buckets, and what the plan makes of them."""

from __future__ import annotations

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

import torch_cases as cases  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402

from trlow.dtype import BF16, F16, F32  # noqa: E402
from trlow.errors import UsageError  # noqa: E402
from trlow.torch import StaticDataParallel  # noqa: E402
from trlow.torch.buckets import (  # noqa: E402
    EDGE_NBYTES,
    Parameter,
    cut,
    gradient,
    make_plan,
    master,
    weight,
)

pytestmark = pytest.mark.timeout(60)


@st.composite
def parameters(draw, most=3 * EDGE_NBYTES // 2, dtypes=(F32, BF16, F16)):
    counts = draw(st.lists(st.integers(1, most), min_size=1, max_size=30))
    kinds = [draw(st.sampled_from(dtypes)) for _ in counts]
    return [
        Parameter(f"p{index}", count, dtype)
        for index, (count, dtype) in enumerate(zip(counts, kinds, strict=True))
    ]


def names(buckets):
    return [name for bucket in buckets for name in bucket.names]


def sizes(buckets, ready):
    nbytes = {each.name: each.nbytes for each in ready}
    return [sum(nbytes[name] for name in bucket.names) for bucket in buckets]


number = st.integers(1, 40)
wished = st.one_of(st.none(), number)


@given(parameters(), wished, st.integers(1, 8 * EDGE_NBYTES))
def test_buckets_hold_every_parameter_once_in_the_order_of_readiness(ready, wanted, nbytes):
    buckets = cut(ready, wanted, nbytes)
    assert names(buckets) == [each.name for each in ready]
    assert all(bucket.names for bucket in buckets)


@given(parameters(), wished, st.integers(1, 8 * EDGE_NBYTES))
def test_a_bucket_is_of_one_dtype(ready, wanted, nbytes):
    dtypes = {each.name: each.dtype for each in ready}
    for bucket in cut(ready, wanted, nbytes):
        assert {dtypes[name] for name in bucket.names} == {bucket.dtype}


@given(parameters(), st.integers(1, 8 * EDGE_NBYTES))
def test_a_bucket_of_several_parameters_has_at_most_the_bytes_asked_for(ready, nbytes):
    buckets = cut(ready, None, nbytes)
    found = sizes(buckets, ready)
    for position, (bucket, size) in enumerate(zip(buckets, found, strict=True)):
        edge = position in (0, len(buckets) - 1) and sum(found) > nbytes
        limit = min(nbytes, EDGE_NBYTES) if edge else nbytes
        assert len(bucket.names) == 1 or size <= limit


@given(parameters(dtypes=(F32,)), st.integers(1, 8 * EDGE_NBYTES))
def test_no_two_neighbours_in_the_middle_would_fit_into_one(ready, nbytes):
    """Few buckets: each begins because what it begins with found no room."""
    buckets = cut(ready, None, nbytes)
    nbytes_of = {each.name: each.nbytes for each in ready}
    found = sizes(buckets, ready)
    for position in range(2, len(buckets) - 1):
        assert found[position - 1] + nbytes_of[buckets[position].names[0]] > nbytes


@given(parameters(dtypes=(F32,)), st.integers(1, 8 * EDGE_NBYTES), st.data())
def test_what_becomes_ready_together_at_the_end_is_in_the_last_bucket(ready, nbytes, data):
    together = data.draw(st.integers(1, len(ready)))
    buckets = cut(ready, None, nbytes, together)
    assert names(buckets) == [each.name for each in ready]
    last = [each.name for each in ready[-together:]]
    assert list(buckets[-1].names[-together:]) == last
    edge = min(EDGE_NBYTES, nbytes) if len(buckets) > 1 else nbytes
    assert len(buckets[-1].names) == together or sizes(buckets, ready)[-1] <= edge


@given(parameters(dtypes=(F32,)), number)
def test_a_number_of_buckets_is_the_most_and_a_part_is_at_most_one_parameter_too_large(
    ready, wanted
):
    buckets = cut(ready, wanted, 1)
    assert 1 <= len(buckets) <= wanted
    total, largest = sum(each.nbytes for each in ready), max(each.nbytes for each in ready)
    assert max(sizes(buckets, ready)) <= total / wanted + largest


@given(st.integers(1, 12), st.integers(1, 4))
def test_equal_parameters_make_equal_buckets(wanted, each):
    ready = [Parameter(f"p{index}", 10, F32) for index in range(wanted * each)]
    assert [len(bucket.names) for bucket in cut(ready, wanted, 1)] == [each] * wanted


@given(parameters(dtypes=(F32,)), st.data())
def test_lists_are_the_buckets(ready, data):
    order = data.draw(st.permutations([each.name for each in ready]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=5)))
    lists = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    buckets = cut(ready, lists, 1)
    assert [list(bucket.names) for bucket in buckets] == [each for each in lists if each]


@given(parameters(most=100), wished, st.sampled_from([None, BF16, F16]))
def test_a_bucket_of_the_plan_is_one_range_of_its_gradients_and_nothing_else(ready, wanted, wire):
    buckets = cut(ready, wanted, 100)
    plan = make_plan(ready, buckets, {"bn.running_mean": 3}, wire)
    counts = {each.name: each.count for each in ready}
    spans = []
    for k, bucket in enumerate(buckets):
        widened = wire is not None and bucket.dtype is F32
        kinds = [("W", weight, bucket.dtype), ("G", gradient, wire if widened else bucket.dtype)]
        if widened:
            kinds.append(("H", master, bucket.dtype))
        else:
            assert plan.range(f"H_BUCKET_{k}").nbytes == 0
        for kind, tensor, dtype in kinds:
            whole = plan.range(f"{kind}_BUCKET_{k}")
            inside = [plan.range(tensor(name)) for name in bucket.names]
            assert whole.dtype is dtype
            assert inside[0].offset == whole.offset
            ends = [one.offset + one.nbytes for one in inside]
            assert all(a <= b.offset for a, b in zip(ends, inside[1:], strict=False))  # in order
            assert ends[-1] <= whole.offset + whole.nbytes
            assert [one.count for one in inside] == [counts[name] for name in bucket.names]
            spans.append((whole.offset, whole.offset + whole.nbytes))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


READY = [Parameter("a", 1, F32), Parameter("b", 2, F32)]


@pytest.mark.parametrize(
    ("buckets", "nbytes", "message"),
    [
        (0, 1, "buckets=0"),
        (-1, 1, "buckets=-1"),
        (True, 1, "buckets=True"),
        (None, 0, "bucket_nbytes=0"),
        ([["a"]], 1, "every trainable parameter once; look at b"),
        ([["a", "b"], ["c"]], 1, "look at c"),
        ([["a"], ["b", "a"]], 1, "look at a"),
        ([], 1, "look at a, b"),
    ],
)
def test_what_is_no_cut_is_refused_by_name(buckets, nbytes, message):
    with pytest.raises(UsageError, match=message):
        cut(READY, buckets, nbytes)


@pytest.mark.parametrize("buckets", ["a", 1.5, [1], ["a", "b"], [["a"], 2], b"a"])
def test_what_is_no_list_of_lists_is_refused_with_the_form(buckets):
    with pytest.raises(UsageError, match="lists of parameter names"):
        cut(READY, buckets, 1)


# ------------------------------------------------------------------------------ of a module


class Crossed(nn.Module):
    """Its layers are used in another order than they are made: ready are c, then a, then b."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.head = nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return self.head(self.c(self.a(self.b(x))))


def test_buckets_stand_in_the_measured_order():
    with StaticDataParallel(
        Crossed, cases.cross_entropy, cases.host(2), optimizer=cases.sgd, buckets=4
    ) as static:
        static.compile(cases.batches(1)[0])
        found = [list(bucket.names) for bucket in static._members[0].buckets]
        assert found == [["head.weight"], ["c.weight"], ["a.weight"], ["b.weight"]]


def test_lists_of_names_train_to_the_same_bytes_as_any_other_cut():
    """What is reduced with what does not change a sum."""
    given = cases.batches(5)
    lists = [["0.weight", "2.bias"], ["2.weight"], ["0.bias"]]
    states = []
    for buckets in (None, 1, 3, lists):
        with StaticDataParallel(
            cases.mlp, cases.cross_entropy, cases.host(4), optimizer=cases.adamw, buckets=buckets
        ) as static:
            cases.trained(static, given)
            states.append(static.state_dict())
    for state in states[1:]:
        cases.assert_same(states[0], state)


class Order(nn.Module):
    """Two branches; which comes first depends on who asks."""

    def __init__(self, turned):
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)
        self.turned = turned

    def forward(self, x):
        first, second = (self.right, self.left) if self.turned else (self.left, self.right)
        return first(x) + second(x)


def test_an_order_that_differs_between_ranks_is_refused_by_rank_and_parameter():
    made = []

    def factory():
        made.append(Order(turned=len(made) % 2 == 1))
        return made[-1]

    with StaticDataParallel(
        factory, cases.cross_entropy, cases.host(2), optimizer=cases.sgd
    ) as static:
        with pytest.raises(UsageError, match=r"on rank 1 \((left|right)\.\w+\) than on rank 0"):
            static.compile(cases.batches(1)[0])
        for order in made:
            order.turned = False
        static.compile(cases.batches(1)[0])
        static.step(cases.batches(1)[0]).item()
