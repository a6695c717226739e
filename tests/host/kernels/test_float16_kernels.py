"""16-bit floats: fp16 against numpy, bf16 against an integer reference. Invariant 21."""

from __future__ import annotations

import numpy as np
import pytest

ALL_PATTERNS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def every_value_and_halfway(kind):
    """Bits of fp32: all 16-bit values, every point half way between two, and its neighbours."""
    if kind == "f16":
        positive = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float64)
        halfway = ((positive[1:] + positive[:-1]) / 2).astype(np.float32).view(np.uint32)
        limit = np.array([65520], np.float32).view(np.uint32)  # half way to 2^16
    else:
        halfway = (np.arange(0x7F80, dtype=np.uint32) << 16) + 0x8000
        limit = np.array([0x7F7F8000], np.uint32)
    points = np.concatenate([halfway, limit])
    near = np.concatenate([points - 1, points, points + 1])
    rng = np.random.default_rng(3)
    anything = rng.integers(0, 1 << 32, 200_000, np.uint64).astype(np.uint32)
    special = np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000], np.uint32)
    whole = ALL_PATTERNS.astype(np.uint32) << 16
    bits = np.concatenate([near, special, whole, anything])
    return np.concatenate([bits, bits | 0x80000000])


def round_to_bf16(bits):
    """Round to nearest, ties to even, in integers; a NaN becomes quiet and keeps its sign."""
    bits = bits.astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def test_every_fp16_value_widens_as_numpys(run):
    wide = np.zeros(1 << 16, np.float32)
    run("cast_f16_f32", wide, ALL_PATTERNS, wide.size)
    expected = ALL_PATTERNS.view(np.float16).astype(np.float32)
    assert np.array_equal(wide.view(np.uint32), expected.view(np.uint32))


def test_fp32_narrows_to_fp16_as_numpys(run):
    bits = every_value_and_halfway("f16")
    narrow = np.zeros(bits.size, np.uint16)
    run("cast_f32_f16", narrow, bits, bits.size)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        expected = bits.view(np.float32).astype(np.float16).view(np.uint16)
    assert np.array_equal(narrow, expected)


def test_every_fp16_value_survives_the_round_trip(run):
    wide, back = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.uint16)
    run("cast_f16_f32", wide, ALL_PATTERNS, wide.size)
    run("cast_f32_f16", back, wide, wide.size)
    assert np.array_equal(back, ALL_PATTERNS)


def test_fp32_narrows_to_bf16_to_nearest_even(run):
    bits = every_value_and_halfway("bf16")
    narrow = np.zeros(bits.size, np.uint16)
    run("cast_f32_bf16", narrow, bits, bits.size)
    assert np.array_equal(narrow, round_to_bf16(bits))


def test_every_bf16_value_widens_exactly(run):
    wide = np.zeros(1 << 16, np.uint32)
    run("cast_bf16_f32", wide, ALL_PATTERNS, wide.size)
    assert np.array_equal(wide, ALL_PATTERNS.astype(np.uint32) << 16)


@pytest.mark.parametrize("kernel", ["cast_f32_f16", "cast_f32_bf16"])
def test_a_nan_stays_a_nan_and_infinity_infinity(run, kernel):
    bits = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F800000, 0xFF800000], np.uint32)
    narrow = np.zeros(5, np.uint16)
    run(kernel, narrow, bits, 5)
    infinity = 0x7C00 if kernel.endswith("_f16") else 0x7F80
    assert ((narrow[:3] & 0x7FFF) > infinity).all()
    assert list(narrow[3:]) == [infinity, infinity | 0x8000]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 15, 17, 255, 256, 257])
def test_casts_write_their_range_only(run, guarded, count):
    for offset in range(8):
        wide = guarded(np.arange(count, dtype=np.float32), offset)
        half = guarded(np.zeros(count, np.uint16), (offset * 3) % 8)
        run("cast_f32_f16", half.array, wide.array, count)
        assert np.array_equal(half.array.view(np.float16), np.arange(count, dtype=np.float16))
        run("cast_f16_f32", wide.array, half.array, count)
        assert np.array_equal(wide.array, np.arange(count, dtype=np.float32))
        run("cast_f32_bf16", half.array, wide.array, count)
        assert np.array_equal(half.array, round_to_bf16(wide.array.view(np.uint32)))
        run("cast_bf16_f32", wide.array, half.array, count)
        assert np.array_equal(wide.array.view(np.uint32) >> 16, half.array)
        assert wide.intact()
        assert half.intact()
