"""Range operations: the kernels they name, the bytes they declare, and what they refuse."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow import range_op
from trlow.dtype import BF16, F16, F32, F64, I32, U8, DType
from trlow.errors import PlanError
from trlow.plan import Range
from trlow.range_op import (
    Collective,
    FeedCopy,
    Launch,
    RangeOp,
    accumulate_metrics,
    bn_inference,
    bn_stats_all_reduce,
    broadcast,
    cast,
    clear,
    copy,
    copy_unless,
    feed_copy,
    mean_all_reduce,
    nan_check,
    scale,
    sum_all_reduce,
    update,
)


def at(block: int, count: int = 8, dtype: DType = F32, name: str | None = None) -> Range:
    """`count` elements in block `block` of 1024 bytes."""
    label = name or f"r{block}"
    return Range(1024 * block, count * dtype.itemsize, dtype, label, label)


A, B, C, D = at(0), at(1), at(2), at(3)
FACTOR, FLAG = at(10, 1, name="factor"), at(11, 1, I32, name="flag")
LR, MU, DECAY, GRAD_SCALE = (at(20 + k, 1, name=f"s{k}") for k in range(4))
SCALARS = {"lr": LR, "grad_scale": GRAD_SCALE, "skip": FLAG}


def launches(op: RangeOp) -> list[tuple]:
    return [(a.kernel, a.args) for a in op.actions if isinstance(a, Launch)]


def test_clear():
    op = clear(at(0, 9, F16))
    assert op == RangeOp("clear", (), (at(0, 9, F16),), (Launch("clear", (at(0, 9, F16), 18), 2),))


def test_copy():
    op = copy(A, B)
    assert launches(op) == [("copy", (A, B, 32))]
    assert (op.reads, op.writes) == ((B,), (A,))


def test_copy_unless_reads_its_flag():
    op = copy_unless(A, B, FLAG)
    assert launches(op) == [("copy_unless", (A, B, FLAG, 32))]
    assert (op.reads, op.writes) == ((B, FLAG), (A,))


@pytest.mark.parametrize(
    ("dst", "src", "kernel"),
    [
        (F16, F32, "cast_f32_f16"),
        (F32, F16, "cast_f16_f32"),
        (BF16, F32, "cast_f32_bf16"),
        (F32, BF16, "cast_bf16_f32"),
    ],
)
def test_cast_counts_elements(dst, src, kernel):
    to, of = at(0, 7, dst), at(1, 7, src)
    op = cast(to, of)
    assert op.actions == (Launch(kernel, (to, of, 7), 7),)
    assert (op.reads, op.writes) == ((of,), (to,))


@pytest.mark.parametrize(("dtype", "kernel"), [(F32, "f32"), (F16, "f16"), (BF16, "bf16")])
def test_scale_takes_its_factor_by_address(dtype, kernel):
    r = at(0, 5, dtype)
    op = scale(r, FACTOR)
    assert op.actions == (Launch(f"scale_{kernel}", (r, FACTOR, 5), 5),)
    assert (op.reads, op.writes) == ((r, FACTOR), (r,))


def test_a_sum_is_one_collective_for_each_range():
    op = sum_all_reduce(A, at(1, 3, I32))
    assert op.actions == (Collective("all_reduce", A), Collective("all_reduce", at(1, 3, I32)))
    assert op.reads == op.writes == (A, at(1, 3, I32))


@pytest.mark.parametrize("make", [mean_all_reduce, bn_stats_all_reduce])
def test_a_mean_scales_after_the_whole_group(make):
    half = at(1, 4, F16)
    op = make(A, half, factor=FACTOR)
    assert op.kind == make.__name__
    assert op.actions == (
        Collective("all_reduce", A),
        Collective("all_reduce", half),
        Launch("scale_f32", (A, FACTOR, 8), 8),
        Launch("scale_f16", (half, FACTOR, 4), 4),
    )
    assert (op.reads, op.writes) == ((A, half, FACTOR), (A, half))


def test_broadcast_names_its_root():
    op = broadcast(A, at(1, 5, U8), root=2)
    assert [a.root for a in op.actions] == [2, 2]
    assert {a.kind for a in op.actions} == {"broadcast"}
    assert op.writes == (A, at(1, 5, U8))


def test_nan_check_keeps_what_the_flag_holds():
    op = nan_check(FLAG, A, at(1, 4, BF16))
    assert launches(op) == [
        ("nan_check_f32", (FLAG, A, 8)),
        ("nan_check_bf16", (FLAG, at(1, 4, BF16), 4)),
    ]
    assert FLAG in op.reads
    assert op.writes == (FLAG,)


def test_accumulate_metrics():
    op = accumulate_metrics(A, B, FACTOR, FLAG)
    assert launches(op) == [("accumulate_metrics", (A, B, FACTOR, FLAG, 8))]
    assert (op.reads, op.writes) == ((A, B, FACTOR, FLAG), (A,))


@pytest.mark.parametrize("decay", [None, DECAY])
def test_sgd_has_a_weight_and_a_bias_form(decay):
    op = update("sgd", A, B, **SCALARS, weight_decay=decay)
    if decay is None:
        assert launches(op) == [("sgd_bias", (A, B, LR, GRAD_SCALE, FLAG, 8))]
    else:
        assert launches(op) == [("sgd_weight", (A, B, LR, DECAY, GRAD_SCALE, FLAG, 8))]
    assert op.writes == (A,)


@pytest.mark.parametrize("kind", ["momentum", "nesterov"])
def test_moments_are_written_too(kind):
    op = update(kind, A, B, **SCALARS, momentum=C, mu=MU, weight_decay=DECAY)
    assert launches(op) == [(f"{kind}_weight", (A, C, B, LR, MU, DECAY, GRAD_SCALE, FLAG, 8))]
    assert op.writes == (A, C)
    assert set(op.reads) == {A, B, C, LR, MU, DECAY, GRAD_SCALE, FLAG}
    op = update(kind, A, B, **SCALARS, momentum=C, mu=MU)
    assert launches(op) == [(f"{kind}_bias", (A, C, B, LR, MU, GRAD_SCALE, FLAG, 8))]


def test_bn_inference():
    op = bn_inference(A, B, C, D, at(4), at(5), FACTOR)
    assert launches(op) == [("bn_inference", (A, B, C, D, at(4), at(5), FACTOR, 8))]
    assert op.writes == (A, B)
    assert op.reads == (C, D, at(4), at(5), FACTOR)


def test_feed_copy():
    op = feed_copy("B", at(0, 100, U8))
    assert op.actions == (FeedCopy("B", at(0, 100, U8)),)
    assert (op.reads, op.writes) == ((), (at(0, 100, U8),))


NONE = {dtype: at(9, 0, dtype) for dtype in (F32, F16, U8)}
NOTHING = NONE[F32]
EMPTY_OPS = [
    clear(NOTHING),
    copy(NOTHING, at(8, 0)),
    copy_unless(NOTHING, at(8, 0), FLAG),
    cast(NONE[F16], NOTHING),
    scale(NOTHING, FACTOR),
    sum_all_reduce(NOTHING),
    sum_all_reduce(),
    mean_all_reduce(NOTHING, factor=FACTOR),
    bn_stats_all_reduce(factor=FACTOR),
    broadcast(NOTHING),
    nan_check(FLAG, NOTHING),
    accumulate_metrics(NOTHING, at(8, 0), FACTOR, FLAG),
    update("sgd", NOTHING, at(8, 0), **SCALARS),
    update("momentum", NOTHING, at(8, 0), **SCALARS, momentum=at(7, 0), mu=MU),
    bn_inference(NOTHING, *(at(k, 0) for k in range(5)), FACTOR),
    feed_copy("A", NONE[U8]),
]


@pytest.mark.parametrize("op", EMPTY_OPS, ids=lambda op: op.kind)
def test_an_op_over_nothing_does_and_touches_nothing(op):
    assert (op.reads, op.writes, op.actions) == ((), (), ())


def test_empty_ranges_among_others_are_left_out():
    assert sum_all_reduce(NOTHING, A, NOTHING) == sum_all_reduce(A)
    assert mean_all_reduce(A, NOTHING, factor=FACTOR) == mean_all_reduce(A, factor=FACTOR)
    assert nan_check(FLAG, NOTHING, A) == nan_check(FLAG, A)


SHORT = at(1, 7, name="short")
OVER_A = Range(16, 32, F32, "over", "over")
REFUSED = [
    (lambda: copy(A, SHORT), ["r0", "short", "counts must be equal"]),
    (lambda: copy(A, at(1, 8, I32)), ["r0", "r1", "dtypes differ"]),
    (lambda: copy(A, OVER_A), ["r0", "over", "overlap"]),
    (lambda: copy(A, A), ["r0", "overlap"]),
    (lambda: copy_unless(A, B, at(5, 1)), ["skip r5", "one int32"]),
    (lambda: copy_unless(A, B, at(5, 2, I32)), ["skip r5", "one int32"]),
    (lambda: copy_unless(at(5, 1, I32), at(6, 1, I32), at(5, 1, I32)), ["r5", "overlap"]),
    (lambda: cast(A, B), ["r0", "r1", "only float32"]),
    (lambda: cast(at(0, 8, F16), at(1, 8, BF16)), ["r0", "r1", "only float32"]),
    (lambda: cast(at(0, 8, I32), B), ["r0", "r1", "only float32"]),
    (lambda: cast(at(0, 8, F16), SHORT), ["r0", "short", "counts"]),
    (lambda: cast(Range(0, 16, F16, "low", "low"), A), ["low", "r0", "overlap"]),
    (lambda: scale(at(0, 8, I32), FACTOR), ["r0", "must be float32"]),
    (lambda: scale(A, at(5, 1, F16)), ["factor r5", "one float32"]),
    (lambda: scale(A, NOTHING), ["factor r9", "one float32"]),
    (lambda: scale(A, Range(0, 4, F32, "inside", "inside")), ["r0", "inside", "overlap"]),
    (lambda: sum_all_reduce(A, B, OVER_A), ["r0", "over", "overlap"]),
    (lambda: sum_all_reduce(A, A), ["r0", "overlap"]),
    (lambda: mean_all_reduce(at(0, 8, I32), factor=FACTOR), ["r0", "must be float32"]),
    (lambda: mean_all_reduce(A, factor=FLAG), ["flag", "one float32"]),
    (lambda: broadcast(A, OVER_A), ["r0", "over", "overlap"]),
    (lambda: broadcast(A, root=-1), ["rank -1"]),
    (lambda: broadcast(A, root=1.0), ["rank 1.0"]),
    (lambda: nan_check(FACTOR, A), ["flag factor", "one int32"]),
    (lambda: nan_check(FLAG, at(0, 8, I32)), ["r0", "must be float32"]),
    (lambda: accumulate_metrics(A, SHORT, FACTOR, FLAG), ["r0", "short", "counts"]),
    (lambda: accumulate_metrics(A, at(1, 8, I32), FACTOR, FLAG), ["r1", "must be float32"]),
    (lambda: accumulate_metrics(A, A, FACTOR, FLAG), ["r0", "overlap"]),
    (lambda: accumulate_metrics(A, B, FLAG, FLAG), ["factor flag", "one float32"]),
    (lambda: update("adam", A, B, **SCALARS), ["'adam'", "sgd, momentum, nesterov"]),
    (lambda: update("sgd", A, SHORT, **SCALARS), ["r0", "short", "counts"]),
    (lambda: update("sgd", A, A, **SCALARS), ["r0", "overlap"]),
    (lambda: update("sgd", at(0, 8, F64), B, **SCALARS), ["r0", "must be float32"]),
    (lambda: update("sgd", A, B, **SCALARS, momentum=C, mu=MU), ["r0", "takes neither"]),
    (lambda: update("sgd", A, B, **SCALARS, mu=MU), ["takes neither"]),
    (lambda: update("momentum", A, B, **SCALARS), ["r0", "needs both"]),
    (lambda: update("nesterov", A, B, **SCALARS, momentum=C), ["needs both"]),
    (lambda: update("momentum", A, B, **SCALARS, momentum=A, mu=MU), ["r0", "overlap"]),
    (lambda: update("momentum", A, B, **SCALARS, momentum=B, mu=MU), ["r1", "overlap"]),
    (lambda: update("sgd", A, B, **{**SCALARS, "lr": B}), ["r1", "one float32"]),
    (lambda: bn_inference(A, B, C, D, at(4), SHORT, FACTOR), ["short", "counts"]),
    (lambda: bn_inference(A, A, C, D, at(4), at(5), FACTOR), ["r0", "overlap"]),
    (lambda: bn_inference(A, B, C, D, B, at(5), FACTOR), ["r1", "overlap"]),
    (lambda: bn_inference(A, B, C, D, at(4), at(5), FLAG), ["eps flag", "one float32"]),
    (lambda: feed_copy("C", A), ["'C'", "'A' or 'B'"]),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=[", ".join(w) for _, w in REFUSED])
def test_what_does_not_fit_is_refused_by_name(make, words):
    with pytest.raises(PlanError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [0.5, True, "x", None])
def test_no_number_but_an_extent_is_baked_into_a_graph(value):
    with pytest.raises(PlanError, match=r"'scale_f32'.*given by its range"):
        Launch("scale_f32", (A, value, 8), 8)


def test_an_action_may_touch_only_what_its_op_declares():
    RangeOp("own", (A,), (B,), (Launch("k", (B, A, 8), 8),))
    with pytest.raises(PlanError, match="op 'own' touches r2"):
        RangeOp("own", (A,), (B,), (Launch("k", (B, C, 8), 8),))
    with pytest.raises(PlanError, match="op 'own' touches over"):
        RangeOp("own", (A,), (B,), (Launch("k", (OVER_A, 8), 8),))
    for action in (Collective("all_reduce", A), FeedCopy("A", A)):
        with pytest.raises(PlanError, match="declares as written"):
            RangeOp("own", (A,), (B,), (action,))
        RangeOp("own", (), (A,), (action,))


def test_an_action_over_no_bytes_needs_no_declaration():
    RangeOp("own", (), (), (Launch("k", (NOTHING,), 0),))


def test_ops_are_values_that_phases_can_share():
    assert hash(mean_all_reduce(A, factor=FACTOR)) == hash(mean_all_reduce(A, factor=FACTOR))
    assert mean_all_reduce(A, factor=FACTOR) != mean_all_reduce(B, factor=FACTOR)
    assert sum_all_reduce(A) != broadcast(A)


@given(st.integers(0, 2**40))
def test_sizes_beyond_32_bits_arrive_whole(count):
    r = Range(2**45, 4 * count, F32, "r", "r")
    if count:
        assert clear(r).actions == (Launch("clear", (r, 4 * count), -(-count // 4)),)
        assert scale(r, FACTOR).actions[0].args[-1] == count


def test_docstrings_spell_arguments_as_they_are_written():
    for name in range_op.__all__:
        made = getattr(range_op, name)
        if inspect.isfunction(made):
            first = inspect.getdoc(made).split()[0]
            assert first.lower() not in inspect.signature(made).parameters, name


def test_all_names_what_the_module_makes():
    made = {
        n for n, f in vars(range_op).items() if getattr(f, "__module__", "") == range_op.__name__
    }
    assert {name for name in made if not name.startswith("_")} <= set(range_op.__all__)
