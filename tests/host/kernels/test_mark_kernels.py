"""Marks: a counter that the host can poll, the clock in a ring of rows, slots taken in turn."""

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


def test_a_turn_takes_one_slot_after_another(run):
    now, turn = np.zeros(2, np.int64), np.array([2], np.int64)
    slots = np.arange(10, 16, dtype=np.int64).reshape(3, 2)
    for row in (2, 0, 1, 2):
        run("take_turn", now, slots, turn, 3, 2)
        assert now.tolist() == slots[row].tolist()
    assert turn[0] == 6
