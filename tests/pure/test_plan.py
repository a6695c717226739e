"""The memory plan by example: layout, typed ranges, variants, buckets, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow.dtype import F16, F32, I32, U8
from trlow.errors import PlanError
from trlow.plan import MemoryPlan, PlanBuilder, Range
from trlow.region import CNN_TABLE, READINESS_TABLE, BucketSpec, Region, RegionTable
from trlow.testing import byte_ranges, plan_ranges, plans, world_sizes

SMALL = RegionTable(
    "small",
    (
        Region("W_A", F32, "weights", persistent=True),
        Region("W_B", F32, "weights", persistent=True),
        Region("G_A", F32, "gradients"),
        Region("G_B", F32, "gradients"),
        Region("H", F16, "halves", persistent=True),
        Region("I", I32, "labels"),
    ),
    (BucketSpec("COMM", "G_A", "G_B"),),
)


def small_plan(**more) -> MemoryPlan:
    builder = PlanBuilder(SMALL, **more)
    builder.add("G_A", "g.1", (65,))  # 260 bytes in a slot of 512
    builder.add("W_A", "w.1", (3, 5))
    builder.add("H", "h.1", (7,))
    builder.add("G_A", "g.2", (2,))
    builder.add("G_B", "g.3", (4, 4), variants={"short": (2, 4), "large": (70,)})
    return builder.build()


def test_regions_follow_the_table_and_tensors_the_order_of_adding():
    plan = small_plan()
    assert [(t.name, t.offset, t.slot_nbytes) for t in plan.tensors] == [
        ("w.1", 0, 60),
        ("g.1", 256, 260),
        ("g.2", 768, 8),
        ("g.3", 1024, 280),
        ("h.1", 1536, 14),
    ]
    assert [t.id for t in plan.tensors] == [0, 1, 2, 3, 4]
    assert plan.arena_nbytes == 4096
    assert plan["w.1"].strides == (5, 1)
    assert plan["w.1"].region == "W_A"


def test_alignments_are_chosen():
    plan = small_plan(alignment=8, arena_alignment=512)
    assert [t.offset for t in plan.tensors] == [0, 64, 328, 336, 616]
    assert plan.arena_nbytes == 1024


def test_a_plan_without_tensors_needs_no_arena():
    plan = PlanBuilder(SMALL).build()
    assert plan.arena_nbytes == 0
    assert plan.span("W_A", "I").nbytes == 0
    assert plan.buckets() == ()
    assert plan.persistent_ranges() == ()


def test_a_range_runs_from_the_first_start_to_the_last_slots_end():
    plan = small_plan()
    gradients = plan.range("G_A", "G_B")
    assert (gradients.offset, gradients.nbytes, gradients.dtype) == (256, 1024 + 280 - 256, F32)
    assert gradients.count == 262
    assert (gradients.first, gradients.last) == ("G_A", "G_B")
    assert gradients.end == plan["g.3"].offset + plan["g.3"].slot_nbytes
    assert plan.range("g.2") == Range(768, 8, F32, "g.2", "g.2")
    assert plan.range("g.1", "g.2") == Range(256, 520, F32, "g.1", "g.2")
    assert plan.range("g.2", "G_B").offset == 768
    assert plan.range("G_A", "g.2").nbytes == 520
    assert plan.region_range("G_A") == plan.range("G_A")


def test_an_empty_region_is_an_empty_range_in_its_place():
    plan = small_plan()
    assert plan.range("W_B").nbytes == 0
    assert plan.region_range("W_B").offset == 256
    assert plan.range("I").count == 0
    assert plan.range("W_A", "W_B").nbytes == 60
    assert plan.range("W_B", "G_A").offset == 256


def test_span_is_bytes_over_mixed_dtypes():
    span = small_plan().span("W_A", "H")
    assert (span.offset, span.nbytes, span.dtype) == (0, 1550, U8)


def test_mixed_dtypes_are_refused_with_both_names():
    plan = small_plan()
    with pytest.raises(PlanError, match=r"from 'G_A' to 'H' mixes dtypes: float32.*float16"):
        plan.range("G_A", "H")
    with pytest.raises(PlanError, match=r"'g.1' to 'h.1' mixes dtypes"):
        plan.range("g.1", "h.1")
    with pytest.raises(PlanError, match="'W_B' to 'I' mixes dtypes"):
        plan.range("W_B", "I")


def test_a_mixed_region_inside_is_refused_and_an_empty_one_is_nothing():
    regions = (Region("A", F32, ""), Region("M", F16, ""), Region("Z", F32, ""))
    for filled in (False, True):
        builder = PlanBuilder(RegionTable("t", regions))
        builder.add("A", "a", (1,))
        builder.add("Z", "z", (1,))
        if filled:
            builder.add("M", "m", (1,))
        plan = builder.build()
        if filled:
            with pytest.raises(PlanError, match=r"from 'A' to 'Z' mixes dtypes.*'M'"):
                plan.range("A", "Z")
        else:
            assert plan.range("A", "Z").nbytes == 260


@pytest.mark.parametrize(
    ("first", "last"), [("G_B", "G_A"), ("g.2", "g.1"), ("g.3", "G_A"), ("G_B", "g.1")]
)
def test_reversed_pairs_are_refused_with_both_names(first, last):
    plan = small_plan()
    for ask in (plan.range, plan.span):
        with pytest.raises(PlanError, match=f"'{first}' lies behind '{last}'"):
            ask(first, last)


def test_unknown_names_are_refused():
    plan = small_plan()
    asks = (
        lambda: plan["nothing"],
        lambda: plan.range("nothing"),
        lambda: plan.range("w.1", "nothing"),
        lambda: plan.span("nothing"),
        lambda: plan.region_range("nothing"),
        lambda: plan.tensor("nothing"),
        lambda: plan.tensors_in("nothing"),
        lambda: plan.buckets({"nothing"}),
    )
    for ask in asks:
        with pytest.raises(PlanError, match="'nothing'"):
            ask()
    with pytest.raises(PlanError, match=r"no region 'w.1'"):
        plan.region_range("w.1")
    assert "w.1" in plan
    assert "W_A" not in plan


def test_variants_share_slot_and_offset():
    plan = small_plan()
    assert plan.variants == ("large", "short")
    assert plan.tensor("g.3") is plan["g.3"]
    short = plan.tensor("g.3", "short")
    assert (short.shape, short.strides, short.nbytes) == ((2, 4), (4, 1), 32)
    assert (short.offset, short.slot_nbytes) == (1024, 280)
    assert plan.tensor("w.1", "short") is plan["w.1"]
    with pytest.raises(PlanError, match=r"'g.3'.*no tensor has a variant 'huge'.*large, short"):
        plan.tensor("g.3", "huge")


@pytest.mark.parametrize(
    ("region", "name", "shape", "words"),
    [
        ("G_C", "x", (1,), "no region 'G_C'"),
        ("G_A", "w.1", (1,), "'G_A', but region 'W_A'"),
        ("G_A", "G_B", (1,), "names no region"),
        ("G_A", "", (1,), "cannot name a tensor"),
        ("G_A", 3, (1,), "cannot name a tensor"),
        ("G_A", "x", (2, 0), r"shape \(2, 0\) must be"),
        ("G_A", "x", (-1,), "each at least 1"),
        ("G_A", "x", (1.0,), "each at least 1"),
        ("G_A", "x", (True,), "each at least 1"),
        ("G_A", "x", "3", "each at least 1"),
        ("G_A", "x", "", "each at least 1"),
        ("G_A", "x", b"3", "each at least 1"),
        ("G_A", "x", {3}, "each at least 1"),
        ("G_A", "x", {}, "each at least 1"),
        ("G_A", "x", 3, "each at least 1"),
        ("G_A", "x", None, "each at least 1"),
    ],
)
def test_bad_tensors_are_refused(region, name, shape, words):
    builder = PlanBuilder(SMALL)
    builder.add("W_A", "w.1", (3,))
    with pytest.raises(PlanError, match=words):
        builder.add(region, name, shape)
    assert [t.name for t in builder.build().tensors] == ["w.1"]


def test_bad_variants_are_refused_by_name():
    builder = PlanBuilder(SMALL)
    with pytest.raises(PlanError, match="'x', variant 'short': shape"):
        builder.add("W_A", "x", (3,), variants={"short": (0,)})
    assert builder.add("W_A", "x", (3,)) == "x"


def test_nothing_is_added_after_build():
    builder = PlanBuilder(SMALL)
    builder.add("W_A", "w.1", (3,))
    builder.build()
    with pytest.raises(PlanError, match=r"'late': allocation after finalize: .*before build\(\)"):
        builder.add("W_A", "late", (3,))
    with pytest.raises(PlanError, match="has built its plan"):
        builder.build()


@pytest.mark.parametrize(
    ("alignment", "arena_alignment"), [(0, 4096), (4, 4096), (100, 4096), (256, 128), (256.0, 4096)]
)
def test_bad_alignments_are_refused(alignment, arena_alignment):
    with pytest.raises(PlanError, match="must be a power of two"):
        PlanBuilder(SMALL, alignment=alignment, arena_alignment=arena_alignment)


def test_an_arena_beyond_signed_64_bits_is_refused():
    builder = PlanBuilder(SMALL)
    builder.add("W_A", "w.1", (2**61 - 1024,))
    assert builder.build().arena_nbytes == 2**63 - 4096
    for shape in ((2**61,), (2**40, 2**40)):
        builder = PlanBuilder(SMALL)
        builder.add("W_A", "w.1", shape)
        with pytest.raises(PlanError, match=f"'w.1'.*at most {2**63 - 1}"):
            builder.build()
    builder = PlanBuilder(SMALL)
    builder.add("W_A", "w.1", (2**61 - 128,))
    with pytest.raises(PlanError, match=f"at most {2**63 - 1}"):
        builder.build()


def cnn_plan(*, first: bool = True) -> MemoryPlan:
    builder = PlanBuilder(CNN_TABLE)
    for family, shape in (("BN_BIAS", (16,)), ("FC_WEIGHT", (64, 10)), ("DEEP_CONV", (9, 16, 32))):
        builder.add(f"W_{family}", f"w.{family}", shape)
        builder.add(f"G_{family}", f"g.{family}", shape)
    if first:
        builder.add("G_FIRST_CONV", "g.first", (3, 3, 1, 16))
    builder.add("R_RESULT", "result", (3,))
    return builder.build()


def test_the_metrics_ride_in_the_deep_bucket():
    deep, first = cnn_plan().buckets()
    assert (deep.stage, deep.first, deep.last) == ("DEEP_COMM", "G_DEEP_CONV", "R_RESULT")
    assert (first.stage, first.first, first.last) == ("FIRST_COMM", "G_BN_BIAS", "G_FIRST_CONV")
    assert deep.range.contains(cnn_plan().range("result"))


@pytest.mark.parametrize("first", [False, True])
def test_without_the_first_layers_gradients_the_bucket_ends_before_them(first):
    buckets = cnn_plan(first=first).buckets({"g.first"} if first else ())
    assert (buckets[1].first, buckets[1].last) == ("G_BN_BIAS", "G_FC_WEIGHT")


def test_a_bucket_goes_only_when_nothing_is_left_in_it():
    plan = cnn_plan()
    names = {"g.first", "g.BN_BIAS", "g.FC_WEIGHT"}
    assert [b.stage for b in plan.buckets(names)] == ["DEEP_COMM"]
    deep, _ = plan.buckets({"g.DEEP_CONV"})
    assert (deep.first, deep.last) == ("R_RESULT", "R_RESULT")
    kept = plan.buckets(names - {"g.FC_WEIGHT"})[1]
    assert (kept.first, kept.last) == ("G_FC_WEIGHT", "G_FC_WEIGHT")


def test_a_bucket_that_begins_within_a_region_is_named_by_tensor():
    (bucket,) = small_plan().buckets({"g.1"})
    assert (bucket.first, bucket.last, bucket.range.offset) == ("g.2", "G_B", 768)
    (bucket,) = small_plan().buckets({"g.3", "g.2"})
    assert (bucket.first, bucket.last, bucket.range.nbytes) == ("G_A", "g.1", 260)


def test_only_gradients_can_be_frozen():
    with pytest.raises(PlanError, match=r"'w.1' cannot be frozen: region 'W_A'"):
        small_plan().buckets({"w.1"})
    with pytest.raises(PlanError, match="'result' cannot be frozen"):
        cnn_plan().buckets({"result"})


def test_readiness_reduces_a_deep_matrix_early():
    builder = PlanBuilder(READINESS_TABLE)
    builder.add("G_DEEP_FC_WEIGHT", "g.deep", (512, 512))
    builder.add("G_FC_WEIGHT", "g.first", (784, 512))
    deep, first = builder.build().buckets()
    assert (deep.stage, deep.first) == ("DEEP_COMM", "G_DEEP_FC_WEIGHT")
    assert (first.stage, first.first) == ("FIRST_COMM", "G_FC_WEIGHT")


def test_persistent_neighbours_of_one_dtype_are_one_range():
    plan = small_plan()
    assert [(r.first, r.last, r.nbytes) for r in plan.persistent_ranges()] == [
        ("W_A", "W_A", 60),
        ("H", "H", 14),
    ]
    builder = PlanBuilder(SMALL)
    for region in ("W_A", "W_B", "H"):
        builder.add(region, region.lower(), (1,))
    merged = [(r.first, r.last) for r in builder.build().persistent_ranges()]
    assert merged == [("W_A", "W_B"), ("H", "H")]


@given(plans())
def test_persistent_ranges_hold_exactly_the_persistent_tensors(plan):
    ranges = plan.persistent_ranges()
    for tensor in plan.tensors:
        holders = [r for r in ranges if r.overlaps(plan.range(tensor.name))]
        assert len(holders) == plan.table[tensor.region].persistent


def test_traffic_counts_gradients_alone():
    plan = cnn_plan()
    nbytes = 4 * (16 + 640 + 9 * 16 * 32 + 144)
    assert plan.traffic_nbytes_per_rank(1) == 0
    assert plan.traffic_nbytes_per_rank(4) == 2 * 3 * nbytes // 4
    for size in (0, -1, 2.0):
        with pytest.raises(PlanError, match="world size"):
            plan.traffic_nbytes_per_rank(size)


@given(plans(), world_sizes(any_world_size=True))
def test_traffic_is_below_twice_the_gradients(plan, world_size):
    gradients = sum(t.nbytes for t in plan.tensors if plan.table[t.region].kind == "G")
    traffic = plan.traffic_nbytes_per_rank(world_size)
    assert 0 <= 2 * gradients * (world_size - 1) - traffic * world_size < world_size


def test_a_plan_cannot_be_changed():
    plan = small_plan()
    with pytest.raises(AttributeError):
        plan.alignment = 8  # type: ignore[misc]
    with pytest.raises(AttributeError):
        plan["w.1"].offset = 8  # type: ignore[misc]


def test_plans_are_equal_by_what_they_say():
    assert small_plan() == small_plan()
    assert hash(small_plan()) == hash(small_plan())
    assert small_plan() != small_plan(alignment=512)
    assert small_plan() != "a plan"


@given(byte_ranges(), byte_ranges())
def test_ranges_are_half_open_sets_of_bytes(a, b):
    mine, theirs = (set(range(r.offset, r.end)) for r in (a, b))
    assert a.overlaps(b) == bool(mine & theirs) == b.overlaps(a)
    assert a.contains(b) == (theirs <= mine)


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 6), (2, 4), (-4, 4), (4, -4), (1, 0)])
def test_a_range_of_no_whole_elements_is_refused_with_both_names(offset, nbytes):
    with pytest.raises(PlanError, match=r"from 'a' to 'b'.*multiples of 4"):
        Range(offset, nbytes, F32, "a", "b")


@given(st.data())
def test_every_range_of_a_plan_is_inside_the_arena(data):
    plan = data.draw(plans())
    r = data.draw(plan_ranges(plan))
    assert 0 <= r.offset <= r.end <= plan.arena_nbytes
    assert not r.offset % plan.alignment
    assert r.count * r.dtype.itemsize == r.nbytes
