"""Marks: a counter that the host can poll, and the clock in a ring of rows."""

from __future__ import annotations

import time

import numpy as np


def test_beat_counts_and_publishes(run):
    counter, slot = np.array([4], np.int64), np.array([-1], np.int64)
    run("beat", counter, slot, 3)
    assert (counter[0], slot[0]) == (7, 7)


def test_stamp_writes_the_clock_into_its_entry_of_the_row_in_turn(run):
    slots, row = np.zeros((3, 5), np.int64), np.array([7], np.int64)
    before = time.monotonic_ns()
    run("stamp", slots, row, 2, 5, 3)
    after = time.monotonic_ns()
    assert before <= slots[1, 2] <= after
    slots[1, 2] = 0
    assert not slots.any()
    run("next_row", row, 1)
    assert row[0] == 8
