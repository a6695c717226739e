"""Element types against numpy and the order of ncclDataType_t."""

from __future__ import annotations

import pytest

from trlow.dtype import BF16, DTYPES, F8E4M3, F8E5M2, F16, DType

# ncclDataType_t of nccl.h, in the order of its codes
NCCL_ORDER = [
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3", "float8_e5m2",
]  # fmt: skip


def test_codes_are_those_of_nccl():
    assert [
        dtype.name for dtype in sorted(DTYPES.values(), key=lambda d: d.nccl_code)
    ] == NCCL_ORDER
    assert [DTYPES[name].nccl_code for name in NCCL_ORDER] == list(range(12))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_numpy_carries_the_same_bytes(dtype: DType):
    assert dtype.numpy.itemsize == dtype.itemsize


def test_what_numpy_lacks_is_carried_as_unsigned():
    assert str(BF16.numpy) == "uint16"
    assert str(F8E4M3.numpy) == str(F8E5M2.numpy) == "uint8"
    assert str(F16.numpy) == "float16"


def test_only_young_types_need_a_young_nccl():
    assert {d.name for d in DTYPES.values() if d.nccl_since >= 22400} == {
        "float8_e4m3",
        "float8_e5m2",
    }
    assert {d.name for d in DTYPES.values() if d.nccl_since >= 21000} == set(NCCL_ORDER[9:])
