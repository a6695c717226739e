"""Strategies and named invariants, for trlow's own tests and for yours.

A strategy draws inputs (`plans()`, `programs()`, ...; see trlow.testing_strategies); a check takes
what was drawn and raises AssertionError if its invariant does not hold. `INVARIANTS` has the checks
by number:

    @given(plans())
    def test_my_plans(plan):
        INVARIANTS[2](plan)

Checks 1 to 12 take a plan; 13 to 15 a program; 16 a plan and what is frozen in it. Invariants 17
to 40 need a device and do not stand here. Importing this module imports hypothesis; `import trlow`
does not import this module.
"""

from __future__ import annotations

from collections.abc import Callable

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
    "INVARIANTS",
    "byte_ranges",
    "check_adding_moves_only_what_lies_behind",
    "check_alignment",
    "check_beyond_32_bits",
    "check_buckets_cover_gradients",
    "check_communication_stages",
    "check_concurrent_stages_share_nothing",
    "check_edges_equal_hazards",
    "check_empty_region_changes_nothing",
    "check_fingerprint",
    "check_freezing_moves_nothing",
    "check_overlap",
    "check_ranges_are_unions",
    "check_refusals_name_both",
    "check_regions_in_order",
    "check_same_offsets",
    "check_variants_share_offsets",
    "conflicting",
    "dtypes",
    "few_bit_floats",
    "frozen_sets",
    "plan_ranges",
    "plans",
    "programs",
    "regions",
    "shapes",
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
