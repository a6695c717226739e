"""Strategies and named invariants, for trlow's own tests and for yours.

A strategy draws inputs (`plans()`, `programs()`, ...; see trlow.testing_strategies); a check takes
what was drawn and raises AssertionError if its invariant does not hold. `INVARIANTS` has the checks
by number:

    @given(plans())
    def test_my_plans(plan):
        INVARIANTS[2](plan)

Checks 1 to 12 take a plan; 13 to 15 a program; 16 a plan and what is frozen in it. Those of
`DEVICE_INVARIANTS` take `Settings` first and run on the device that these name, the host or GPUs:

    DEVICE_INVARIANTS[19](Settings(device="host"), offset=3, count=257, mode="staged")

Invariants 28 to 30 and 33 to 40, of failures and of training, are tests of their own. Importing
this module imports hypothesis; `import trlow` does not import this module.
"""

from __future__ import annotations

from collections.abc import Callable

from trlow.testing_arithmetic import check_casts, check_optimizers, check_zero_rate
from trlow.testing_bytes import initial_bytes
from trlow.testing_device import (
    check_bytes_outside_stay,
    check_not_finite_is_seen,
    check_pads_stay_finite,
    check_ranks_end_equal,
    check_sums_of_ranks,
)
from trlow.testing_emulation import emulate
from trlow.testing_plan import (
    check_adding_moves_only_what_lies_behind,
    check_alignment,
    check_beyond_32_bits,
    check_buckets_cover_gradients,
    check_empty_region_changes_nothing,
    check_fingerprint,
    check_freezing_moves_nothing,
    check_ranges_are_unions,
    check_refusals_name_both,
    check_regions_in_order,
    check_same_offsets,
    check_variants_share_offsets,
)
from trlow.testing_program import (
    check_communication_stages,
    check_concurrent_stages_share_nothing,
    check_edges_equal_hazards,
    check_overlap,
    conflicting,
)
from trlow.testing_random import device_programs, small_plan
from trlow.testing_replay import (
    check_capture_keeps_persistent,
    check_capture_runs_nothing,
    check_communication_captured_once,
    check_memory_stays_flat,
    check_modes_agree,
    check_one_rank_loads_no_nccl,
)
from trlow.testing_slots import MODES, every_op
from trlow.testing_strategies import (
    byte_ranges,
    dtypes,
    few_bit_floats,
    frozen_sets,
    plan_ranges,
    plans,
    programs,
    regions,
    shapes,
    tables,
    training_steps,
    variants,
    world_sizes,
)

__all__ = [
    "DEVICE_INVARIANTS",
    "INVARIANTS",
    "MODES",
    "byte_ranges",
    "check_adding_moves_only_what_lies_behind",
    "check_alignment",
    "check_beyond_32_bits",
    "check_buckets_cover_gradients",
    "check_bytes_outside_stay",
    "check_capture_keeps_persistent",
    "check_capture_runs_nothing",
    "check_casts",
    "check_communication_captured_once",
    "check_communication_stages",
    "check_concurrent_stages_share_nothing",
    "check_edges_equal_hazards",
    "check_empty_region_changes_nothing",
    "check_fingerprint",
    "check_freezing_moves_nothing",
    "check_memory_stays_flat",
    "check_modes_agree",
    "check_not_finite_is_seen",
    "check_one_rank_loads_no_nccl",
    "check_optimizers",
    "check_overlap",
    "check_pads_stay_finite",
    "check_ranges_are_unions",
    "check_ranks_end_equal",
    "check_refusals_name_both",
    "check_regions_in_order",
    "check_same_offsets",
    "check_sums_of_ranks",
    "check_variants_share_offsets",
    "check_zero_rate",
    "conflicting",
    "device_programs",
    "dtypes",
    "emulate",
    "every_op",
    "few_bit_floats",
    "frozen_sets",
    "initial_bytes",
    "plan_ranges",
    "plans",
    "programs",
    "regions",
    "shapes",
    "small_plan",
    "tables",
    "training_steps",
    "variants",
    "world_sizes",
]

INVARIANTS: dict[int, Callable[..., None]] = {
    1: check_same_offsets,
    2: check_alignment,
    3: check_regions_in_order,
    4: check_ranges_are_unions,
    5: check_empty_region_changes_nothing,
    6: check_variants_share_offsets,
    7: check_freezing_moves_nothing,
    8: check_adding_moves_only_what_lies_behind,
    9: check_fingerprint,
    10: check_buckets_cover_gradients,
    11: check_refusals_name_both,
    12: check_beyond_32_bits,
    13: check_edges_equal_hazards,
    14: check_concurrent_stages_share_nothing,
    15: check_overlap,
    16: check_communication_stages,
}

DEVICE_INVARIANTS: dict[int | str, Callable[..., object]] = {
    17: check_bytes_outside_stay,
    18: check_pads_stay_finite,
    19: check_sums_of_ranks,
    20: check_ranks_end_equal,
    21: check_casts,
    22: check_not_finite_is_seen,
    23: check_optimizers,
    24: check_zero_rate,
    25: check_capture_runs_nothing,
    26: check_modes_agree,
    27: check_capture_keeps_persistent,
    31: check_memory_stays_flat,
    32: check_one_rank_loads_no_nccl,
    "32b": check_communication_captured_once,
}
