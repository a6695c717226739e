"""The tables that come with trlow, word for word, and what a table refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from trlow.dtype import BF16, F16, F32, I32, U8
from trlow.errors import PlanError
from trlow.region import (
    CNN_TABLE,
    READINESS_TABLE,
    BucketSpec,
    Region,
    RegionTable,
    bucket_table,
    cnn_table,
    readiness_table,
)
from trlow.testing import tables

SIX = ["BN_BIAS", "BN_WEIGHT", "FC_BIAS", "FC_WEIGHT", "FIRST_CONV", "DEEP_CONV"]
ARENA_ORDER = f"""
    B_PREV_MEAN B_PREV_VAR B_NEXT_MEAN B_NEXT_VAR B_BATCH_MEAN B_BATCH_RSTD
    W_EQ_BIAS W_EQ_SCALE W_BN_BIAS W_BN_WEIGHT W_FC_BIAS W_FC_WEIGHT W_FIRST_CONV W_DEEP_CONV
    E_BN_BIAS E_BN_WEIGHT E_FC_BIAS E_FC_WEIGHT E_FIRST_CONV E_DEEP_CONV
    A_FC_WEIGHT A_FIRST_CONV A_DEEP_CONV
    G_BN_BIAS G_BN_WEIGHT G_FC_BIAS G_FC_WEIGHT G_FIRST_CONV
    G_DEEP_CONV R_RESULT
    G_FC_WEIGHT_LOW G_FIRST_CONV_LOW G_DEEP_CONV_LOW
    {" ".join(f"M_{name}" for name in SIX)} {" ".join(f"V_{name}" for name in SIX)}
    N_FC_WEIGHT N_FIRST_CONV N_DEEP_CONV
    I_A_LABEL I_A_DATA I_A_SCALAR I_B_LABEL I_B_DATA I_B_SCALAR
    F_FEATURE F_GRAD F_FEATURE_LOW F_GRAD_LOW S_SCALAR S_SCALAR_INT S_MASK
    T_COMP_1 T_COMP_2 T_COMP_3 T_UPDATE
    R_PREDICTED_LABEL R_RESULT_ACCUMULATED
""".split()


def names(table: RegionTable) -> list[str]:
    return [region.name for region in table]


def test_the_article_places_regions_in_this_order():
    assert names(CNN_TABLE) == ARENA_ORDER
    assert len(CNN_TABLE) == len(ARENA_ORDER)


def test_the_articles_buckets_are_ready_deep_first():
    assert CNN_TABLE.buckets == (
        BucketSpec("DEEP_COMM", "G_DEEP_CONV", "R_RESULT"),
        BucketSpec("FIRST_COMM", "G_BN_BIAS", "G_FIRST_CONV"),
    )


def test_readiness_moves_deep_fully_connected_layers_into_the_early_bucket():
    order = names(READINESS_TABLE)
    early = order[order.index("G_DEEP_CONV") : order.index("R_RESULT") + 1]
    assert early == ["G_DEEP_CONV", "G_DEEP_FC_BIAS", "G_DEEP_FC_WEIGHT", "R_RESULT"]
    assert READINESS_TABLE.buckets == CNN_TABLE.buckets
    kept = [name for name in order if "DEEP_FC" not in name]
    assert kept == ARENA_ORDER
    for kind in "WEGMV":
        assert f"{kind}_DEEP_FC_BIAS" in READINESS_TABLE
        assert f"{kind}_DEEP_FC_WEIGHT" in READINESS_TABLE


@pytest.mark.parametrize("table", [CNN_TABLE, READINESS_TABLE], ids=lambda t: t.name)
def test_what_survives_a_run_is_persistent(table):
    lasting = {region.name for region in table if region.persistent}
    expected = {"B_PREV_MEAN", "B_PREV_VAR"} | {
        name for name in names(table) if name[:2] in {"W_", "E_", "M_", "V_"}
    }
    assert lasting == expected


def test_dtypes_of_the_article():
    low = {name for name in ARENA_ORDER if name.startswith("A_") or name.endswith("_LOW")}
    for region in CNN_TABLE:
        if region.name in low:
            assert region.dtype == F16
        elif region.name in {"I_A_LABEL", "I_B_LABEL", "S_SCALAR_INT", "R_PREDICTED_LABEL"}:
            assert region.dtype == I32
        else:
            assert region.dtype == (U8 if region.name == "S_MASK" else F32)
    for table in (cnn_table(BF16), readiness_table(BF16)):
        assert {region.dtype for region in table if region.name in low} == {BF16}


def test_a_family_links_weight_gradient_and_moments():
    family = CNN_TABLE.family("FC_WEIGHT")
    assert {kind: region.name for kind, region in family.items()} == {
        "W": "W_FC_WEIGHT",
        "E": "E_FC_WEIGHT",
        "A": "A_FC_WEIGHT",
        "G": "G_FC_WEIGHT",
        "G_LOW": "G_FC_WEIGHT_LOW",
        "M": "M_FC_WEIGHT",
        "V": "V_FC_WEIGHT",
        "N": "N_FC_WEIGHT",
    }
    assert set(CNN_TABLE.family("BN_BIAS")) == {"W", "E", "G", "M", "V"}
    with pytest.raises(PlanError, match=r"no parameter 'FC'.*BN_BIAS"):
        CNN_TABLE.family("FC")


def test_every_gradient_of_the_tables_is_in_a_bucket():
    for table in (CNN_TABLE, READINESS_TABLE, bucket_table("mine", 8)):
        covered = {
            table.regions[k].name
            for spec in table.buckets
            for k in range(table.index(spec.first), table.index(spec.last) + 1)
        }
        assert {region.name for region in table if region.kind == "G"} <= covered


def test_embedders_get_as_many_buckets_as_they_ask_for():
    table = bucket_table("mine", 3, BF16)
    assert [spec.stage for spec in table.buckets] == ["COMM_0", "COMM_1", "COMM_2"]
    assert table["G_BUCKET_2"].dtype == BF16
    assert table["W_BUCKET_0"].persistent
    assert set(table.family("BUCKET_1")) == {"W", "G", "M"}


@pytest.mark.parametrize("count", [0, -1, 1.0, True, "2"])
def test_less_than_one_bucket_is_refused(count):
    with pytest.raises(PlanError, match="least is 1"):
        bucket_table("mine", count)


def test_names_are_looked_up():
    assert CNN_TABLE["R_RESULT"].name == "R_RESULT"
    assert CNN_TABLE.index("B_PREV_VAR") == 1
    assert "R_RESULT" in CNN_TABLE
    assert "R_RESUL" not in CNN_TABLE
    with pytest.raises(PlanError, match="'article' has no region 'R_RESUL'"):
        CNN_TABLE["R_RESUL"]


def test_a_kind_is_the_first_word_unless_given():
    assert Region("G_BUCKET_0", F32, "").kind == "G"
    assert Region("G_BUCKET_0", F32, "", kind="own").kind == "own"
    assert Region("SCRATCH", F32, "").kind == "SCRATCH"


def region(name: str, dtype=F32, **more) -> Region:
    return Region(name, dtype, "for a test", **more)


ABC = (region("A"), region("B"), region("C", F16))


@pytest.mark.parametrize(
    ("regions", "buckets", "words"),
    [
        ((), (), "no regions"),
        ((region("A"), region("A")), (), "two regions named 'A'"),
        (
            (region("W_A", parameter="p"), region("W_B", parameter="p")),
            (),
            "'W_A' and 'W_B' are both of kind 'W'",
        ),
        (ABC, (BucketSpec("S", "A", "X"),), "no region 'X'"),
        (ABC, (BucketSpec("S", "B", "A"),), "'B' lies behind 'A'"),
        (ABC, (BucketSpec("S", "A", "C"),), "'A' is float32 and 'C' is float16"),
        (ABC, (BucketSpec("S", "A", "B"), BucketSpec("T", "B", "B")), "'T' overlaps bucket 'S'"),
        (ABC, (BucketSpec("S", "A", "A"), BucketSpec("S", "B", "B")), "this stage name"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(regions, buckets, words):
    with pytest.raises(PlanError) as caught:
        RegionTable("mine", regions, buckets)
    assert words in str(caught.value)
    assert "'mine'" in str(caught.value)


def test_a_region_without_a_name_is_refused():
    with pytest.raises(PlanError, match="needs a name"):
        region("")


@pytest.mark.parametrize("dtype", ["float32", None, np.float32, np.dtype("float32")], ids=str)
def test_a_dtype_that_is_no_dtype_is_refused_where_the_region_is_made(dtype):
    with pytest.raises(PlanError) as caught:
        Region("G_X", dtype, "m")
    assert f"'G_X': dtype {dtype!r} is no DType" in str(caught.value)
    assert "trlow.F32" in str(caught.value)


@given(tables())
def test_tables_are_values(table):
    again = RegionTable(table.name, table.regions, table.buckets)
    assert table == again
    assert hash(table) == hash(again)
    assert [table.index(r.name) for r in table] == list(range(len(table)))
