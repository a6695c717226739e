"""On the host device."""

from __future__ import annotations

import pytest
from memset_cases import (  # noqa: F401  the tests themselves
    test_a_memset_at_the_end_of_a_branch_is_joined,
    test_a_memset_keeps_its_place_between_others,
    test_another_value_stays_a_memset,
    test_two_that_wait_for_one_memset_both_come_behind_it,
    test_zeros_are_stored_by_a_kernel_and_nothing_beside_them,
)

pytestmark = pytest.mark.timeout(60)
