"""What the tests of means share: ranks with a range and a factor of each dtype, and exact data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import trlow
from trlow.dtype import BF16, F16, F32, I32
from trlow.range_op import mean_all_reduce
from trlow.testing_bytes import round_bf16, widen_bf16

COUNT = 4099
DTYPES = {"f32": F32, "f16": F16, "bf16": BF16, "i32": I32}
FLOATS = ("f32", "f16", "bf16")
MODES = ("eager", "fused", "staged")


def make_plan(count=COUNT):
    """A range and a factor of each dtype; `f32.factor` is also what scale kernels read."""
    regions = [trlow.Region(f"F_{n.upper()}", d, "data") for n, d in DTYPES.items()]
    regions += [trlow.Region(f"S_{n.upper()}", d, "factor") for n, d in DTYPES.items()]
    builder = trlow.PlanBuilder(trlow.RegionTable("means", tuple(regions), ()))
    for name in DTYPES:
        builder.add(f"F_{name.upper()}", name, (count,))
        builder.add(f"S_{name.upper()}", f"{name}.factor", (1,))
    return builder.build()


def encode(name, values):
    if name == "bf16":
        return round_bf16(np.ascontiguousarray(values, np.float32).view(np.uint32))
    return np.asarray(values).astype(DTYPES[name].numpy)


def decode(name, values):
    return widen_bf16(values) if name == "bf16" else values


@dataclass
class Ranks:
    """A runtime with a range and a factor of each dtype."""

    runtime: trlow.Runtime

    def put(self, name, per_rank):
        for arena, values in zip(self.runtime.arenas, per_rank, strict=True):
            arena.copy_in(name, encode(name, values))

    def factor(self, value):
        for arena in self.runtime.arenas:
            for name in FLOATS:
                arena.copy_in(f"{name}.factor", encode(name, [value]))

    def get(self, name):
        return [decode(name, arena.copy_out(name)) for arena in self.runtime.arenas]

    def program(self, names, strategy):
        plan = self.runtime.plan

        def op(name):
            scalar = name if strategy == "premulsum" else "f32"
            factor = plan.range(f"{scalar}.factor")
            return mean_all_reduce(plan.range(name), factor=factor, strategy=strategy)

        stage = trlow.Stage("MEAN", trlow.Stream.UPDATE, tuple(map(op, names)))
        return trlow.Program.single(f"{strategy} {names}", (stage,))

    def prepared(self, names, strategy, mode):
        """A function that runs the mean once; the warm-up's bytes are gone by then."""
        program = self.program(names, strategy)
        if mode == "eager":
            self.runtime.eager(program)
            return lambda: self.runtime.eager(program)
        replay = self.runtime.capture(program, mode)
        return lambda: replay.run(1)


def few_bits(n, count=COUNT):
    """Integers from -7 to 7: their sums are exact in every dtype here, and so are sums / 2**k."""
    return np.random.default_rng(0).integers(-7, 8, (n, count)).astype(np.float32)
