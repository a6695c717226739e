"""`trlow plan`: one plan as table, JSON and picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from trlow.errors import PlanError
from trlow.plan import MemoryPlan

SVG = "{http://www.w3.org/2000/svg}"
KEYS = [
    "fingerprint",
    "arena_nbytes",
    "alignment",
    "traffic_nbytes_per_rank",
    "regions",
    "dtensors",
    "ranges",
]


def as_json(trlow, *arguments) -> dict:
    outcome = trlow("plan", "--json", *arguments)
    assert (outcome.code, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_json_has_exactly_the_promised_keys(trlow):
    plan = as_json(trlow)
    assert list(plan) == KEYS
    for region in plan["regions"]:
        assert list(region) == ["name", "dtype", "offset", "nbytes", "slots"]
    for tensor in plan["dtensors"]:
        assert list(tensor) == [
            "id", "name", "shape", "dtype", "region", "offset", "nbytes", "slot_nbytes",
        ]  # fmt: skip
    assert set(plan["ranges"]) == {"DEEP_COMM", "FIRST_COMM"}
    for place in plan["ranges"].values():
        assert list(place) == ["first", "last", "offset", "nbytes"]


@pytest.mark.parametrize("model", ["cnn", "mlp"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_regions_are_in_arena_order_and_hold_their_tensors(trlow, model, optimizer):
    plan = as_json(trlow, "--model", model, "--optimizer", optimizer)
    offsets = [region["offset"] for region in plan["regions"]]
    assert offsets == sorted(offsets)
    inside = {region["name"]: region for region in plan["regions"]}
    for tensor in plan["dtensors"]:
        region = inside[tensor["region"]]
        assert region["offset"] <= tensor["offset"]
        assert tensor["offset"] + tensor["nbytes"] <= region["offset"] + region["nbytes"]
        assert tensor["offset"] % plan["alignment"] == 0
    assert sum(region["slots"] for region in plan["regions"]) == len(plan["dtensors"])
    assert plan["arena_nbytes"] >= max(r["offset"] + r["nbytes"] for r in plan["regions"])


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_traffic_is_the_ring_formula_over_gradient_bytes(trlow, ranks):
    plan = as_json(trlow, "--ranks", ranks)
    gradients = sum(
        tensor["nbytes"] for tensor in plan["dtensors"] if tensor["region"].startswith("G_")
    )
    assert plan["traffic_nbytes_per_rank"] * ranks == 2 * (ranks - 1) * gradients


def test_the_deep_bucket_ends_with_the_metrics(trlow):
    ranges = as_json(trlow)["ranges"]
    assert (ranges["DEEP_COMM"]["first"], ranges["DEEP_COMM"]["last"]) == (
        "G_DEEP_CONV",
        "R_RESULT",
    )
    assert ranges["FIRST_COMM"]["last"] == "G_FIRST_CONV"


def test_the_same_words_give_the_same_plan_and_others_another(trlow):
    first = as_json(trlow)["fingerprint"]
    assert as_json(trlow)["fingerprint"] == first
    assert as_json(trlow, "--global-batch-size", 256)["fingerprint"] != first


def test_three_ranks_need_the_flag(trlow):
    arguments = ("plan", "--ranks", 3, "--global-batch-size", 129)
    assert trlow(*arguments).code == 2
    assert trlow(*arguments, "--any-world-size").code == 0


def test_the_table_shows_what_the_json_says(trlow):
    plan = as_json(trlow)
    outcome = trlow("plan")
    assert outcome.code == 0
    rows = {line.split()[0]: line.split()[1:] for line in outcome.out.splitlines() if line.strip()}
    for region in plan["regions"]:
        if region["nbytes"]:
            expected = [str(region[key]) for key in ("dtype", "offset", "nbytes", "slots")]
            assert rows[region["name"]][:4] == expected
    assert plan["fingerprint"] in outcome.out
    assert str(plan["arena_nbytes"]) in outcome.out


def test_offset_bytes_and_pad_of_a_row_of_the_table_give_the_next_offset(trlow):
    plan = as_json(trlow)
    names = {region["name"] for region in plan["regions"]}
    lines = [line.split() for line in trlow("plan").out.splitlines() if line.strip()]
    regions = [line for line in lines if line[0] in names and len(line) == 6]
    (total,) = (line for line in lines if line[0] == "arena" and len(line) == 5)
    table = [tuple(map(int, line[-4:])) for line in (*regions, total)]
    assert any(slots > 1 for _, _, slots, _ in table)
    assert table[0][0] == 0
    for (offset, nbytes, _, pad), following in pairwise(table):
        assert offset + nbytes + pad == following[0]
    offset, nbytes, slots, pad = table[-1]
    assert offset == nbytes + pad == plan["arena_nbytes"]
    assert nbytes == sum(region["nbytes"] for region in plan["regions"])
    assert slots == len(plan["dtensors"])


def test_the_report_is_not_taken_for_a_plan(trlow):
    with pytest.raises(PlanError, match="report that `trlow plan --json` prints"):
        MemoryPlan.from_json(trlow("plan", "--json").out)
    assert "MemoryPlan.from_json reads what MemoryPlan.to_json writes, not this" in " ".join(
        trlow("plan", "--help").out.split()
    )


def test_the_picture_is_to_scale(trlow, tmp_path):
    path = tmp_path / "arena.svg"
    plan = as_json(trlow, "--svg", path)
    rectangles: dict[str, list[float]] = {}
    for rectangle in ET.parse(path).getroot().iter(f"{SVG}rect"):
        tip = rectangle.findtext(f"{SVG}title")
        if tip:
            rectangles.setdefault(tip.split(":")[0], []).append(float(rectangle.get("width")))
    for region in plan["regions"]:
        if not region["nbytes"]:
            assert region["name"] not in rectangles
            continue
        expected = 1152 * region["nbytes"] / plan["arena_nbytes"]
        assert rectangles[region["name"]][0] == pytest.approx(expected, abs=0.01)
    # The buckets' regions stand once more, enlarged by one factor.
    twice = {name: widths for name, widths in rectangles.items() if len(widths) == 2}
    assert set(twice) >= {"G_DEEP_CONV", "G_FC_WEIGHT", "G_FIRST_CONV", "R_RESULT"}
    factor = twice["G_DEEP_CONV"][1] / twice["G_DEEP_CONV"][0]
    assert factor > 10
    assert twice["G_FC_WEIGHT"][1] / twice["G_FC_WEIGHT"][0] == pytest.approx(factor, rel=0.02)


def test_the_picture_names_the_buckets_and_leaves_no_other_file(trlow, tmp_path):
    path = tmp_path / "arena.svg"
    assert trlow("plan", "--svg", path).code == 0
    text = " ".join(ET.parse(path).getroot().itertext())
    assert "DEEP_COMM: G_DEEP_CONV … R_RESULT" in text
    assert "FIRST_COMM: G_BN_BIAS … G_FIRST_CONV" in text
    assert list(tmp_path.iterdir()) == [path]


def test_planning_opens_no_device_and_loads_no_library(process):
    outcome = process("plan", "--json")
    assert (outcome.code, outcome.err) == (0, "")
