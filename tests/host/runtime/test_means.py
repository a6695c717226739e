"""Mean strategies on 1 to 8 host devices against exact data, eager, fused and staged."""

from __future__ import annotations

import numpy as np
import pytest
from mean_ranks import COUNT, FLOATS, MODES, Ranks, few_bits, make_plan

import trlow
from trlow.device import Platform
from trlow.errors import TrlowError
from trlow.range_op import MEAN_STRATEGIES
from trlow.testing_bytes import round_bf16, widen_bf16

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def open_ranks():
    """open_ranks(n): n ranks, closed when the test ends."""
    opened = []

    def open_them(n):
        settings = trlow.Settings(
            device="host",
            gpus=f"0-{n - 1}" if n > 1 else "0",
            host_devices=8,
            any_world_size=True,
            deadline_s=20.0,
        )
        opened.append(trlow.Runtime(settings, make_plan()))
        ranks = Ranks(opened[-1])
        ranks.factor(1 / n)
        return ranks

    yield open_them
    for runtime in opened:
        runtime.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", MEAN_STRATEGIES)
@pytest.mark.parametrize("n", [2, 4, 8])
def test_means_of_few_bit_numbers_are_exact(open_ranks, n, strategy, mode):
    ranks = open_ranks(n)
    mean = ranks.prepared(FLOATS, strategy, mode)
    values = few_bits(n)
    for name in FLOATS:
        ranks.put(name, values)
    mean()
    expected = values.sum(0) / (1 if strategy == "deferred" else n)
    for name in FLOATS:
        for got in ranks.get(name):
            assert (got == expected).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", MEAN_STRATEGIES)
def test_means_over_three_ranks_are_rounded_as_documented(open_ranks, strategy, mode):
    """1/3 has to be rounded. After an exact sum that makes an ulp; before it, three products and
    two additions, rounded too, make 2 ulp of the largest input at most.
    """
    ranks = open_ranks(3)
    mean = ranks.prepared(("f32",), strategy, mode)
    values = few_bits(3)
    ranks.put("f32", values)
    mean()
    exact = values.astype(np.float64).sum(0) / 3
    first, *others = ranks.get("f32")
    assert all(other.tobytes() == first.tobytes() for other in others)
    got = first * np.float32(1 / 3) if strategy == "deferred" else first
    third = np.float32(1 / 3)
    if strategy in {"avg", "premulsum"}:
        assert (got == (values[0] * third + values[1] * third) + values[2] * third).all()
        assert (np.abs(got - exact) <= 2 * np.spacing(np.abs(values).max(0))).all()
    else:
        assert (got == values.sum(0) * third).all()
        assert (np.abs(got - exact) <= np.spacing(np.abs(exact).astype(np.float32))).all()


@pytest.mark.parametrize("mode", MODES)
def test_float16_overflows_only_where_a_sum_comes_before_the_scale(open_ranks, mode):
    ranks = open_ranks(2)
    for strategy in MEAN_STRATEGIES:
        mean = ranks.prepared(("f16",), strategy, mode)
        ranks.put("f16", np.full((2, COUNT), 40_000))
        mean()
        early = strategy in {"avg", "premulsum"}
        for got in ranks.get("f16"):
            assert (got == (40_000 if early else np.inf)).all(), strategy


def test_an_integer_average_is_divided_towards_zero(open_ranks):
    ranks = open_ranks(4)
    mean = ranks.prepared(("i32",), "avg", "fused")
    values = np.random.default_rng(1).integers(-99, 100, (4, COUNT))
    ranks.put("i32", values)
    mean()
    for got in ranks.get("i32"):
        assert (got == np.trunc(values.sum(0) / 4)).all()


@pytest.mark.parametrize("mode", ["fused", "staged"])
@pytest.mark.parametrize("strategy", ["sum_then_scale", "premulsum"])
def test_a_factor_is_read_at_every_replay(open_ranks, strategy, mode):
    ranks = open_ranks(2)
    mean = ranks.prepared(FLOATS, strategy, mode)
    for factor in (0.5, 0.25, -2.0):
        ranks.factor(factor)
        for name in FLOATS:
            ranks.put(name, few_bits(2))
        mean()
        for name in FLOATS:
            assert all((got == few_bits(2).sum(0) * factor).all() for got in ranks.get(name))


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_communicates_nothing_and_keeps_every_bit(open_ranks, mode):
    ranks = open_ranks(1)
    odd = np.random.default_rng(2).integers(0, 2**16, COUNT, np.uint16)
    odd[np.isnan(odd.view(np.float16))] = 0
    for strategy in MEAN_STRATEGIES:
        mean = ranks.prepared(FLOATS, strategy, mode)
        (arena,) = ranks.runtime.arenas
        arena.copy_in("f16", odd.view(np.float16))
        arena.copy_in("bf16", round_bf16(widen_bf16(odd).view(np.uint32)))
        before = [arena.copy_out(name).tobytes() for name in FLOATS]
        mean()
        assert [arena.copy_out(name).tobytes() for name in FLOATS] == before, strategy
    assert "nccl" not in ranks.runtime.platform.libraries


def test_reductions_are_made_before_the_capture_and_destroyed_at_the_end(open_ranks):
    ranks = open_ranks(2)
    calls = ranks.runtime.platform.host.trlowHostCalls
    made, gone = (f"ncclRedOp{what}".encode() for what in ("CreatePreMulSum", "Destroy"))
    before = calls(made), calls(gone)
    program = ranks.program(FLOATS, "premulsum")
    ranks.runtime.eager(program)
    assert calls(made) - before[0] == 2 * len(FLOATS)
    ranks.runtime.capture(program, "fused").run(2)
    ranks.runtime.capture(program, "staged").run(2)
    assert calls(made) - before[0] == 2 * len(FLOATS)
    assert calls(gone) == before[1]
    ranks.runtime.close()
    assert calls(gone) - before[1] == 2 * len(FLOATS)


def test_a_premultiplied_sum_works_again_after_a_recovery(open_ranks):
    ranks = open_ranks(2)
    mean = ranks.prepared(("f32",), "premulsum", "eager")

    def broken(rank, stream):
        message = "no step"
        raise OSError(message)

    stage = trlow.Stage(
        "S", trlow.Stream.COMP_1, external=trlow.External("callback", (), (), broken)
    )
    with pytest.raises(TrlowError, match="no step"):
        ranks.runtime.eager(trlow.Program.single("broken", (stage,)))
    ranks.put("f32", few_bits(2))
    mean()
    mean()
    for strategy in MEAN_STRATEGIES:
        again = ranks.prepared(("f32",), strategy, "fused")
        ranks.put("f32", few_bits(2))
        again()
        expected = few_bits(2).sum(0) / (1 if strategy == "deferred" else 2)
        assert all((got == expected).all() for got in ranks.get("f32"))


LIVE = (b"streams", b"events", b"graphs", b"execs", b"allocations", b"pinned", b"comms", b"modules")


@pytest.mark.parametrize("function", ["ncclRedOpCreatePreMulSum", "ncclRedOpDestroy"])
def test_a_reduction_that_fails_leaves_nothing_behind(open_ranks, function):
    platform = Platform.open(trlow.Settings(device="host", host_devices=8))
    live = [platform.host.trlowHostLive(name) for name in LIVE]
    for nth in (1, 2):
        ranks = open_ranks(2)
        platform.host.trlowHostFail(function.encode(), nth, 2)
        with pytest.raises(TrlowError, match=function):
            try:
                ranks.runtime.capture(ranks.program(("f32",), "premulsum")).run(1)
            finally:
                ranks.runtime.close()
        platform.host.trlowHostFail(function.encode(), 0, 0)
        assert [platform.host.trlowHostLive(name) for name in LIVE] == live
