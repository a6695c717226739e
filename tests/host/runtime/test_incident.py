"""What is said of threads when ranks stop."""

from __future__ import annotations

import threading

import pytest

from trlow.incident import stacks

pytestmark = pytest.mark.timeout(60)


def test_the_stack_of_every_thread_is_found_by_its_ident():
    go, there = threading.Event(), threading.Event()

    def waiting_inside():
        there.set()
        go.wait(20)

    thread = threading.Thread(target=waiting_inside)
    thread.start()
    there.wait(20)
    try:
        found = stacks()
    finally:
        go.set()
        thread.join()
    others, mine = found[thread.ident], found[threading.get_ident()]
    assert any("waiting_inside" in line for line in others)
    assert "in stacks" in mine[0]
    assert "in test_the_stack_of_every_thread" in mine[1]


def test_stacks_of_threads_that_come_and_go_are_whole():
    """Walked frame by frame they were not: an int for the next frame, or a segmentation fault."""
    end = threading.Event()

    def deep(depth):
        return deep(depth - 1) + 1 if depth else 0

    def busy():
        while not end.is_set():
            deep(30)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            found = stacks()
            for thread in threads:
                assert found[thread.ident]
                assert all(line.startswith("  File ") for line in found[thread.ident])
    finally:
        end.set()
        for thread in threads:
            thread.join()
