"""A descriptor's arithmetic, against numpy and beyond 32 bits."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from trlow.dtensor import DTensor, row_major_strides
from trlow.dtype import F32
from trlow.testing import shapes


@given(shapes())
def test_strides_are_those_of_a_dense_numpy_array(shape):
    itemsize = 4
    dense = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), shape, [0] * len(shape))
    expected = np.empty_like(dense, order="C").strides
    assert tuple(stride * itemsize for stride in row_major_strides(shape)) == expected


def test_sizes_beyond_32_bits_are_exact():
    shape = (2**31, 3, 5)
    tensor = DTensor(0, "x", shape, F32, "R", 2**40, row_major_strides(shape), 2**40)
    assert tensor.count == 15 * 2**31
    assert tensor.nbytes == 60 * 2**31
    assert tensor.end == 2**40 + 60 * 2**31
    assert tensor.strides == (15, 5, 1)


def test_a_scalar_has_one_element():
    tensor = DTensor(0, "x", (), F32, "R", 256, (), 4)
    assert (tensor.count, tensor.nbytes, tensor.end) == (1, 4, 260)
