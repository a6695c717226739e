"""A test that needs more GPUs than there are is skipped, and says how many it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"


class Item:
    """What the hook asks of a collected test."""

    def __init__(self, *marks):
        self.marks = [mark.mark for mark in marks]
        self.added = []

    def iter_markers(self, name):
        return (mark for mark in self.marks if mark.name == name)

    def add_marker(self, marker):
        self.added.append(marker.mark.kwargs["reason"])


@pytest.fixture
def reasons(request, monkeypatch):
    """``reasons(there, *marks)``: why a test with these marks is skipped where ``there`` GPUs are.

    The nearest mark stands first, as in a collected test: parameter, function, file.
    """
    plugin = request.config.pluginmanager.get_plugin(str(CONFTEST))
    monkeypatch.delenv("TRLOW_TEST_DEVICE", raising=False)

    def why(there, *marks):
        monkeypatch.setattr(plugin, "gpu_count", lambda: there)
        item = Item(*marks)
        plugin.pytest_collection_modifyitems([item])
        return item.added

    return why


@pytest.mark.parametrize("marks", [(1, 2), (2, 1), (2,)], ids=str)
def test_the_largest_mark_counts(reasons, marks):
    marks = [pytest.mark.gpu(count) for count in marks]
    assert reasons(1, *marks) == ["needs 2 GPUs, there are 1"]
    assert reasons(2, *marks) == []


@pytest.mark.parametrize("mark", [pytest.mark.gpu, pytest.mark.gpu(n=1), pytest.mark.gpu(1)])
def test_one_is_needed_however_it_is_written(reasons, mark):
    assert reasons(0, mark) == ["needs 1 GPUs, there are 0"]
    assert reasons(1, mark) == []


def test_what_has_no_mark_always_runs(reasons):
    assert reasons(0, pytest.mark.slow) == []
