"""Programs by example: what waits for what, what overlaps, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trlow.dtype import F32, U8
from trlow.errors import PlanError
from trlow.plan import PlanBuilder, Range
from trlow.program import Edge, External, Program, Stage, Stream
from trlow.range_op import (
    Collective,
    FeedCopy,
    Launch,
    RangeOp,
    broadcast,
    clear,
    copy,
    feed_copy,
    mean_all_reduce,
    sum_all_reduce,
)
from trlow.region import CNN_TABLE
from trlow.testing import check_edges_equal_hazards, check_overlap

COMP_1, COMP_2, TRANS, UPDATE = Stream.COMP_1, Stream.COMP_2, Stream.TRANS, Stream.UPDATE


def at(start: int, end: int | None = None) -> Range:
    """Bytes [start, end), one byte if no end is given."""
    return Range(start, (start + 1 if end is None else end) - start, U8, f"b{start}", f"b{end}")


def stage(name: str, stream: Stream, reads=(), writes=(), **more) -> Stage:
    op = RangeOp("test", tuple(reads), tuple(writes), (Launch("test", (), 1),))
    return Stage(name, stream, (op,), **more)


def named(program: Program) -> set[tuple[str, str, int]]:
    """Edges by the names of their stages."""

    def name(place: tuple[int, int]) -> str:
        return program.phases[place[0]][place[1]].name

    return {(name(e.src), name(e.dst), e.distance) for e in program.edges()}


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        ({"writes": [at(0, 4)]}, {"reads": [at(3, 5)]}, True),  # read after write
        ({"reads": [at(0, 4)]}, {"writes": [at(3, 5)]}, True),  # write after read
        ({"writes": [at(0, 4)]}, {"writes": [at(3, 5)]}, True),  # write after write
        ({"reads": [at(0, 4)]}, {"reads": [at(0, 4)]}, False),
        ({"writes": [at(0, 4)]}, {"writes": [at(4, 8)]}, False),  # half-open
        ({"writes": [at(0, 4)]}, {"writes": [at(2, 2)]}, False),  # no bytes
        ({"writes": [at(2, 2)]}, {"writes": [at(2, 2)]}, False),
        ({"resources": {"x"}}, {"resources": {"x"}}, True),
        ({"resources": {"x"}}, {"resources": {"y"}}, False),
    ],
)
def test_what_conflicts(first, second, conflict):
    program = Program.single("p", (stage("A", COMP_1, **first), stage("B", UPDATE, **second)))
    edges = named(program)
    assert (("A", "B", 0) in edges) == conflict
    assert (("B", "A", 1) in edges) == conflict
    assert program.concurrent(0, 0, 1) == (not conflict) == program.concurrent(0, 1, 0)


def test_one_stream_needs_no_edges():
    stages = tuple(stage(name, UPDATE, writes=[at(0)]) for name in "ABC")
    program = Program.single("p", stages)
    assert program.edges() == ()
    assert Edge((0, 0), (0, 2), 0) in program.hazards()
    assert Edge((0, 2), (0, 2), 1) in program.hazards()
    assert len(program.hazards()) == 3 + 9
    assert not program.concurrent(0, 0, 2)


def test_an_edge_that_others_imply_is_left_out():
    program = Program.single(
        "p",
        (
            stage("A", COMP_1, writes=[at(0)]),
            stage("B", UPDATE, reads=[at(0)], writes=[at(1)]),
            stage("C", COMP_2, reads=[at(0), at(1)]),
        ),
    )
    assert ("A", "C", 0) not in named(program)
    assert {("A", "B", 0), ("B", "C", 0)} <= named(program)
    # C reads what A and B write in the next step; A comes first there, and leads to B
    assert ("C", "A", 1) in named(program)
    assert ("C", "B", 1) not in named(program)


def test_stream_order_carries_an_edge_over():
    program = Program.single(
        "p",
        (
            stage("A", COMP_1, writes=[at(0)]),
            stage("B", COMP_1),
            stage("C", UPDATE, reads=[at(0)]),
            stage("D", UPDATE, reads=[at(0)]),
        ),
    )
    assert {edge for edge in named(program) if edge[2] == 0} == {("A", "C", 0)}
    assert program.concurrent(0, 1, 3)
    assert not program.concurrent(0, 0, 3)


def test_step_k_plus_1_cannot_overtake_step_k():
    program = Program.single(
        "p", (stage("LOAD", TRANS, writes=[at(0)]), stage("USE", COMP_1, reads=[at(0)]))
    )
    assert named(program) == {("LOAD", "USE", 0), ("USE", "LOAD", 1)}


def test_double_buffers_let_the_next_load_run_beside_the_step():
    slot = {"A": at(0, 8), "B": at(8, 16)}
    phases = [
        (
            Stage(f"XFER_{other}", TRANS, (feed_copy(other, slot[other]),)),
            stage(f"STEP_{mine}", COMP_1, reads=[slot[mine]], writes=[at(20)]),
        )
        for mine, other in ("AB", "BA")
    ]
    program = Program.alternating("p", *phases)
    assert program.concurrent(0, 0, 1)
    assert program.concurrent(1, 0, 1)
    assert named(program) == {
        ("XFER_B", "STEP_B", 1),
        ("STEP_A", "XFER_A", 1),
        ("XFER_A", "STEP_A", 1),
        ("STEP_B", "XFER_B", 1),
    }


def test_edges_join_phases_in_turn():
    a = (stage("W", COMP_1, writes=[at(0)]),)
    b = (stage("R", UPDATE, reads=[at(0)]),)
    program = Program.alternating("p", a, b)
    assert set(program.edges()) == {Edge((0, 0), (1, 0), 1), Edge((1, 0), (0, 0), 1)}


def test_a_race_two_steps_apart_is_refused_with_both_names():
    a = (stage("READ", UPDATE, reads=[at(0)]), stage("WRITE", COMP_1, writes=[at(0)]))
    b = (stage("OTHER", TRANS, writes=[at(9)]),)
    program = Program.alternating("p", a, b)
    with pytest.raises(PlanError, match="'WRITE' of phase 0 and 'READ' of phase 0, 2 steps later"):
        program.edges()
    check_edges_equal_hazards(program)
    mended = [[replace(one, resources=frozenset({"x"})) for one in phase] for phase in (a, b)]
    assert Program.alternating("p", *mended).edges()


def test_collectives_and_slots_are_resources():
    comm = Stage("C", UPDATE, (sum_all_reduce(at(0)),))
    other = Stage("D", COMP_1, (broadcast(at(1)),), resources=frozenset({"own"}))
    feed = Stage("X", TRANS, (feed_copy("A", at(2)),))
    assert comm.all_resources == {"comm:0"}
    assert other.all_resources == {"comm:0", "own"}
    assert feed.all_resources == {"slot:A"}
    assert not Program.single("p", (comm, other)).concurrent(0, 0, 1)


def test_external_work_conflicts_like_any_other():
    body = External("callback", (at(0),), (at(1),), lambda _rank, _stream: None, ("torch",))
    program = Program.single(
        "p", (Stage("EXT", COMP_1, external=body), stage("USE", UPDATE, reads=[at(1)]))
    )
    assert program.phases[0][0].all_resources == {"torch"}
    assert (program.phases[0][0].reads, program.phases[0][0].writes) == ((at(0),), (at(1),))
    assert ("EXT", "USE", 0) in named(program)


def test_external_work_is_compared_by_identity():
    def body(_rank: int, _stream: int) -> None: ...

    one, other = (External("callback", (), (), body) for _ in range(2))
    assert one == one
    assert one != other
    assert Stage("A", UPDATE, external=one) != Stage("A", UPDATE, external=other)
    assert len({one, other, one}) == 2


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("thread", print, "'thread' is unknown"),
        ("callback", 3, "must be a function"),
        ("graph", print, "one int for each rank"),
        ("graph", (1, "2"), "one int for each rank"),
    ],
)
def test_external_bodies_that_do_not_fit_are_refused(kind, body, words):
    with pytest.raises(PlanError, match=words):
        External(kind, (), (), body)


def test_graph_handles_are_accepted():
    assert External("graph", (), (), (2**60, 3)).body == (2**60, 3)


def test_a_stage_lists_each_range_once():
    one = Stage("S", UPDATE, (copy(at(0), at(5)), copy(at(1), at(5)), clear(at(0))))
    assert one.reads == (at(5),)
    assert one.writes == (at(0), at(1))
    assert [type(a) for a in one.actions] == [Launch] * 3


def f32(start: int) -> Range:
    return Range(start, 8, F32, f"f{start}", f"f{start}")


def test_neighbouring_collectives_are_one_group():
    factor = Range(96, 4, F32, "factor", "factor")
    one = Stage(
        "S", UPDATE, (sum_all_reduce(f32(0)), mean_all_reduce(f32(8), f32(16), factor=factor))
    )
    groups = one.groups()
    assert [len(group) for group in groups] == [3, 1, 1]
    assert all(isinstance(a, Collective) for a in groups[0])
    assert tuple(action for group in groups for action in group) == one.actions


def test_collectives_on_the_same_bytes_are_groups_of_their_own():
    one = Stage("S", UPDATE, (sum_all_reduce(f32(0), f32(8)), broadcast(f32(8), f32(16))))
    assert [[a.range for a in group] for group in one.groups()] == [
        [f32(0), f32(8)],
        [f32(8), f32(16)],
    ]


def test_kernels_and_copies_end_a_group():
    ops = (sum_all_reduce(f32(0)), feed_copy("A", f32(40)), sum_all_reduce(f32(8)), clear(f32(8)))
    groups = Stage("S", UPDATE, ops).groups()
    assert [type(group[0]) for group in groups] == [Collective, FeedCopy, Collective, Launch]


def test_collectives_of_a_phase_stand_in_the_order_of_issue():
    program = Program.single(
        "p",
        (
            Stage("A", UPDATE, (clear(f32(0)), sum_all_reduce(f32(0), f32(8)))),
            Stage("B", COMP_1, (clear(f32(16)),)),
            Stage("C", UPDATE, (broadcast(f32(16)), clear(f32(0)), sum_all_reduce(f32(0)))),
        ),
    )
    assert [[a.kind for a in group] for group in program.collectives(0)] == [
        ["all_reduce", "all_reduce"],
        ["broadcast"],
        ["all_reduce"],
    ]


def test_stages_that_do_nothing_are_dropped():
    program = Program.alternating(
        "p",
        (Stage("NOTHING", UPDATE), Stage("EMPTY", UPDATE, (sum_all_reduce(at(3, 3)),))),
        (Stage("C", UPDATE, (clear(at(0)),)), Stage("R", UPDATE, resources=frozenset({"x"}))),
    )
    assert [[s.name for s in phase] for phase in program.phases] == [[], ["C"]]
    assert program.edges() == ()
    assert program.collectives(0) == ()


def test_names_are_unique_in_a_phase_alone():
    same = (stage("A", UPDATE), stage("A", UPDATE))
    with pytest.raises(PlanError, match="phase 0: two stages are named 'A'"):
        Program.single("p", same)
    Program.alternating("p", same[:1], same[:1])


def test_a_program_needs_a_phase():
    with pytest.raises(PlanError, match="'p' has no phase"):
        Program("p", ())


ONE = clear(at(0))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("UPDATE",), ["stream 'UPDATE' is no Stream", "Stream.UPDATE"]),
        ((4,), ["stream 4 is no Stream", "Stream.UPDATE"]),
        ((UPDATE, ONE), ["ops must be a tuple", "is RangeOp(kind='clear'", "write (x,)"]),
        ((UPDATE, "ops"), ["ops must be a tuple", "is 'ops'"]),
        ((UPDATE, (ONE, at(0))), ["ops must be a tuple", "holds Range("]),
        ((UPDATE, (), print), ["external <built-in function print> is no External"]),
        ((UPDATE, (), None, "x"), ["resources must be a tuple", "is 'x'", "write (x,)"]),
        ((UPDATE, (), None, (3,)), ["resources must be a tuple", "holds 3"]),
    ],
)
def test_a_stage_of_wrong_types_is_refused_where_it_is_made(arguments, words):
    with pytest.raises(PlanError) as caught:
        Stage("S", *arguments)
    for word in ("stage 'S'", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("reads", "writes", "more", "words"),
    [
        (at(0), (), (), "reads must be a tuple of Range, but is Range("),
        ((), ("g",), (), "writes must be a tuple of Range, but holds 'g'"),
        ((), (), "torch", "resources must be a tuple of str, but is 'torch'"),
    ],
)
def test_external_work_declares_ranges_and_names(reads, writes, more, words):
    with pytest.raises(PlanError) as caught:
        External("callback", reads, writes, print, more)
    assert words in str(caught.value)


LONE = stage("LONE", UPDATE)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Program.single("x", LONE),
            "phase 0 must be a tuple of Stage, but is Stage('LONE'",
        ),
        (lambda: Program.alternating("x", [LONE], LONE), "phase 1 must be a tuple of Stage"),
        (lambda: Program.single("x", (LONE, ONE)), "but holds RangeOp("),
        (lambda: Program("x", (LONE,)), "phase 0 must be a tuple of Stage, but is Stage('LONE'"),
        (lambda: Program("x", LONE), "for one phase use Program.single"),
    ],
)
def test_a_program_of_anything_but_stages_is_refused_where_it_is_made(make, words):
    with pytest.raises(PlanError) as caught:
        make()
    assert "program 'x'" in str(caught.value)
    assert words in str(caught.value)


def test_any_iterable_of_stages_and_ops_will_do():
    made = Stage("S", UPDATE, (op for op in [ONE]), resources=["x"])
    assert (made.ops, made.resources) == ((ONE,), {"x"})
    assert Program.single("p", iter([made])) == Program("p", [[made]])


def test_programs_and_stages_are_values():
    stages = [stage("A", UPDATE, writes=[at(0)])]
    assert Program.single("p", stages) == Program.single("p", stages)
    assert hash(stages[0]) == hash(stage("A", UPDATE, writes=[at(0)]))
    assert (stages[0].stream, stages[0].ops) == (UPDATE, stage("B", UPDATE, writes=[at(0)]).ops)


def overlap_program(*, wrong: bool = False) -> Program:
    """The stages around the overlap; if `wrong`, FIRST_BWD reads deep gradients."""
    builder = PlanBuilder(CNN_TABLE)
    builder.add("G_FIRST_CONV", "g.first", (9,))
    builder.add("G_DEEP_CONV", "g.deep", (99,))
    builder.add("R_RESULT", "result", (3,))
    plan = builder.build()
    deep, first = plan.buckets()
    reads = [plan.range("g.deep")] if wrong else []
    return Program.single(
        "p",
        (
            stage("DEEP_FWD_BWD", COMP_1, writes=[deep.range]),
            stage("FIRST_BWD", COMP_1, reads=reads, writes=[plan.range("g.first")]),
            Stage(deep.stage, UPDATE, (sum_all_reduce(deep.range),)),
            Stage(first.stage, UPDATE, (sum_all_reduce(first.range),)),
        ),
    )


def test_the_deep_all_reduce_runs_under_the_first_layers_backward():
    program = overlap_program()
    assert [s.name for s in program.phases[0]][1:3] == ["FIRST_BWD", "DEEP_COMM"]
    assert program.concurrent(0, 1, 2)
    check_overlap(program)
    assert {("DEEP_FWD_BWD", "DEEP_COMM", 0), ("FIRST_BWD", "FIRST_COMM", 0)} <= named(program)


def test_the_overlap_is_lost_where_bytes_are_shared():
    with pytest.raises(AssertionError, match="DEEP_COMM and FIRST_BWD"):
        check_overlap(overlap_program(wrong=True))


@pytest.mark.timeout(60)
def test_thousands_of_stages_are_ordered():
    count, streams = 2000, list(Stream)
    stages = tuple(
        stage(f"S{k}", streams[k % 5], [at(4 * k, 4 * k + 6)], [at(4 * k + 4, 4 * k + 8)])
        for k in range(count)
    )
    program = Program.alternating("p", stages, stages)
    within = [edge for edge in program.edges() if edge.distance == 0 and edge.src[0] == 0]
    assert [(e.src[1], e.dst[1]) for e in within] == [(k, k + 1) for k in range(count - 1)]
