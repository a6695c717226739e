"""Which way of making a mean over ranks is fastest at which size, on plain arenas and on windows?

    python bench/means.py [--gpus all] [--rounds 60] [--calls 20] [--most BYTES] [--json FILE]
    python bench/means.py --device host --gpus 0-1 --rounds 3 --most 262144    (a dry run)

How it is measured: ways.py. "deferred" leaves the multiplication to an update that does it anyway,
so its row is a sum alone.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial

import numpy as np
import report
import ways

from trlow.dtype import F32
from trlow.errors import TrlowError
from trlow.plan import MemoryPlan, PlanBuilder
from trlow.program import Stage, Stream
from trlow.range_op import MEAN_STRATEGIES, mean_all_reduce
from trlow.region import Region, RegionTable
from trlow.runtime import Runtime

SIZES = (4 * ways.KI, 256 * ways.KI, 4 * ways.MI, 25 * ways.MI, 100 * ways.MI)
ARENAS = ("plain", "window")


def plan_of(nbytes: int) -> MemoryPlan:
    """A buffer and a factor."""
    table = RegionTable(
        "means", (Region("BUFFER", F32, "what is averaged"), Region("FACTOR", F32, "1/N"))
    )
    builder = PlanBuilder(table)
    builder.add("BUFFER", "buffer", (nbytes // F32.itemsize,))
    builder.add("FACTOR", "factor", (1,))
    return builder.build()


def means(calls: int, runtime: Runtime, nbytes: int) -> dict[str, list[Stage]]:
    """A stage of as many means for each strategy."""
    factor, span = runtime.plan.range("factor"), ways.span_of(runtime, "buffer", nbytes)
    found = {}
    for strategy in MEAN_STRATEGIES:
        op = mean_all_reduce(span, factor=factor, strategy=strategy)
        found[strategy] = [Stage("MEANS", Stream.UPDATE, (op,) * calls)]
    return found


def opened(arguments: argparse.Namespace, stack: ExitStack, largest: int) -> list[ways.Side]:
    """The arenas that were asked for; a window that cannot be is said aloud and left out."""
    sides = []
    for arena in arguments.arenas.split(","):
        more = {"arena": arena, "allow_unabortable": True, "any_world_size": True}
        settings = report.settings_of(arguments, **more, **ways.quiet(arguments))
        try:
            runtime = stack.enter_context(Runtime(settings, plan_of(largest)))
        except TrlowError as error:
            if arena == "plain":
                raise
            print(f"no {arena} arena: {error}", file=sys.stderr)
            continue
        for each in runtime.arenas:
            each.copy_in("factor", np.array([1 / runtime.world_size], np.float32))
        sides.append(ways.Side(arena, runtime, arguments.calls))
    return sides


def main() -> None:
    made = ways.parser(__doc__, SIZES)
    made.add_argument("--arenas", default=",".join(ARENAS), help="plain, window or both (default)")
    arguments = made.parse_args()
    sizes = [nbytes for nbytes in SIZES if nbytes <= arguments.most]
    with ExitStack() as stack:
        sides = opened(arguments, stack, max(sizes))
        if sides[0].runtime.world_size == 1:
            made.error("one rank has nothing to average: name more devices")
        ways.run(arguments, sides, partial(means, arguments.calls), sizes, MEAN_STRATEGIES)


if __name__ == "__main__":
    main()
