"""What the program of a step orders, and what it leaves to run side by side."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

from trlow.dtype import F32  # noqa: E402
from trlow.program import Stream  # noqa: E402
from trlow.torch.buckets import Bucket, Parameter, make_plan  # noqa: E402
from trlow.torch.stages import step_program  # noqa: E402


class Side:
    """One whose graph is never made."""

    overlaps = True

    def __init__(self, early, adds):
        self.early, self.adds = early, adds


def program(buckets, *, early, last=True, copies=False, adds=True):
    names = [f"p{k}" for k in range(buckets)]
    parameters = [Parameter(name, 1000, F32) for name in names]
    cut = [Bucket((name,), F32) for name in names]
    plan = make_plan(parameters, cut, {"mean": 8}, None, copies=copies)
    return step_program(plan, [Side(early, adds)] * 2, "mean", last=last)


def before(found):
    """Stages by name, each with all that come before it by edges and streams."""
    (stages,) = found.phases
    direct = {stage.name: set() for stage in stages}
    for edge in found.edges():
        if edge.distance == 0:
            direct[stages[edge.dst[1]].name].add(stages[edge.src[1]].name)
    for index, stage in enumerate(stages):
        direct[stage.name] |= {s.name for s in stages[:index] if s.stream is stage.stream}
    for _ in stages:
        for name, known in direct.items():
            direct[name] = known.union(*(direct[other] for other in known))
    return direct


def test_early_updates_come_behind_their_bucket_and_bucket_0_and_beside_everything_else():
    found = before(program(4, early=True))
    for k in range(4):
        mine = found[f"OPTIMIZER_{k}"]
        assert {f"GATHER_{k}", f"COMM_{k}"} <= mine
        assert k == 0 or "OPTIMIZER_0" in mine  # it counts the step
        assert ("COMPUTE" in mine) is (k == 3)  # which the loss comes with
    assert not {f"OPTIMIZER_{k}" for k in range(4)} & found["COMM_3"]


def test_copies_are_admitted_beside_the_forward_and_behind_every_update_of_the_step_before():
    found = program(3, early=True, copies=True)
    ordered = before(found)
    assert "ADMIT" not in ordered["COMPUTE"] | ordered["GATHER_0"]
    assert all("ADMIT" in ordered[f"COMM_{k}"] for k in range(3))
    (stages,) = found.phases
    names = [stage.name for stage in stages]
    assert names[0] == "ADMIT"
    hazards = {
        (names[edge.src[1]], names[edge.dst[1]]) for edge in found.hazards() if edge.distance == 1
    }
    assert {(f"OPTIMIZER_{k}", "ADMIT") for k in range(3)} <= hazards


@pytest.mark.parametrize("early", [True, False])
def test_a_copied_bucket_is_added_by_the_optimizer_or_behind_its_exchange(early):
    for adds in (True, False):
        (stages,) = program(2, early=early, copies=True, adds=adds).phases
        kinds = {s.name: [op.kind for op in s.ops] for s in stages}
        sums = [] if adds else ["add"]
        assert kinds["COMM_0"] == ["send"]
        tail = ["sum_all_reduce", "mean_all_reduce"]
        assert kinds["COMM_1"] == ["send", "receive", *tail, *sums, *sums]
        readers = [s for s in stages if s.name.startswith("OPTIMIZER")]
        assert sum(r.first.startswith("P_") for s in readers for r in s.external.reads) == 2


def test_a_micro_step_copies_nothing():
    (stages,) = program(2, early=True, last=False, copies=True).phases
    assert [s.name for s in stages] == ["COMPUTE", "GATHER_0", "GATHER_1", "LOSS"]


def test_updates_at_the_end_come_behind_everything():
    found = before(program(4, early=False))
    assert {"COMPUTE", "COMM_3", "GATHER_0"} <= found["OPTIMIZER"]


@pytest.mark.parametrize("early", [True, False])
def test_a_micro_step_updates_nothing(early):
    (stages,) = program(2, early=early, last=False).phases
    assert [s.name for s in stages] == ["COMPUTE", "GATHER_0", "GATHER_1", "LOSS"]


def test_a_single_bucket_stays_on_the_stream_of_its_all_reduce():
    (stages,) = program(1, early=True).phases
    streams = {stage.name: stage.stream for stage in stages}
    assert streams["OPTIMIZER_0"] is streams["COMM_0"] is Stream.UPDATE
