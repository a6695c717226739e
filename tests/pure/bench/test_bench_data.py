"""Sizes, exact data, variants: what `trlow bench` asks for and expects, as arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trlow.bench.collectives import COLLECTIVES
from trlow.bench.exact import (
    OPS,
    PERIOD,
    Exact,
    Segment,
    check_op,
    combined,
    decode,
    dtype_of,
    encode,
    factors,
    is_float,
    numbers,
)
from trlow.bench.sizes import parse_size, short, sizes_between
from trlow.bench.variant import Variant, choose, parse_ctas, variants_of
from trlow.dtype import DTYPES, F8E4M3, F8E5M2, F32
from trlow.errors import SettingsError

ranks = st.integers(1, 16)
dtypes = st.sampled_from(list(DTYPES.values()))


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("64K", 65536), ("512m", 512 << 20), ("1G", 1 << 30)]
)
def test_sizes_are_read_in_powers_of_1024(text, nbytes):
    assert parse_size("-b", text) == nbytes
    assert short(nbytes) == text.upper()


@given(st.integers(1, 10**6), st.integers(0, 10**7), st.integers(2, 9))
def test_sizes_step_by_a_factor_or_by_bytes(least, more, factor):
    most = least + more
    by_factor = sizes_between(least, most, factor, None)
    assert by_factor[0] == least
    assert by_factor[-1] <= most < by_factor[-1] * factor
    assert all(b == a * factor for a, b in pairwise(by_factor))
    step = max(1, more // 7)
    by_step = sizes_between(least, most, None, step)
    assert by_step == tuple(range(least, most + 1, step))


@given(dtypes, st.sampled_from(OPS), ranks, st.randoms(use_true_random=False))
@example(F8E5M2, "avg", 16, Random(0))
def test_every_partial_result_in_any_order_is_exact_in_the_dtype(dtype, op, count, random):
    if op == "avg" and (not is_float(dtype) or count & (count - 1)):
        return
    blocks = numbers(dtype, op, count)
    weighted = [block * by for block, by in zip(blocks, factors(op, count), strict=True)]
    if op == "avg":
        assert all((block % count == 0).all() for block in blocks)
        weighted = [block // count for block in blocks]
    order = list(range(count))
    random.shuffle(order)
    by = {"prod": np.multiply, "max": np.maximum, "min": np.minimum}.get(op, np.add)
    partial = weighted[order[0]]
    for rank in order:
        exact(weighted[rank][:200], dtype)
        exact(blocks[rank][:200], dtype)
    for rank in order[1:]:
        partial = by(partial, weighted[rank])
        exact(partial[:200], dtype)
    assert (partial == combined(op, blocks)).all()


def exact(values, dtype) -> None:
    encoded = encode(values, dtype)
    assert encoded.dtype == dtype.numpy
    assert [decode(element, dtype) for element in encoded] == values.tolist()


@given(dtypes, st.sampled_from(["sum", "max", "prod"]), st.integers(2, 8))
def test_a_missing_rank_or_a_shifted_chunk_changes_the_result(dtype, op, count):
    blocks = numbers(dtype, op, count)
    whole = combined(op, blocks)
    for rank in range(count):
        rest = [block for other, block in enumerate(blocks) if other != rank]
        assert (combined(op, rest) != whole).any()
    for shift in (1, 2, 512, 4096):
        assert (np.roll(whole, shift) != whole).any()


def test_eight_bit_floats_are_those_of_the_standard():
    for dtype, code, value in (
        (F8E4M3, 0x7E, 448.0),
        (F8E4M3, 0x01, 2.0**-9),
        (F8E4M3, 0x38, 1.0),
        (F8E5M2, 0x7B, 57344.0),
        (F8E5M2, 0x01, 2.0**-16),
        (F8E5M2, 0xBC, -1.0),
        (F8E5M2, 0x7C, math.inf),
    ):
        assert decode(np.uint8(code), dtype) == value
    for dtype, code in ((F8E4M3, 0x7F), (F8E5M2, 0x7D)):
        assert math.isnan(decode(np.uint8(code), dtype))


@given(st.integers(0, 3 * PERIOD), st.integers(0, PERIOD - 1), st.integers(0, 2 * PERIOD))
def test_a_segment_repeats_its_block(count, phase, first):
    block = np.arange(PERIOD)
    part = Segment(0, 10**6, block, phase).part(first, count)
    assert (part == (np.arange(count) + first + phase) % PERIOD).all()


@given(st.sampled_from(list(COLLECTIVES.values())), st.integers(1, 8), st.integers(1, 40))
def test_received_segments_fill_what_a_rank_receives(collective, ranks, count):
    expected = Exact(collective, F32, "sum", 0, ranks)
    sent, received = collective.counts(count, ranks)
    for rank in range(ranks):
        assert expected.sent(rank, count).count == sent
        filled = sum(segment.count for segment in expected.received(rank, count))
        assert filled == (0 if collective.name == "reduce" and rank else received)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("all_reduce", 1.5),
        ("reduce_scatter", 0.75),
        ("all_gather", 0.75),
        ("broadcast", 1),
        ("reduce", 1),
        ("sendrecv", 1),
    ],
)
def test_busbw_is_that_of_nccl_tests(name, factor):
    assert COLLECTIVES[name].factor(4) == factor


def test_names_of_nccl_tests_and_of_trlow_name_dtypes():
    assert dtype_of("half") is dtype_of("float16")
    assert dtype_of("f8e4m3") is F8E4M3
    with pytest.raises(SettingsError, match="quarter"):
        dtype_of("quarter")
    with pytest.raises(SettingsError, match="truncates"):
        check_op("avg", DTYPES["uint8"], 2, exact=False)
    with pytest.raises(SettingsError, match="-c 0"):
        check_op("avg", F32, 3, exact=True)
    check_op("avg", F32, 3, exact=False)


# -- variants


def test_lists_make_every_combination():
    found = variants_of(
        ["Ring", "Tree"], ["LL", "Simple"], ["plain"], ["threads", "group"], [None], [None], [None]
    )
    assert len(found) == len(set(found)) == 8
    assert found[0].name == "Ring/LL"
    assert found[1].name == "Ring/LL group"
    assert choose("--algo", "ring, NVLStree", ("Ring", "NVLSTree")) == ["Ring", "NVLSTree"]
    assert parse_ctas("1,4-8") == [(1, 1), (4, 8)]


@pytest.mark.parametrize(
    ("algo", "proto", "version", "selection", "variables"),
    [
        ("Ring", "LL128", 22809, None, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL128"}),
        ("Ring", "LL128", 23100, "RING_LL128", {}),
        # RING_LL would match RING_LL128 as well
        ("Ring", "LL", 23203, None, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}),
        # NVLS alone would match NVLSTREE as well
        ("NVLS", None, 23203, "NVLS_", {}),
        ("CollNetChain", "Simple", 23203, "COLLNET_CHAIN_SIMPLE", {}),
        (None, "Simple", 23203, None, {"NCCL_PROTO": "Simple"}),
        (None, None, 23203, None, {}),
    ],
)
def test_a_pair_is_chosen_per_call_where_that_is_unambiguous(
    algo, proto, version, selection, variables
):
    variant = Variant(algo=algo, proto=proto)
    assert variant.selection(version) == selection
    assert variant.environment(by_call=selection is not None) == variables


def test_mixing_is_a_variable():
    assert Variant(mixing=False).environment(by_call=False) == {"NCCL_GRAPH_MIXING_SUPPORT": "0"}
    assert Variant(mixing=True).name == "mixing=on"


@pytest.mark.parametrize(
    ("variant", "collective", "variables", "reason"),
    [
        (Variant(algo="NVLS"), "all_reduce", {"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0"),
        (Variant(algo="NVLSTree"), "all_reduce", {"NCCL_NVLS_ENABLE": "0"}, "switched off"),
        (Variant(algo="NVLS"), "all_reduce", {}, None),
        (Variant(algo="NVLS", proto="LL"), "all_reduce", {}, "Simple only"),
        (Variant(algo="Tree"), "broadcast", {}, "NCCL has no Tree broadcast; it has Ring"),
        (Variant(algo="Ring"), "sendrecv", {}, "none to choose"),
        (Variant(proto="LL"), "sendrecv", {}, None),
    ],
)
def test_what_cannot_be_is_not_tried(variant, collective, variables, reason):
    found = variant.refused(COLLECTIVES[collective], variables)
    assert (found is None) if reason is None else (reason in found)
