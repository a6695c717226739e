"""On the host device, whose kernels take the memory of torch's CPU tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

from torch_rows_cases import (  # noqa: F401  the tests themselves
    bench,
    test_a_step_with_inboxes_is_one_with_the_sum,
    test_an_optimizer_in_rows_is_torchs,
    test_gathered_pieces_are_the_same_bytes_and_nothing_beside,
    test_groups_have_numbers_of_their_own_in_every_bucket,
    test_hooks_and_unequal_steps_are_left_to_torch,
    test_parameters_of_another_dtype_or_layout_are_left_to_torch,
    test_what_is_not_covered_is_left_to_torch,
    test_what_lies_differently_is_not_alike,
)

pytestmark = pytest.mark.timeout(60)
