"""Element types: size in bytes, NCCL's code, the NCCL version that brought it, the C type.

numpy has no bfloat16 and no float8: their arrays are carried as unsigned integers of the same size,
which is also how the kernels see 16-bit floats.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "BF16",
    "DTYPES",
    "F8E4M3",
    "F8E5M2",
    "F16",
    "F32",
    "F64",
    "I8",
    "I32",
    "I64",
    "U8",
    "U32",
    "U64",
    "DType",
]


@dataclass(frozen=True, slots=True, repr=False)
class DType:
    """One element type. The constants below are the only ones; look them up in `DTYPES` by name."""

    name: str
    itemsize: int  # bytes
    nccl_code: int  # ncclDataType_t of nccl.h
    nccl_since: int  # NCCL version code that knows it, e.g. 22400 for 2.24.0
    c_type: str  # element type of kernel parameters; 16-bit and 8-bit floats as their bits

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type with the same bytes: bfloat16 as uint16, float8 as uint8."""
        return np.dtype(_CARRIERS.get(self.name, self.name))

    def __repr__(self) -> str:
        """Return the name alone: it stands in the text of every range and tensor."""
        return f"DType({self.name!r})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """Print one line where IPython and hypothesis would print a page of fields."""
        printer.text(repr(self))

    def __str__(self) -> str:
        """Return the name."""
        return self.name


_CARRIERS = {"bfloat16": "uint16", "float8_e4m3": "uint8", "float8_e5m2": "uint8"}

# Codes: ncclDataType_t in nccl.h. Versions: 2.0 counts 1000 * major + 100 * minor (until 2.8),
# later ones 10000 * major + 100 * minor + patch (NCCL_VERSION in nccl.h).
_ALWAYS = 2000
I8 = DType("int8", 1, 0, _ALWAYS, "signed char")
U8 = DType("uint8", 1, 1, _ALWAYS, "unsigned char")
I32 = DType("int32", 4, 2, _ALWAYS, "int")
U32 = DType("uint32", 4, 3, _ALWAYS, "unsigned int")
I64 = DType("int64", 8, 4, _ALWAYS, "long long")
U64 = DType("uint64", 8, 5, _ALWAYS, "unsigned long long")
F16 = DType("float16", 2, 6, _ALWAYS, "unsigned short")
F32 = DType("float32", 4, 7, _ALWAYS, "float")
F64 = DType("float64", 8, 8, _ALWAYS, "double")
BF16 = DType("bfloat16", 2, 9, 21000, "unsigned short")
F8E4M3 = DType("float8_e4m3", 1, 10, 22400, "unsigned char")
F8E5M2 = DType("float8_e5m2", 1, 11, 22400, "unsigned char")

DTYPES: dict[str, DType] = {
    dtype.name: dtype for dtype in (I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, F8E4M3, F8E5M2)
}
