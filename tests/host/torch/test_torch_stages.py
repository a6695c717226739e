"""What the program of a step orders, and what it leaves to run side by side."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="no torch here: trlow.torch is not tested at all")

from trlow.dtype import BF16, F32  # noqa: E402
from trlow.errors import PlanError  # noqa: E402
from trlow.program import Stream  # noqa: E402
from trlow.torch.buckets import Bucket, Parameter, make_plan  # noqa: E402
from trlow.torch.course import Course  # noqa: E402
from trlow.torch.stages import step_program  # noqa: E402


class Side:
    """One whose graph is never made."""

    overlaps = True


def program(buckets, *, early=False, last=True, copies=False, adds=True, direct=(), wire=None):
    names = [f"p{k}" for k in range(buckets)]
    parameters = [Parameter(name, 1000, F32) for name in names]
    cut = [Bucket((name,), F32) for name in names]
    plan = make_plan(parameters, cut, {"mean": 8}, wire, copies=copies, direct=direct)
    course = Course(copies, early or adds, adds, early, frozenset(direct))
    return step_program(plan, [Side()] * 2, course, "mean", last=last)


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


def to_the_next(found):
    """Pairs of stages of which the second, a step later, has to wait for the first."""
    (stages,) = found.phases
    return {
        (stages[edge.src[1]].name, stages[edge.dst[1]].name)
        for edge in found.hazards()
        if edge.distance == 1
    }


def touched(stage):
    """Kinds of the ranges that a stage reads and writes, by the first letter of their names."""
    known = [(op.reads, op.writes) for op in stage.ops]
    if stage.external is not None:
        known.append((stage.external.reads, stage.external.writes))
    return tuple({one.first[0] for each in known for one in each[k] if one.nbytes} for k in (0, 1))


def test_early_updates_come_behind_their_bucket_and_bucket_0_and_beside_everything_else():
    found = before(program(4, early=True))
    for k in range(4):
        mine = found[f"OPTIMIZER_{k}"]
        assert {f"GATHER_{k}", f"COMM_{k}"} <= mine
        assert k == 0 or "OPTIMIZER_0" in mine  # it counts the step
        assert ("COMPUTE" in mine) is (k == 3)  # which the loss comes with
    assert not {f"OPTIMIZER_{k}" for k in range(4)} & found["COMM_3"]


def test_copies_are_admitted_beside_the_forward_and_behind_the_update_of_the_step_before():
    found = program(3, copies=True)
    ordered = before(found)
    assert "ADMIT" not in ordered["COMPUTE"] | ordered["GATHER_0"]
    assert all("ADMIT" in ordered[f"SEND_{k}"] for k in range(3))
    assert {"SEND_0", "SEND_1", "SEND_2"} <= ordered["COMM_2"]
    (stages,) = found.phases
    names = [stage.name for stage in stages]
    assert names[0] == "ADMIT"
    assert {("OPTIMIZER", "ADMIT"), ("OPTIMIZER", "COMPUTE")} <= to_the_next(found)


@pytest.mark.parametrize("adds", [True, False])
def test_a_sent_bucket_is_added_by_the_optimizer_or_once_it_is_received(adds):
    (phase,) = program(2, copies=True, adds=adds).phases
    kinds = {stage.name: [op.kind for op in stage.ops] for stage in phase}
    assert kinds["SEND_0"] == kinds["SEND_1"] == ["send"]
    sums = [] if adds else ["add", "add"]
    assert kinds["COMM_1"] == ["receive", "sum_all_reduce", "mean_all_reduce", *sums]
    assert "COMM_0" not in kinds  # ranks meet once behind all copies
    (reader,) = (stage for stage in phase if stage.name == "OPTIMIZER")
    assert sum(r.first.startswith("P_") for r in reader.external.reads) == 2


def test_what_is_sent_directly_is_not_gathered():
    found = program(2, copies=True, direct={"p0"})
    (names,) = [{stage.name: stage for stage in phase} for phase in found.phases]
    assert "GATHER_0" not in names
    assert "GATHER_1" in names
    assert not names["SEND_0"].actions
    assert names["SEND_0"].external.writes[0].first.startswith("D_")
    assert names["SEND_1"].external is None
    ordered = before(found)
    assert "ADMIT" in ordered["SEND_0"]
    assert {"SEND_0", "SEND_1"} <= ordered["COMM_1"]


@pytest.mark.parametrize("last", ["p1", "p0"])
def test_what_arrives_directly_is_admitted_received_and_read_as_well(last):
    (stages,) = program(2, copies=True, direct={last}).phases
    known = {stage.name: touched(stage) for stage in stages}
    arriving = {"P", "D"}
    assert arriving <= known["ADMIT"][1]
    assert arriving <= known["COMM_1"][1]
    assert known["OPTIMIZER"][0] == {"G", *arriving}


def test_the_optimizer_says_what_it_changes():
    for early, copies in ((False, False), (True, False), (False, True)):
        (stages,) = program(2, early=early, copies=copies, adds=False, wire=BF16).phases
        changed = {s.name: touched(s)[1] for s in stages if s.name.startswith("OPTIMIZER")}
        assert set(changed) == ({"OPTIMIZER_0", "OPTIMIZER_1"} if early else {"OPTIMIZER"})
        assert all(kinds == {"W", "G", "H"} for kinds in changed.values())


def test_weights_do_not_change_early_where_ranks_copy():
    with pytest.raises(PlanError, match="copy"):
        program(2, early=True, copies=True)


def test_a_micro_step_copies_nothing():
    (stages,) = program(2, last=False, copies=True).phases
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
