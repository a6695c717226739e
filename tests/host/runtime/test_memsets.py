"""On the host device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from memset_cases import (  # noqa: F401  the tests themselves
    test_a_memset_at_the_end_of_a_branch_is_joined,
    test_a_memset_keeps_its_place_between_others,
    test_another_value_stays_a_memset,
    test_two_that_wait_for_one_memset_both_come_behind_it,
    test_zeros_are_stored_by_a_kernel_and_nothing_beside_them,
)

from trlow import memsets

pytestmark = pytest.mark.timeout(60)


def asked(monkeypatch, kinds, version=13000):
    """Which of the nodes with these types would be replaced."""
    found = []
    monkeypatch.setattr(memsets, "nodes_of", lambda *_: list(enumerate(kinds)))
    monkeypatch.setattr(memsets, "_replace", lambda *arguments: found.append(arguments[-1]))
    platform = SimpleNamespace(driver=SimpleNamespace(version=version))
    memsets.replace_memsets(platform, None, 7)
    return found


def test_memsets_alone_are_replaced(monkeypatch):
    assert asked(monkeypatch, [0, 2, 1, 2, 4]) == [1, 3]


@pytest.mark.parametrize("kind", [10, 11])
def test_nothing_changes_in_a_graph_that_allocates_or_frees(monkeypatch, kind):
    """Its nodes cannot be destroyed."""
    assert asked(monkeypatch, [2, kind, 2]) == []


def test_nothing_changes_under_a_driver_that_does_not_tell_edges(monkeypatch):
    assert asked(monkeypatch, [2], 12020) == []
    assert asked(monkeypatch, [2], 12030) == [0]


@pytest.mark.parametrize("port", [0, 1])
def test_an_edge_with_data_is_told_from_a_plain_one(port):
    def ask(_node, nodes, edges, count):
        if nodes is None:
            count._obj.value = 2
            return
        nodes[0], nodes[1], edges[1].from_port = 3, 4, port

    found = memsets._neighbours(ask, 1)
    assert (found is None) if port else list(found) == [3, 4]
