"""Invariants 25 to 27, 31, 32 and 32b: what capture and replay keep on a device, as checks.

Each opens a runtime of its own from `settings` and raises AssertionError if its invariant does not
hold. A program is given as it is, or as a function of the runtime for external stages that need its
addresses; what those do is given to numpy in `externals`, by stage name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from mmap import PAGESIZE
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from trlow.dtype import F32
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.program import Program, Stage, Stream
from trlow.range_op import Collective, mean_all_reduce, scale
from trlow.region import bucket_table
from trlow.runtime import Runtime
from trlow.settings import Settings
from trlow.testing_bytes import Bytes, initial_bytes, store, whole
from trlow.testing_emulation import External, emulate
from trlow.testing_plan import require
from trlow.testing_slots import MODES, Start, prepared, run

__all__ = [
    "check_capture_keeps_persistent",
    "check_capture_runs_nothing",
    "check_communication_captured_once",
    "check_memory_stays_flat",
    "check_modes_agree",
    "check_one_rank_loads_no_nccl",
]

Source = Program | Callable[[Runtime], Program]


def check_capture_runs_nothing(
    settings: Settings, plan: MemoryPlan, program: Source, *, mode: str = "fused", seed: int = 0
) -> None:
    """25: capture leaves all bytes but those that warming up may write; replay runs the stages.

    Warming up may write the transient ranges of collectives and of external stages.
    """
    with Runtime(settings, plan) as runtime:
        chosen = _program(program, runtime)
        before = [initial_bytes(plan, rank, seed) for rank in range(runtime.world_size)]
        place, kept = whole(plan), _untouched_by_warm_up(plan, chosen)
        for arena, state in zip(runtime.arenas, before, strict=True):
            arena.copy_in(place, state)
        replay = runtime.capture(chosen, mode)
        for rank, arena in enumerate(runtime.arenas):
            now = arena.copy_out(place)
            _require_equal(plan, before[rank], now, kept, f"rank {rank}: capture changed")
            arena.copy_in(place, before[rank])
        replay.run(1)
        still = [
            np.array_equal(arena.copy_out(place), state)
            for arena, state in zip(runtime.arenas, before, strict=True)
        ]
    wanted = [state.copy() for state in before]
    if not any(stage.external for phase in chosen.phases for stage in phase):
        emulate(chosen, wanted)
        moves = [not np.array_equal(a, b) for a, b in zip(before, wanted, strict=True)]
        for rank, (moved, same) in enumerate(zip(moves, still, strict=True)):
            require(not moved or not same, f"rank {rank}: replay ran nothing")


def check_modes_agree(
    settings: Settings,
    plan: MemoryPlan,
    program: Source,
    *,
    steps: int = 2,
    start: Start | None = None,
    externals: Mapping[str, External] | None = None,
    numpy_too: bool = True,
) -> bool:
    """26: steps of graphs, fused and staged, and eager ones leave equal bytes, and so does numpy.

    Where a sum over ranks has to be rounded, its order is the device's own, and numpy is left out;
    tells whether numpy was compared. `numpy_too` leaves it out at once.
    """
    with Runtime(settings, plan) as runtime:
        chosen = _program(program, runtime)
        before = [(start or initial_bytes)(plan, rank) for rank in range(runtime.world_size)]
        found = {mode: run(runtime, chosen, before, mode, steps) for mode in MODES}
    everything = np.ones(plan.arena_nbytes, bool)
    for mode in MODES[1:]:
        for rank, (one, other) in enumerate(zip(found["eager"], found[mode], strict=True)):
            _require_equal(plan, one, other, everything, f"rank {rank}: eager and {mode} differ")
    wanted = [state.copy() for state in before]
    exact = numpy_too and emulate(chosen, wanted, steps, externals=externals)
    if exact:
        for rank, (one, other) in enumerate(zip(wanted, found["eager"], strict=True)):
            _require_equal(plan, one, other, everything, f"rank {rank}: numpy and device differ")
    return exact


def check_capture_keeps_persistent(
    settings: Settings, plan: MemoryPlan, program: Source, *, mode: str = "fused", seed: int = 0
) -> None:
    """27: warming up and capturing leave every byte of every persistent region, on all ranks."""
    kept = np.zeros(plan.arena_nbytes, bool)
    for r in plan.persistent_ranges():
        kept[r.offset : r.end] = True
    with Runtime(settings, plan) as runtime:
        chosen = _program(program, runtime)
        for arena in runtime.arenas:
            arena.copy_in(whole(plan), initial_bytes(plan, arena.rank, seed))
        prepared(runtime, chosen, mode)
        for rank, arena in enumerate(runtime.arenas):
            now = arena.copy_out(whole(plan))
            before = initial_bytes(plan, rank, seed)
            _require_equal(plan, before, now, kept, f"rank {rank}: {mode} changed")


def check_memory_stays_flat(
    settings: Settings,
    plan: MemoryPlan,
    program: Source,
    *,
    steps: int = 10_000,
    mode: str = "fused",
    slack_nbytes: int = 64 << 10,
) -> None:
    """31: replays take no memory, neither of the host nor of a device.

    `steps` are replayed in three parts behind a first that warms up. A leak grows in every part;
    the allocator may have room for one, or take pages in one, so the median is held to the slack.
    """
    with Runtime(settings, plan) as runtime:
        replay = runtime.capture(_program(program, runtime), mode)
        replay.run(max(steps // 10, 1))
        free = [runtime.platform.memory(device)[0] for device in runtime.devices]
        sizes = [_resident_nbytes()]
        for part in range(3):
            replay.run(-(-steps // 3), first_step=part)
            sizes.append(_resident_nbytes())
        after = [runtime.platform.memory(device)[0] for device in runtime.devices]
    require(free == after, f"devices had {free} bytes free, and now have {after}")
    growth = median(b - a for a, b in pairwise(sizes))
    require(
        growth <= slack_nbytes, f"{steps // 3} replays take {growth} bytes of the host: {sizes}"
    )


def check_one_rank_loads_no_nccl(
    settings: Settings,
    plan: MemoryPlan,
    program: Source,
    *,
    steps: int = 2,
    start: Start | None = None,
) -> None:
    """32: a runtime of one rank loads no NCCL, in any mode, and its collectives change nothing."""
    loaded = _mapped("nccl")
    alone = replace(settings, gpus="0")
    with Runtime(alone, plan) as runtime:
        require(runtime.world_size == 1, f"gpus='0' gives {runtime.world_size} ranks")
        chosen = _program(program, runtime)
        before = [(start or initial_bytes)(plan, 0)]
        for mode in MODES:
            after = run(runtime, chosen, before, mode, steps)
            wanted = [before[0].copy()]
            if emulate(chosen, wanted, steps):
                everything = np.ones(plan.arena_nbytes, bool)
                _require_equal(plan, wanted[0], after[0], everything, f"{mode} and numpy differ")
        found = sorted(runtime.platform.libraries)
    require("nccl" not in found, f"one rank uses {found}")
    require(_mapped("nccl") <= loaded, f"one rank loaded {_mapped('nccl') - loaded}")


def check_communication_captured_once(settings: Settings) -> None:
    """32b: two batch sizes and two resolutions in a staged run share each communication stage.

    Their compute stages, over ranges of different sizes, are captured once each; all replays give
    the mean over ranks.
    """
    plan, programs = _variants()
    communication = [bucket.stage for bucket in plan.buckets()]
    with Runtime(settings, plan) as runtime:
        replays = {
            variant: runtime.capture(program, "staged", variant=variant)
            for variant, program in programs.items()
        }
        for stage, wanted in {**dict.fromkeys(communication, 1), "COMPUTE": len(programs)}.items():
            times = runtime.captured[stage]
            require(times == wanted, f"{stage} was captured {times} times, not {wanted}")
        ranks = runtime.world_size
        before = [initial_bytes(plan, rank) for rank in range(ranks)]
        for rank, state in enumerate(before):
            store(state, plan.range("factor"), np.array([1 / ranks], np.float32))
            for bucket in plan.buckets():
                store(state, bucket.range, np.full(bucket.range.count, rank, np.float32))
        for variant, replay in replays.items():
            for arena, state in zip(runtime.arenas, before, strict=True):
                arena.copy_in(whole(plan), state)
            replay.run(1)
            for rank, arena in enumerate(runtime.arenas):
                for bucket in plan.buckets():
                    mean = arena.copy_out(bucket.range)
                    near = np.abs(mean - (ranks - 1) / 2) <= np.spacing(np.float32(ranks))
                    require(near.all(), f"{variant}, rank {rank}: {bucket.stage} is {mean[:1]}")


def _variants() -> tuple[MemoryPlan, dict[str, Program]]:
    """A plan with two batch sizes and two resolutions, and a program of each."""
    shapes = {f"{n}x{h}x{w}": (n, h, w, 1) for n in (2, 4) for h, w in ((6, 6), (9, 7))}
    builder = PlanBuilder(bucket_table("variants", nbuckets=2))
    builder.add("G_BUCKET_0", "grad.0", (33,))
    builder.add("G_BUCKET_1", "grad.1", (7,))
    builder.add("T_COMP_1", "feature", (4, 9, 7, 1), variants=shapes)
    builder.add("S_SCALAR", "factor", (1,))
    plan = builder.build()
    factor = plan.range("factor")
    reduce = [
        Stage(bucket.stage, Stream.UPDATE, (mean_all_reduce(bucket.range, factor=factor),))
        for bucket in plan.buckets()
    ]
    programs = {}
    for variant in plan.variants:
        tensor = plan.tensor("feature", variant)
        feature = Range(tensor.offset, tensor.nbytes, F32, "feature", variant)
        compute = Stage("COMPUTE", Stream.COMP_1, (scale(feature, factor),))
        programs[variant] = Program.single(variant, (compute, *reduce))
    return plan, programs


def _program(source: Source, runtime: Runtime) -> Program:
    return source if isinstance(source, Program) else source(runtime)


def _untouched_by_warm_up(plan: MemoryPlan, program: Program) -> NDArray[np.bool_]:
    kept = np.ones(plan.arena_nbytes, bool)
    for phase in program.phases:
        for stage in phase:
            written = [a.range for a in stage.actions if isinstance(a, Collective)]
            written += [] if stage.external is None else stage.external.writes
            for r in written:
                kept[r.offset : r.end] = False
    for r in plan.persistent_ranges():
        kept[r.offset : r.end] = True
    return kept


def _require_equal(
    plan: MemoryPlan, one: Bytes, other: Bytes, where: NDArray[np.bool_], message: str
) -> None:
    changed = np.flatnonzero((one != other) & where)
    if changed.size:
        names = [t.name for t in plan.tensors if t.offset <= changed[0]]
        raise AssertionError(
            f"{message}: {changed.size} bytes, the first at {changed[0]}, in or behind "
            f"{names[-1] if names else 'nothing'}"
        )


def _resident_nbytes() -> int:
    """Memory of this process that is in RAM (proc_pid_statm(5): the second number, in pages)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGESIZE


def _mapped(word: str) -> set[str]:
    """Files of that word in their name which are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    files = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return {name for name in files if word in Path(name).name}
