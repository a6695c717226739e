"""The launches that every_kernel.py makes: odd sizes, and arrays that begin anywhere.

A new kernel over `count` elements or `nbytes` bytes needs no entry here; any other says its shapes
and extents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import kernel_tables
import numpy as np

from trlow.kernel import declarations

DTYPES = {"f32": np.float32, "u16": np.uint16, "i32": np.int32, "u8": np.uint8, "i64": np.int64,
          "f64": np.float64}  # fmt: skip

# Elements of each array as factors of extents. A parameter of ONE has one element.
ONE = {
    *("lr", "mu", "weight_decay", "grad_scale", "skip", "factor", "eps", "momentum", "flag"),
    *("counter", "slot", "row", "steps", "turn", "shift"),
}
# Of the kernels over rows: mu, decay, whether it is nesterov; two betas, epsilon, two decays.
NUMBERS = {"momentum_rows": (0.9, 0.01, 1.0), "adam_rows": (0.9, 0.999, 1e-8, 0.01, 0.02)}
CONV = {"x": "n h width cin", "w": "kh kw cin cout", "y": "n ho wo cout"}
FC = {"x": "n cin", "w": "cin cout", "b": "cout", "y": "n cout"}
POOL = {"x": "n h width c", "y": "n ho wo c"}
AVERAGE = {"x": "n hw c", "y": "n c"}
NORM = dict.fromkeys(
    ("mean", "rstd", "weight", "bias", "dweight", "dbias", "next_mean", "next_var", "prev_mean",
     "prev_var", "eq_scale", "eq_bias"), "c",
) | {"x": "rows c", "y": "rows c", "sums": "2 c"}  # fmt: skip
SHAPES = {
    **dict.fromkeys(("conv2d_fwd", "conv2d_bwd_data", "conv2d_bwd_weight"), CONV),
    **dict.fromkeys(("fc_fwd", "fc_bwd_data", "fc_bwd_weight", "fc_bwd_bias"), FC),
    **dict.fromkeys(("maxpool_fwd", "maxpool_bwd"), POOL),
    **dict.fromkeys(("avgpool_fwd", "avgpool_bwd"), AVERAGE),
    **dict.fromkeys(("bn_stats", "bn_apply", "bn_apply_eq", "bn_bwd_reduce", "bn_bwd_data"), NORM),
    "softmax_xent": {
        "result": "3",
        "dlogits": "n classes",
        "predicted": "n",
        "logits": "n classes",
        "labels": "n",
        "rows": "1",
    },
    "stamp": {"slots": "rows stride"},
    "take_turn": {"now": "count", "slots": "turns count"},
}
REDUCTIONS = {
    *("bn_bwd_reduce", "bn_stats", "conv2d_fwd", "conv2d_bwd_data", "conv2d_bwd_weight"),
    *("fc_fwd", "fc_bwd_data", "fc_bwd_weight", "fc_bwd_bias", "avgpool_fwd", "maxpool_bwd"),
    "softmax_xent",
}
BITS = {"cast_f32_f16", "cast_f16_f32", "cast_f32_bf16", "cast_bf16_f32", "nan_check_f32",
        "nan_check_f16", "nan_check_bf16", "copy", "copy_unless", "clear"}  # fmt: skip
CLOCKS = {"stamp"}  # never the same twice: only launched, and looked at for canaries

# Odd sizes: single elements, tails behind vectors, sums over more rows than a block has lanes.
FLAT = [{"count": n, "nbytes": n} for n in (1, 7, 257, 1003, 70_001)]
ROWS = [{"entries": 1}, {"entries": 33}]
EXTENTS = {
    "conv": [
        {"n": 3, "h": 6, "width": 7, "cin": 21, "ho": 3, "wo": 4, "cout": 35, "kh": 3, "kw": 3,
         "stride": 2, "pad": 1},
        {"n": 1, "h": 5, "width": 3, "cin": 1, "ho": 5, "wo": 3, "cout": 3, "kh": 3, "kw": 3,
         "stride": 1, "pad": 1},
        {"n": 5, "h": 9, "width": 3, "cin": 17, "ho": 9, "wo": 3, "cout": 1, "kh": 1, "kw": 1,
         "stride": 1, "pad": 0},
    ],
    "fc": [{"n": 3, "cin": 21, "cout": 35}, {"n": 1, "cin": 1, "cout": 1},
           {"n": 257, "cin": 5, "cout": 17}],
    "maxpool": [
        {"n": 3, "h": 6, "width": 7, "c": 19, "ho": 3, "wo": 3, "k": 2, "stride": 2},
        {"n": 1, "h": 5, "width": 5, "c": 1, "ho": 2, "wo": 2, "k": 3, "stride": 2},
    ],
    "avgpool": [{"n": 3, "hw": 9, "c": 19}, {"n": 1, "hw": 1, "c": 1}],
    "bn_inference": FLAT,
    "bn": [{"rows": 300, "c": 19}, {"rows": 1, "c": 1}, {"rows": 257, "c": 33}],
    "softmax": [{"n": 3, "classes": 10}, {"n": 257, "classes": 7}, {"n": 1, "classes": 1}],
    "gather_rows": ROWS,
    "momentum_rows": ROWS,
    "adam_rows": ROWS,
    "beat": [{"by": 1}, {"by": 3}],
    "next_row": [{"by": 1}],
    "take_turn": [{"turns": 2, "count": 3}],
    "stamp": [{"index": 2, "stride": 5, "rows": 3}],
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One launch: its extents, how far arrays begin behind their allocation, how many blocks."""

    kernel: str
    extents: dict[str, int]
    shift: int
    work: int
    skip: int = 0

    def __str__(self) -> str:
        sizes = " ".join(f"{key}={value}" for key, value in self.extents.items())
        return f"{sizes} shift={self.shift} work={self.work} skip={self.skip}"

    def count(self, parameter: str) -> int:
        """Elements of one array. A gradient has the shape of what it is a gradient of."""
        if parameter in ONE:
            return 1
        if self.kernel in kernel_tables.ARRAYS:
            return self._count_of_rows(parameter)
        shapes = SHAPES.get(self.kernel, {})
        text = shapes.get(parameter) or shapes.get(parameter.removeprefix("d"))
        if text is None:
            return self.extents["nbytes" if "nbytes" in self.names else "count"]
        return math.prod(int(f) if f.isdecimal() else self.extents[f] for f in text.split())

    def _count_of_rows(self, parameter: str) -> int:
        if parameter == "numbers":
            return len(NUMBERS[self.kernel])
        if parameter == "table":
            return len(kernel_tables.table(self.kernel, self.extents["entries"]))
        return kernel_tables.extent(self.kernel, self.extents["entries"])

    @property
    def names(self) -> list[str]:
        return [name for _, name in declarations()[self.kernel].parameters]

    def arguments(self) -> list[np.ndarray | int]:
        """The same arrays at every call, and the extents, in the kernel's order."""
        rng = np.random.default_rng([len(self.kernel), self.shift, *self.extents.values()])
        return [
            self._array(rng, c_type.removeprefix("const ").rstrip("* "), name)
            if "*" in c_type
            else self.extents[name]
            for c_type, name in declarations()[self.kernel].parameters
        ]

    def _array(self, rng: np.random.Generator, element: str, name: str) -> np.ndarray:
        count, dtype = self.count(name), np.dtype(DTYPES[element])
        if name == "table":
            return kernel_tables.table(self.kernel, self.extents["entries"])
        if name in {"numbers", "steps"}:
            return np.array(NUMBERS[self.kernel] if name == "numbers" else (7,), dtype)
        if name == "labels":
            return rng.integers(0, self.extents["classes"], count, np.int32)
        if element in {"i32", "i64"}:  # flags and counters
            return np.full(count, self.skip if name == "skip" else 0, dtype)
        if self.kernel == "softmax_xent" and name == "rows":
            return np.full(count, max(1, self.extents["n"] - 1), dtype)
        if self.kernel in BITS or element == "u8":  # every pattern: NaN, infinite, subnormal
            return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
        values = rng.standard_normal(count).astype(np.float32)
        if name in {"v", "eps", "var", "prev_var", "rstd"}:
            values = np.abs(values) + np.float32(0.1)
        if element == "u16":
            half = values.astype(np.float16).view(np.uint16)
            return half if "_f16" in self.kernel else (values.view(np.uint32) >> 16).astype(dtype)
        return values


def cases(kernel: str) -> list[Case]:
    """Every launch of one kernel."""
    found = next((sets for name, sets in EXTENTS.items() if kernel.startswith(name)), FLAT)
    made = []
    for index, extents in enumerate(found):
        probe = Case(kernel, extents, 0, 0)
        pointers = [n for t, n in declarations()[kernel].parameters if "*" in t]
        most = max(probe.count(name) for name in pointers)
        whole = (
            extents.get("c", extents.get("entries", 1)) if declarations()[kernel].block else most
        )
        for shift, work in ((0, whole), (1, whole), (3 + index, 1)):  # also one block for all
            made.append(Case(kernel, extents, shift, work))
    if "skip" in probe.names:
        made.append(Case(kernel, found[-1], 1, 1, skip=1))
    return made
