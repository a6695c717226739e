"""The smallest program that touches every floor: one mean all-reduce, captured and replayed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trlow.errors import RankError
from trlow.plan import PlanBuilder
from trlow.program import Program, Stage, Stream
from trlow.range_op import mean_all_reduce
from trlow.region import bucket_table
from trlow.runtime import Runtime
from trlow.settings import Settings

DEADLINE_S = 10.0


def mean_over_ranks(settings: Settings) -> None:
    """Fill rank k with k, replay the mean once, compare exactly. A wrong mean is a RankError."""
    builder = PlanBuilder(bucket_table("selftest", 1))
    builder.add("G_BUCKET_0", "gradient", (257,))
    builder.add("S_SCALAR", "factor", (1,))
    plan = builder.build()
    mean = mean_all_reduce(plan.range("gradient"), factor=plan.range("factor"))
    program = Program.single("selftest", (Stage("MEAN", Stream.UPDATE, (mean,)),))
    with Runtime(replace(settings, deadline_s=DEADLINE_S), plan) as runtime:
        ranks = runtime.world_size
        replay = runtime.capture(program)  # its warm-up writes into regions that do not persist
        for rank, arena in enumerate(runtime.arenas):
            arena.copy_in("gradient", np.full(257, rank, np.float32))
            arena.copy_in("factor", np.full(1, 1 / ranks, np.float32))
        replay.run(1)
        for rank, arena in enumerate(runtime.arenas):
            got = arena.copy_out("gradient")
            if not (got == np.float32((ranks - 1) / 2)).all():
                raise RankError(
                    f"the mean over {ranks} ranks should be {(ranks - 1) / 2} and is {got[0]}; "
                    "rebuild with `make native`",
                    rank=rank,
                    step=0,
                    stage="MEAN",
                )
