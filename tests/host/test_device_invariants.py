"""Invariants 17 to 27, 31, 32 and 32b on the host device: each holds, and each can be seen to fail.

The checks run here over offsets, counts, world sizes, modes and shuffled schedules. 28 to 30 are
in tests/host/runtime, 33 to 40 in tests/host/nn.
"""

from __future__ import annotations

import re
from ctypes import byref, c_void_p

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as quick
from hypothesis import strategies as st

import trlow
from trlow import range_op, testing_arithmetic, testing_replay
from trlow.action import Collective, Launch, RangeOp
from trlow.dtype import BF16, F16, F32
from trlow.plan import Range
from trlow.program import External, Program, Stage, Stream
from trlow.testing import (
    DEVICE_INVARIANTS,
    MODES,
    device_programs,
    emulate,
    every_op,
    initial_bytes,
    small_plan,
)
from trlow.testing_bytes import read, round_bf16, store, widen_bf16

pytestmark = pytest.mark.timeout(90)

OFFSETS = range(8)
COUNTS = (0, 1, 2, 3, 7, 15, 17, 255, 256, 257)
LARGE = 70_001
WORLDS = (1, 2, 3, 4, 8)
check = DEVICE_INVARIANTS
many = quick(max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def on_host(ranks: int, schedule_seed: int = 0) -> trlow.Settings:
    return trlow.Settings(
        device="host",
        host_devices=ranks,
        any_world_size=True,
        host_schedule_seed=schedule_seed,
        deadline_s=30.0,
    )


def hosts():
    return st.builds(on_host, st.sampled_from(WORLDS), st.integers(0, 2**64 - 1))


def places():
    """Keywords of a check: where its ranges lie and how the program runs."""
    return st.fixed_dictionaries(
        {
            "offset": st.sampled_from(OFFSETS),
            "count": st.sampled_from(COUNTS),
            "mode": st.sampled_from(MODES),
        }
    )


def positive_variance(plan, rank):
    """Batch norm's variance and epsilon above 0, all else as ever."""
    state = initial_bytes(plan, rank)
    store(state, plan.range("eps"), np.array([0.5], np.float32))
    read(state, plan.range("var"))[:] = np.abs(read(state, plan.range("var")))
    return state


@pytest.mark.parametrize("offset", OFFSETS)
def test_every_op_at_every_count_writes_its_range_alone_and_what_numpy_writes(offset):
    """Invariants 17 and 26, over all offsets and counts; world sizes and modes take turns."""
    for k, count in enumerate(COUNTS):
        settings = on_host(WORLDS[(offset + k) % len(WORLDS)], schedule_seed=offset + k)
        mode = MODES[(offset + k) % len(MODES)]
        check[17](settings, offset=offset, count=count, mode=mode, seed=k)
        exact = check[26](settings, *every_op(offset, count), start=positive_variance)
        assert exact, "sums of few-bit numbers are exact, so numpy has been compared"


@pytest.mark.parametrize(("ranks", "offset"), [(2, 5), (4, 0)])
def test_large_ranges_keep_what_small_ones_do(ranks, offset):
    settings, place = on_host(ranks), {"offset": offset, "count": LARGE}
    check[17](settings, **place)
    check[19](settings, **place)
    check[20](settings, **place)
    check[22](settings, **place, rank=ranks - 1, element=LARGE - 1)
    check[23](settings, **place)
    check[24](settings, **place)
    check[26](settings, *every_op(**place), start=positive_variance)


@pytest.mark.parametrize("number", [17, 19, 20, 23, 24])
def test_a_range_operation_keeps_its_invariant_anywhere(number):
    @many
    @given(hosts(), places())
    def holds(settings, place):
        check[number](settings, **place)

    holds()


@many
@given(
    hosts(),
    places(),
    st.data(),
    st.sampled_from([0, 1]),
    st.sampled_from([np.nan, np.inf, -np.inf]),
    st.sampled_from([F32, F16, BF16]),
)
def test_one_number_that_is_not_finite_is_seen_by_all(settings, place, data, bucket, value, dtype):
    place["count"] = max(place["count"], 1)
    check[22](
        settings,
        **place,
        rank=data.draw(st.integers(0, settings.host_devices - 1)),
        element=data.draw(st.integers(0, place["count"] - 1)),
        bucket=bucket,
        value=value,
        dtype=dtype,
    )


@pytest.mark.parametrize("offset", OFFSETS)
def test_casts_of_every_half_and_of_every_edge(offset):
    check[21](on_host(1), offset=offset, mode=MODES[offset % 3])


@many
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300), st.sampled_from(OFFSETS))
@example([0x7F800001, 0xFFFFFFFF, 0x7FC00000], 1)  # NaNs: rounded up, these would turn to 0 or inf
def test_casts_of_any_number(bits, offset):
    check[21](on_host(1), bits=np.array(bits, np.uint32), offset=offset)


def overflowing():
    """Whole regions, pads too, scaled until their slots overflow."""
    plan = small_plan()
    factor = plan.range("factor.0")
    ops = [
        op
        for name in ("W_SMALL", "G_SMALL", "L_SMALL", "Q_SMALL")
        for op in _all_of(plan, name, factor)
    ]
    stages = [Stage(f"S{k}", list(Stream)[k % 5], (op,)) for k, op in enumerate(ops)]

    def start(plan, rank):
        state = initial_bytes(plan, rank)
        store(state, factor, np.array([3e38], np.float32))
        return state

    return plan, Program.single("overflow", stages), start


def _all_of(plan, name, factor):
    whole = plan.range(name)
    yield range_op.scale(whole, factor)
    yield range_op.sum_all_reduce(whole)
    yield range_op.mean_all_reduce(whole, factor=factor)
    yield range_op.broadcast(whole)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 3])
def test_pads_stay_finite_beside_slots_that_overflow(ranks, mode):
    plan, program, start = overflowing()
    check[18](on_host(ranks), plan, program, mode=mode, start=start)
    check[18](on_host(ranks), *every_op(3, 17), mode=mode)


ranked = st.sampled_from(WORLDS)


@quick(max_examples=80, suppress_health_check=list(HealthCheck))
@given(st.data(), ranked, st.integers(1, 2), st.integers(0, 2**64 - 1))
def test_random_programs_end_alike_in_every_mode_and_schedule(data, ranks, phases, schedule_seed):
    """Invariants 25, 26 and 27 for programs whose ranges meet in every way."""
    plan, program = data.draw(device_programs(ranks, phases))
    settings = on_host(ranks, schedule_seed)
    check[26](settings, plan, program, steps=data.draw(st.integers(1, 4)))
    mode = data.draw(st.sampled_from(["fused", "staged"]))
    check[25](settings, plan, program, mode=mode)
    check[27](settings, plan, program, mode=mode)
    if ranks == 1:
        check[32](settings, plan, program)


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_first_step_that_rounds_is_equal_in_every_mode(ranks):
    """Sums of any floats: their order is the device's, and the same in every mode."""
    plan, program = every_op(1, 257)

    def start(plan, rank):
        state, generator = initial_bytes(plan, rank), np.random.default_rng(rank)
        for tensor in plan.tensors:
            if tensor.dtype == F32:
                numbers = generator.standard_normal(tensor.count, np.float32)
                store(state, plan.range(tensor.name), numbers)
        return state

    check[26](on_host(ranks, 7), plan, program, steps=3, start=start, numpy_too=False)


@pytest.mark.parametrize("mode", ["fused", "staged"])
def test_replays_take_no_memory(mode):
    check[31](on_host(2), *every_op(), mode=mode, steps=1500)


@pytest.mark.parametrize("ranks", WORLDS)
def test_communication_is_captured_once_for_all_variants(ranks):
    check["32b"](on_host(ranks))


def test_one_rank_of_many_devices_loads_no_nccl():
    check[32](on_host(4), *every_op(2, 257), start=positive_variance)


# ---- an order that is forgotten shows ------------------------------------------------------------

SEEDS = range(200)  # until one is caught; the rarest edge here shows under one seed in ten
HONEST_SEEDS = range(8)
PLAN = small_plan()
W, G, L, FACTOR = map(PLAN.range, ("W_SMALL.1", "G_SMALL.1", "L_SMALL.1", "factor.0"))


def chain(copy, program_type=Program):
    """G is summed on one stream and copied to W; two others refill G from L and halve W."""
    return program_type.single(
        "chain",
        (
            Stage("SUM", Stream.COMP_1, (range_op.scale(G, FACTOR), range_op.sum_all_reduce(G))),
            Stage("COPY", Stream.COMP_2, **copy),
            Stage("REFILL", Stream.UPDATE, (range_op.cast(G, L),)),
            Stage("HALVE", Stream.COMP_3, (range_op.scale(W, FACTOR),)),
        ),
    )


def half(plan, rank):
    state = initial_bytes(plan, rank)
    store(state, FACTOR, np.array([0.5], np.float32))
    return state


def copied_outside(reads, writes):
    """The copy as a callback that declares what is given here."""

    def make(runtime):
        def body(rank, stream):
            arena = runtime.arenas[rank]
            to, source = arena.address(W), arena.address(G)
            runtime.platform.cudart.cudaMemcpyAsync(to, source, G.nbytes, 3, stream)

        return chain({"external": External("callback", reads, writes, body)})

    return make


def check_copied(settings, program):
    def copy_in_numpy(_rank, state):
        read(state, W)[:] = read(state, G)

    return check[26](settings, PLAN, program, start=half, externals={"COPY": copy_in_numpy})


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_callback_that_declares_what_it_touches_is_in_order_under_any_seed(ranks):
    for seed in HONEST_SEEDS:
        program = copied_outside((G,), (W,))
        assert check_copied(on_host(ranks, seed), program)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    ("reads", "writes"), [((), ()), ((G,), ()), ((), (W,))], ids=["both", "writes", "reads"]
)
def test_a_callback_that_hides_a_range_is_caught_by_some_seed(ranks, reads, writes):
    program = copied_outside(reads, writes)
    with pytest.raises(AssertionError, match="differ"):
        for seed in SEEDS:
            check_copied(on_host(ranks, seed), program)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("missing", range(5))
def test_each_edge_that_is_left_out_is_caught_by_some_seed(ranks, missing):
    class Forgetful(Program):
        def edges(self):
            edges = super().edges()
            assert len(edges) == 5
            return edges[:missing] + edges[missing + 1 :]

    copy = {"ops": (range_op.copy(W, G),)}
    check[26](on_host(ranks, 1), PLAN, chain(copy), start=half)
    with pytest.raises(AssertionError, match="differ"):
        for seed in SEEDS:
            program = chain(copy, Forgetful)
            check[26](on_host(ranks, seed), PLAN, program, start=half, steps=4)


# ---- every check can fail ------------------------------------------------------------------------


def shorter(r: Range) -> Range:
    return Range(r.offset, r.nbytes - r.dtype.itemsize, r.dtype, r.first, r.last)


def clear_beyond(r):
    return RangeOp("clear", (), (r,), (Launch("clear", (r, r.nbytes + 1), 64),))


def sum_of_all_but_one(*ranges):
    short = [shorter(r) for r in ranges]
    return RangeOp(
        "sum_all_reduce", ranges, ranges, tuple(Collective("all_reduce", r) for r in short)
    )


def sum_as_mean(*ranges, factor):
    return range_op.sum_all_reduce(*ranges)


def broadcast_from_0(*ranges, root=0):
    honest = tuple(Collective("broadcast", r) for r in ranges)
    return RangeOp("broadcast", ranges, ranges, honest)


def no_sum(*ranges):
    return RangeOp("sum_all_reduce", (), (), ())


def check_of_first_bucket(flag, *ranges, honest=range_op.nan_check):
    return honest(flag, ranges[0])


def check_of_all_but_one(flag, *ranges, honest=range_op.nan_check):
    return honest(flag, *map(shorter, ranges))


def changed_update(change, honest=range_op.update):
    def update(kind, weight, gradient, **scalars):
        return honest(kind, weight, gradient, **change(scalars))

    return update


def swapped(scalars):
    if scalars.get("mu") is None or scalars["weight_decay"] is None:
        return scalars
    return scalars | {"mu": scalars["weight_decay"], "weight_decay": scalars["mu"]}


BROKEN_OPS = [
    (17, "clear", clear_beyond, {}),
    (19, "sum_all_reduce", sum_of_all_but_one, {}),
    (19, "mean_all_reduce", sum_as_mean, {}),
    (20, "sum_all_reduce", sum_of_all_but_one, {}),
    (20, "broadcast", broadcast_from_0, {}),
    (22, "nan_check", check_of_first_bucket, {"bucket": 1}),
    (22, "nan_check", check_of_all_but_one, {"element": 16}),
    (22, "sum_all_reduce", no_sum, {"rank": 1}),
    (23, "update", changed_update(swapped), {}),
    (23, "update", changed_update(lambda s: s | {"weight_decay": None}), {}),
    (23, "update", changed_update(lambda s: s | {"weight_decay": s["lr"]}), {}),
    (24, "update", changed_update(lambda s: s | {"lr": s["grad_scale"]}), {}),
    (24, "update", lambda kind, weight, *_, **__: range_op.clear(weight), {}),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("number", "op", "broken", "where"), BROKEN_OPS)
def test_a_broken_range_operation_fails(number, op, broken, where, mode, monkeypatch):
    check[number](on_host(2), mode=mode, **where)
    monkeypatch.setattr(range_op, op, broken)
    with pytest.raises(AssertionError, match="rank"):
        check[number](on_host(2), mode=mode, **where)


def test_not_a_number_in_a_pad_fails_18():
    slot, pad = PLAN.range("L_SMALL.0"), PLAN["L_SMALL.0"].offset + 10
    behind = Range(pad, slot.nbytes, F16, "pad", "pad")
    program = Program.single("pad", (Stage("S", Stream.COMP_1, (range_op.copy(behind, slot),)),))

    def start(plan, rank):
        state = initial_bytes(plan, rank)
        store(state, slot, np.full(slot.count, np.nan, np.float32))
        return state

    check[18](on_host(1), PLAN, program)
    with pytest.raises(AssertionError, match=r"pad of L_SMALL\.0.*not finite"):
        check[18](on_host(1), PLAN, program, start=start)


@pytest.mark.parametrize("name", ["narrow.float16", "narrow.bfloat16", "wide.float16"])
@pytest.mark.parametrize("what", ["last bit", "NaN to Inf"])
def test_a_cast_that_rounds_otherwise_or_loses_a_nan_fails_21(name, what, monkeypatch):
    honest = testing_arithmetic.run

    def broken(runtime, program, states, mode):
        found = honest(runtime, program, states, mode)
        offset = runtime.plan[name].offset
        dtype = runtime.plan[name].dtype
        words = read(found[-1], Range(offset, 8, dtype, name, name))
        words = words.view(np.uint32 if dtype == F32 else np.uint16)
        words[0] = words[0] ^ 1 if what == "last bit" else words.dtype.type(INFINITY[dtype])
        return found

    values = {"last bit": 0x3F801000, "NaN to Inf": 0x7FC00000}
    bits = np.full(9, values[what], np.uint32)
    check[21](on_host(2), bits=bits)
    monkeypatch.setattr(testing_arithmetic, "run", broken)
    with pytest.raises(AssertionError, match=f"rank 1: {name}"):
        check[21](on_host(2), bits=bits)


INFINITY = {F32: 0x7F800000, F16: 0x7C00, BF16: 0x7F80}


def test_a_capture_that_runs_fails_25(monkeypatch):
    honest = trlow.Runtime.capture

    def eager_too(runtime, program, mode, **variant):
        replay = honest(runtime, program, mode, **variant)
        runtime.eager(program)
        return replay

    check[25](on_host(2), *every_op())
    monkeypatch.setattr(trlow.Runtime, "capture", eager_too)
    with pytest.raises(AssertionError, match="capture changed"):
        check[25](on_host(2), *every_op())


def test_a_replay_that_runs_nothing_fails_25_and_one_step_too_many_26(monkeypatch):
    honest = trlow.Replay.run
    monkeypatch.setattr(trlow.Replay, "run", lambda replay, steps, **_: None)
    with pytest.raises(AssertionError, match="rank 0: replay ran nothing"):
        check[25](on_host(2), *every_op())
    monkeypatch.setattr(trlow.Replay, "run", lambda r, steps, **k: honest(r, steps + 1, **k))
    with pytest.raises(AssertionError, match="eager and fused differ"):
        check[26](on_host(2), *every_op(), start=positive_variance)


@pytest.mark.parametrize("op", ["clear", "copy", "scale", "sum_all_reduce", "update"])
def test_an_op_that_does_something_else_than_numpy_fails_26(op, monkeypatch):
    """Every mode leaves out the last element alike, so that numpy alone can tell."""
    plan, program = every_op()

    def shortened(action):
        if isinstance(action, Collective):
            return Collective(action.kind, shorter(action.range))
        *args, extent = action.args
        size = args[0].dtype.itemsize if op in {"clear", "copy"} else 1
        return Launch(action.kernel, (*args, extent - size), action.work)

    stages = [
        Stage(
            stage.name,
            stage.stream,
            tuple(
                RangeOp(o.kind, o.reads, o.writes, tuple(map(shortened, o.actions)))
                for o in stage.ops
            ),
        )
        if stage.ops[0].kind == op
        else stage
        for stage in program.phases[0]
    ]
    with pytest.raises(AssertionError, match="numpy and device differ"):
        check[26](on_host(2), plan, Program.single("short", stages), start=positive_variance)


def test_a_warm_up_that_writes_weights_in_secret_fails_27():
    check[27](on_host(2), PLAN, copied_outside((G,), (W,)))
    with pytest.raises(AssertionError, match="changed"):
        check[27](on_host(2), PLAN, copied_outside((G,), ()))


@pytest.mark.parametrize("side", ["host", "device"])
def test_a_leak_of_each_replay_fails_31(side, monkeypatch):
    honest, kept = trlow.Replay.run, []

    def leaking(replay, steps, **keywords):
        honest(replay, steps, **keywords)
        if side == "host":
            kept.append(np.ones(steps * 16 << 10, np.uint8))
        else:
            pointer = c_void_p()
            runtime_cudart[0].cudaMalloc(byref(pointer), 4096)
            kept.append(pointer)

    runtime_cudart = []
    plan, program = every_op()

    def make(runtime):
        runtime_cudart[:] = [runtime.platform.cudart]
        return program

    monkeypatch.setattr(trlow.Replay, "run", leaking)
    with pytest.raises(AssertionError, match=r"bytes of the host|bytes free"):
        check[31](on_host(2), plan, make, steps=600)
    if side == "device":
        for pointer in kept:
            runtime_cudart[0].cudaFree(pointer)


def test_a_rank_alone_that_touches_nccl_fails_32():
    plan, program = every_op()

    def make(runtime):
        assert runtime.platform.nccl is not None
        return program

    with pytest.raises(AssertionError, match=r"one rank uses .*nccl"):
        check[32](on_host(1), plan, make)


def test_a_wrong_collective_of_one_rank_fails_32(monkeypatch):
    plan, program = every_op()
    check[32](on_host(1), plan, program, start=positive_variance)
    honest = testing_replay.run

    def broken(*arguments):
        found = honest(*arguments)
        read(found[0], plan.range("sum.float32"))[0] += 1
        return found

    monkeypatch.setattr(testing_replay, "run", broken)
    with pytest.raises(AssertionError, match="numpy differ"):
        check[32](on_host(1), plan, program, start=positive_variance)


def test_a_stage_captured_again_or_a_wrong_mean_fails_32b(monkeypatch):
    honest = trlow.Runtime.capture

    def forgetful(runtime, program, *arguments, variant):
        """Each communication stage clears bytes of its own beside, so that it equals no other."""
        place = runtime.plan["feature"].offset + 256 * runtime.plan.variants.index(variant)
        beside = range_op.clear(Range(place, 4, F32, "beside", variant))
        compute, *rest = program.phases[0]
        own = [Stage(stage.name, stage.stream, (*stage.ops, beside)) for stage in rest]
        program = Program.single(program.name, (compute, *own))
        return honest(runtime, program, *arguments, variant=variant)

    monkeypatch.setattr(trlow.Runtime, "capture", forgetful)
    with pytest.raises(AssertionError, match="COMM_0 was captured 4 times, not 1"):
        check["32b"](on_host(2))
    monkeypatch.undo()
    monkeypatch.setattr(testing_replay, "mean_all_reduce", sum_as_mean)
    with pytest.raises(AssertionError, match="rank 0: COMM_0 is"):
        check["32b"](on_host(2))


def test_numpy_says_when_a_sum_has_to_be_rounded():
    plan = small_plan()
    r = plan.range("Q_SMALL.0")
    program = Program.single("sum", (Stage("S", Stream.UPDATE, (range_op.sum_all_reduce(r),)),))
    for values, exact in (((1.0, 254.0), True), ((1.0, 256.0), False), ((1.0, np.inf), False)):
        states = [initial_bytes(plan, rank) for rank in range(2)]
        for state, value in zip(states, values, strict=True):
            store(state, r, np.full(r.count, value, np.float32))
        assert emulate(program, states) == exact


@given(st.integers(0, 2**32 - 1))
@example(0x3F808000)  # halfway: down to even
@example(0x3F818000)  # halfway: up to even
@example(0x7F7FFFFF)  # up to infinity
@example(0x7F800001)  # a NaN that would round to another
def test_bfloat16_rounds_to_the_nearest_and_of_two_to_the_even_one(bits):
    (found,) = round_bf16(np.array([bits], np.uint32))
    (value,) = np.array([bits], np.uint32).view(np.float32)
    if not np.isfinite(value):
        assert np.array_equal(widen_bf16(np.array([found])), [value], equal_nan=True)
        return
    value = float(value)
    below = bits >> 16
    numbers = widen_bf16(np.array([below, below + 1], np.uint16)).astype(np.float64)
    numbers[np.isinf(numbers)] = np.copysign(2.0**128, value)
    down, up = np.abs(numbers - value)
    assert found == (below if down < up or (down == up and below % 2 == 0) else below + 1)


def test_every_check_is_seen_to_fail():
    """By a broken operation, or by a test above whose name says which checks it makes fail."""
    named = re.findall(r"_(\d\db?)(?=_| )", " ".join(globals()) + " ")
    seen = {str(number) for number, *_ in BROKEN_OPS} | set(named)
    assert seen == set(map(str, DEVICE_INVARIANTS))
