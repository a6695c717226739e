"""A plan as text: JSON that reads back or is refused, the table for people, and differences."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow.dtype import F16, F32
from trlow.errors import PlanError
from trlow.plan import MemoryPlan, PlanBuilder
from trlow.plan_text import rows
from trlow.region import CNN_TABLE, BucketSpec, Region, RegionTable
from trlow.testing import plans

TABLE = RegionTable(
    "t",
    (Region("W_A", F32, "w", persistent=True), Region("G_A", F32, "g"), Region("G_B", F32, "g")),
    (BucketSpec("COMM", "G_A", "G_B"),),
)


def plan(**shapes) -> MemoryPlan:
    builder = PlanBuilder(TABLE)
    builder.add("W_A", "w", shapes.get("w", (3, 5)))
    builder.add("G_A", "g", shapes.get("g", (8,)), variants={"short": (4,)})
    if "h" in shapes:
        builder.add("G_B", "h", shapes["h"])
    return builder.build()


def test_json_says_where_everything_lies():
    text = json.loads(plan().to_json())
    assert text["fingerprint"] == plan().fingerprint()
    assert text["arena_nbytes"] == 4096
    assert text["alignment"] == 256
    assert text["regions"][1] == {
        "name": "G_A", "dtype": "float32", "offset": 256, "nbytes": 32, "slots": 1,
        "meaning": "g", "persistent": False, "kind": "G", "parameter": None,
    }  # fmt: skip
    assert text["dtensors"][1] == {
        "id": 1, "name": "g", "shape": [8], "dtype": "float32", "region": "G_A", "offset": 256,
        "nbytes": 32, "slot_nbytes": 32, "variants": {"short": [4]},
    }  # fmt: skip


def test_the_fingerprint_is_a_sha256_and_does_not_depend_on_the_process():
    assert plan().fingerprint() == plan().fingerprint()
    assert len(bytes.fromhex(plan().fingerprint())) == 32


def change(path: list, value: object) -> str:
    text = json.loads(plan().to_json())
    inner = text
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(text)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["arena_nbytes"], 8192),
        (["alignment"], 512),
        (["alignment"], 100),
        (["alignment"], "256"),
        (["alignment"], True),
        (["alignment"], 256.0),
        (["arena_alignment"], 8192),
        (["fingerprint"], "0" * 64),
        (["table"], "other"),
        (["table"], 3),
        (["trlow_plan"], 2),
        (["trlow_plan"], None),
        (["buckets"], {}),
        (["buckets"], []),
        (["buckets", 0, "first"], "G_C"),
        (["buckets", 0, "last"], 1),
        (["variants"], []),
        (["variants"], ["short", "long"]),
        (["unknown"], 1),
        (["regions"], []),
        (["regions"], [1]),
        (["regions", 0, "dtype"], "float12"),
        (["regions", 0, "dtype"], "float16"),
        (["regions", 0, "persistent"], 1),
        (["regions", 0, "persistent"], False),
        (["regions", 0, "parameter"], 5),
        (["regions", 0, "nbytes"], 64),
        (["regions", 1, "name"], "W_A"),
        (["regions", 1, "offset"], 0),
        (["dtensors", 0, "offset"], 256),
        (["dtensors", 0, "shape"], [3, 4]),
        (["dtensors", 0, "shape"], [3, 0]),
        (["dtensors", 0, "shape"], [3.5]),
        (["dtensors", 0, "shape"], "35"),
        (["dtensors", 0, "shape"], [[3]]),
        (["dtensors", 0, "region"], "G_C"),
        (["dtensors", 0, "name"], "g"),
        (["dtensors", 0, "id"], 1),
        (["dtensors", 0, "dtype"], "int32"),
        (["dtensors", 1, "variants"], {"short": 4}),
        (["dtensors", 1, "variants"], {"short": {"a": 4}}),
        (["dtensors", 1, "variants"], []),
        (["dtensors", 1, "slot_nbytes"], 64),
        (["dtensors"], [None]),
    ],
    ids=str,
)
def test_a_document_that_was_changed_is_refused(path, value):
    with pytest.raises(PlanError):
        MemoryPlan.from_json(change(path, value))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "3",
        '"plan"',
        "{}",
        '{"trlow_plan": 1}',
        "[" * 100_000,
        None,
        3,
        b"\xff",
    ],
    ids=lambda text: str(text)[:20],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(PlanError):
        MemoryPlan.from_json(text)


def keys(value: object, path: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, inner in items:
        found.append((*path, key))
        if isinstance(inner, dict | list):
            found += keys(inner, (*path, key))
    return found


@pytest.mark.parametrize("path", keys(json.loads(plan().to_json())), ids=str)
def test_no_part_of_a_document_can_be_left_out(path):
    text = json.loads(plan().to_json())
    inner = text
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    with pytest.raises(PlanError):
        MemoryPlan.from_json(json.dumps(text))


@given(plans(), st.data())
def test_text_cut_anywhere_is_refused(drawn, data):
    text = drawn.to_json()
    with pytest.raises(PlanError):
        MemoryPlan.from_json(text[: data.draw(st.integers(0, len(text) - 1))])


def test_names_may_be_any_text():
    builder = PlanBuilder(TABLE)
    for name in ("größe", '"', "\\", "\n", "\ud800", "a" * 1000):
        builder.add("W_A", name, (1,))
    built = builder.build()
    assert MemoryPlan.from_json(built.to_json()) == built


def test_diff_names_what_is_added_gone_moved_and_reshaped():
    old, new = plan(), plan(w=(100,), h=(2,))
    lines = old.diff(new).splitlines()
    assert "h: only in the second plan" in lines
    assert "w: shape (3, 5) -> (100,)" in lines
    assert "w: slot_nbytes 60 -> 400" in lines
    assert "g: moved 256 -> 512" in lines
    assert "h: only in the first plan" in new.diff(old).splitlines()


def test_diff_of_equal_plans_is_empty():
    assert plan().diff(plan()) == ""


def test_diff_names_a_changed_table():
    other = RegionTable(
        "u",
        (Region("G_A", F32, "g"), Region("W_A", F16, "w"), Region("X", F32, "x")),
        (BucketSpec("COMM", "G_A", "G_A"),),
    )
    builder = PlanBuilder(other, alignment=512, arena_alignment=8192)
    builder.add("G_A", "g", (8,))
    lines = plan().diff(builder.build()).splitlines()
    for line in (
        "alignment: 256 -> 512",
        "arena_alignment: 4096 -> 8192",
        "table: t -> u",
        "regions: another order",
        "region G_B: only in the first plan",
        "region X: only in the second plan",
        "region W_A: dtype float32 -> float16",
        "region W_A: persistent True -> False",
        "buckets: COMM G_A..G_B -> COMM G_A..G_A",
        "g: variants {'short': (4,)} -> {}",
        "arena: 4096 -> 8192 bytes",
    ):
        assert line in lines


def test_describe_is_a_table_with_sums():
    assert plan().describe().splitlines() == [
        "region  dtype    offset  bytes  slots   pad",
        "W_A     float32       0     60      1   196",
        "G_A     float32     256     32      1   224",
        "G_B     float32     512      0      0  3584",
        "arena              4096     92      2  4004",
    ]


@given(plans())
def test_describe_adds_up(drawn):
    _, *regions, total = [row.split() for row in drawn.describe().splitlines()]
    assert [row[0] for row in regions] == [region.name for region in drawn.table]
    for column, whole in ((-3, total[-3]), (-2, total[-2]), (-1, total[-1])):
        assert sum(int(row[column]) for row in regions) == int(whole)
    assert int(total[-3]) + int(total[-1]) == int(total[1]) == drawn.arena_nbytes
    assert int(total[-2]) == len(drawn.tensors)


def numbers(rows: list) -> list[tuple[int, ...]]:
    """Offset, bytes, slots and pad of each row."""
    return [tuple(map(int, row[-4:])) for row in rows]


@given(plans(), st.booleans())
def test_offset_bytes_and_pad_of_a_row_give_the_next_offset(drawn, empty):
    *regions, total = numbers(rows(drawn, empty=empty))
    for (offset, nbytes, _, pad), following in pairwise([*regions, total]):
        assert offset + nbytes + pad == following[0]
    assert [*regions, total][0][0] == 0
    assert total[0] == total[1] + total[3] == drawn.arena_nbytes
    kept = [region.name for region in drawn.table if empty or drawn.tensors_in(region.name)]
    assert [row[0] for row in rows(drawn, empty=empty)] == [*kept, "arena"]
    for name, (offset, nbytes, slots, _) in zip(kept, regions, strict=True):
        place = drawn.region_range(name)
        assert (offset, nbytes) == (place.offset, place.nbytes)
        assert slots == len(drawn.tensors_in(name))


def test_pads_inside_a_region_are_counted_once():
    builder = PlanBuilder(TABLE)
    builder.add("W_A", "w.1", (3,))
    builder.add("W_A", "w.2", (5,))
    builder.add("G_B", "g", (1,))
    built = builder.build()
    assert built.describe().splitlines()[1] == "W_A     float32       0    276      2   236"
    text = json.loads(built.to_json())
    assert [row[3] for row in rows(built)[:-1]] == [r["nbytes"] for r in text["regions"]]


def test_the_report_of_the_command_line_is_no_document_and_is_named():
    text = json.loads(plan().to_json())
    del text["trlow_plan"]
    with pytest.raises(PlanError, match="format 'no version'"):
        MemoryPlan.from_json(json.dumps(text))
    text |= {"traffic_nbytes_per_rank": 0, "ranges": {}}
    with pytest.raises(PlanError, match=r"report that `trlow plan --json` prints.*to_json\(\)"):
        MemoryPlan.from_json(json.dumps(text))


def test_describe_shows_every_region_of_the_article():
    lines = PlanBuilder(CNN_TABLE).build().describe().splitlines()
    assert len(lines) == len(CNN_TABLE) + 2
