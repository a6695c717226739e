"""Range kernels against numpy, at every offset and at counts around the vector widths.

Invariants 17 and 22.
"""

from __future__ import annotations

import numpy as np
import pytest

COUNTS = (0, 1, 2, 3, 7, 15, 17, 255, 256, 257, 4099)
OFFSETS = range(8)


def f32(*values):
    return np.array(values, np.float32)


def i32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize("count", COUNTS)
def test_clear_zeroes_its_bytes_and_no_other(run, guarded, count):
    for offset in OFFSETS:
        target = guarded(np.full(count, 0xFF, np.uint8), offset)
        run("clear", target.array, count)
        assert not target.array.any()
        assert target.intact()


@pytest.mark.parametrize("count", COUNTS)
def test_copy_moves_every_byte_whatever_the_two_alignments(run, guarded, rng, count):
    for offset in OFFSETS:
        for other in (offset, 0, 5):
            source = guarded(rng.integers(0, 256, count, np.uint8), other)
            target = guarded(np.zeros(count, np.uint8), offset)
            run("copy", target.array, source.array, count)
            assert np.array_equal(target.array, source.array)
            assert target.intact()


@pytest.mark.parametrize("skip", [0, 1, -3])
def test_copy_unless_copies_only_when_the_flag_is_zero(run, guarded, rng, skip):
    for offset in OFFSETS:
        source = rng.integers(0, 256, 257, np.uint8)
        target = guarded(np.zeros(257, np.uint8), offset)
        run("copy_unless", target.array, source, i32(skip), 257)
        assert np.array_equal(target.array, source if skip == 0 else np.zeros(257, np.uint8))
        assert target.intact()


@pytest.mark.parametrize("count", COUNTS)
def test_scale_f32_multiplies_once(run, guarded, rng, count):
    for offset in OFFSETS:
        values = rng.standard_normal(count).astype(np.float32)
        target = guarded(values, offset)
        run("scale_f32", target.array, f32(0.3), count)
        assert np.array_equal(target.array, values * np.float32(0.3))
        assert target.intact()


@pytest.mark.parametrize("count", COUNTS)
def test_scale_f16_multiplies_in_float32_and_rounds_once(run, guarded, rng, count):
    for offset in OFFSETS:
        values = rng.standard_normal(count).astype(np.float16)
        target = guarded(values, offset)
        run("scale_f16", target.array, f32(0.3), count)
        expected = (values.astype(np.float32) * np.float32(0.3)).astype(np.float16)
        assert np.array_equal(target.array, expected)
        assert target.intact()


@pytest.mark.parametrize("count", COUNTS)
def test_scale_bf16_by_a_power_of_two_is_exact(run, guarded, rng, count):
    for offset in OFFSETS:
        values = rng.integers(0x3F00, 0x4100, count).astype(np.uint16)  # 0.5 to 8
        target = guarded(values, offset)
        run("scale_bf16", target.array, f32(0.25), count)
        assert np.array_equal(target.array, values - 2 * 0x80)  # the exponent lies at bit 7
        assert target.intact()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("kernel", "dtype", "exponent"),
    [
        ("nan_check_f32", np.uint32, 0x7F800000),
        ("nan_check_f16", np.uint16, 0x7C00),
        ("nan_check_bf16", np.uint16, 0x7F80),
    ],
)
def test_nan_check_sees_one_bad_element_wherever_it_is(
    run, guarded, count, kernel, dtype, exponent
):
    largest = dtype(exponent - 1)
    sign = dtype(1 << (8 * np.dtype(dtype).itemsize - 1))
    places = range(count) if count <= 17 else (0, 1, count // 2, count - 2, count - 1)
    for place in places:
        for bad in (dtype(exponent), dtype(exponent | 1), dtype(exponent | sign)):
            x = guarded(np.full(count, largest, dtype), place % 8)
            flag = guarded(i32(0))
            run(kernel, flag.array, x.array, count)
            assert flag.array[0] == 0
            x.array[place] = bad
            run(kernel, flag.array, x.array, count)
            assert flag.array[0] == 1
            assert flag.intact()


def test_nan_check_leaves_a_flag_that_is_set(run):
    flag = i32(1)
    run("nan_check_f32", flag, f32(1, 2, 3), 3)
    assert flag[0] == 1


def test_nan_check_does_not_read_beyond_its_range(run, guarded):
    x = guarded(np.zeros(17, np.float32), 3)
    x.raw[: x.inside.start] = 0xFF  # NaN on both sides
    x.raw[x.inside.stop :] = 0xFF
    flag = i32(0)
    run("nan_check_f32", flag, x.array, 17)
    assert flag[0] == 0


@pytest.mark.parametrize("skip", [0, 1])
def test_metrics_accumulate_unless_skipped(run, guarded, rng, skip):
    for count in COUNTS[:8]:
        for offset in OFFSETS:
            before, metrics = rng.standard_normal((2, count)).astype(np.float32)
            total = guarded(before, offset)
            run("accumulate_metrics", total.array, metrics, f32(0.25), i32(skip), count)
            added = before + metrics * np.float32(0.25)
            assert np.array_equal(total.array, before if skip else added)
            assert total.intact()


def test_bn_inference_folds_the_statistics(run, guarded, rng):
    for count in COUNTS:
        for offset in OFFSETS:
            weight, bias, mean = rng.standard_normal((3, count)).astype(np.float32)
            var, eps = rng.random(count).astype(np.float32), np.float32(1e-5)
            scale, shift = guarded(np.zeros_like(var), offset), guarded(np.zeros_like(var), 1)
            run("bn_inference", scale.array, shift.array, weight, bias, mean, var, f32(eps), count)
            expected = weight / np.sqrt(var + eps)
            assert np.array_equal(scale.array, expected)  # IEEE operations, one after another
            assert np.array_equal(shift.array, bias - mean * expected)
            assert scale.intact()
            assert shift.intact()


@pytest.mark.parametrize("count", COUNTS)
def test_add_f32_adds_once(run, guarded, rng, count):
    for offset in OFFSETS:
        one, other = rng.standard_normal((2, count)).astype(np.float32)
        target = guarded(one, offset)
        run("add_f32", target.array, guarded(other, 7 - offset).array, count)
        assert np.array_equal(target.array, one + other)
        assert target.intact()


@pytest.mark.parametrize("count", COUNTS)
def test_add_f16_adds_in_float32_and_rounds_once(run, guarded, rng, count):
    for offset in OFFSETS:
        one, other = rng.standard_normal((2, count)).astype(np.float16)
        target = guarded(one, offset)
        run("add_f16", target.array, guarded(other, 7 - offset).array, count)
        expected = (one.astype(np.float32) + other.astype(np.float32)).astype(np.float16)
        assert np.array_equal(target.array, expected)
        assert target.intact()


@pytest.mark.parametrize("count", COUNTS)
def test_add_bf16_of_equal_numbers_doubles_them(run, guarded, rng, count):
    for offset in OFFSETS:
        values = rng.integers(0x3F00, 0x4100, count).astype(np.uint16)
        target = guarded(values, offset)
        run("add_bf16", target.array, guarded(values, 7 - offset).array, count)
        assert np.array_equal(target.array, values + 0x80)  # the exponent lies at bit 7
