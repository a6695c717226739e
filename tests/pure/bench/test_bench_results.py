"""What comes out of `trlow bench`: NCCL's log, figures, comparison, winners, files."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trlow.bench import compare, plot, table, tuning_log
from trlow.bench.facts import read_links
from trlow.bench.figures import ratio, spread
from trlow.bench.result import Result, Row, read
from trlow.bench.tuning_log import Actual
from trlow.bench.winners import crossovers, winners
from trlow.errors import SettingsError

# Lines in the words of NCCL's own sources: 2.28 (enqueue.cc, symmetric_sched.cc), 2.32, 2.22.
LOG = """\
host:1:2 [0] NCCL INFO AllReduce: 8 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
host:1:2 [0] NCCL INFO AllReduce: 1048576 Bytes -> Algo TREE proto LL128 channel{Lo..Hi}={0..15}
host:1:2 [0] NCCL INFO AllGather: 64 Bytes -> Algo COLLNET_DIRECT proto SIMPLE \
channel{Lo..Hi}={2..3}
host:1:2 [0] NCCL INFO AllReduce: 64 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..1} \
cgaClusterSize 4
host:1:2 [0] NCCL INFO AllReduce [Symmetric]: 512 Bytes -> Kernel AllReduce_RSxLD_AGxST \
nchannels 8 nthreads 512 nWorks 1
host:1:2 [0] NCCL INFO AllGather [Copy Engine]: 96 Bytes -> cudaMemcpyBatchAsync
host:1:2 [0] NCCL INFO 4096 Bytes -> Algo 1 proto 2 time 12.5
host:1:2 [0] NCCL INFO something else: 77 Bytes
"""


def test_the_tuning_log_of_several_versions_is_read():
    assert tuning_log.read(LOG, "AllReduce") == {
        8: Actual("Ring", "LL", 1),
        1048576: Actual("Tree", "LL128", 16),
        64: Actual("NVLSTree", "Simple", 2),
        512: Actual("Symmetric", "AllReduce_RSxLD_AGxST", 8),
        4096: Actual("Ring", "Simple", None),
    }
    assert tuning_log.read(LOG, "AllGather") == {
        64: Actual("CollNetDirect", "Simple", 2),
        96: Actual("CopyEngine", "", None),
        4096: Actual("Ring", "Simple", None),
    }
    assert str(Actual("Ring", "LL", 4)) == "Ring/LL x4"


def test_what_was_forced_and_what_was_taken_agree_or_not():
    taken = Actual("Ring", "LL", 4)
    assert taken.agrees(None, None)
    assert taken.agrees("Ring", None)
    assert taken.agrees("Ring", "LL")
    assert not taken.agrees("Tree", "LL")
    assert not taken.agrees("Ring", "LL128")


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=50))
def test_figures_are_ordered(samples):
    found = spread(samples)
    assert found.least_us <= found.p5_us <= found.median_us <= found.p95_us <= found.p99_us
    assert found.least_us == min(samples)
    assert found.median_us == pytest.approx(float(np.median(samples)))
    assert found.cv == pytest.approx(float(np.std(samples) / np.mean(samples)))


def test_a_ratio_knows_noise_from_a_difference():
    rng = np.random.default_rng(1)
    base = [100 * float(np.exp(0.01 * x)) for x in rng.standard_normal(8)]
    same = [100 * float(np.exp(0.01 * x)) for x in rng.standard_normal(8)]
    slower = [1.2 * x for x in same]
    assert ratio(base, same).beyond_noise is False
    found = ratio(base, slower)
    assert found.beyond_noise is True
    assert found.low < 1.2 < found.high or found.value == pytest.approx(1.2, rel=0.02)
    assert ratio(slower, base).value == pytest.approx(1 / found.value)
    assert ratio([100.0], slower).beyond_noise is None
    assert ratio([5.0, 5.0], [5.0, 5.0]).beyond_noise is False


@given(st.integers(0, 2**32 - 1))
def test_an_interval_of_equal_machines_holds_one_nearly_always(seed):
    rng = np.random.default_rng(seed)
    hits = sum(
        ratio(*np.exp(0.02 * rng.standard_normal((2, 4)))).beyond_noise is False for _ in range(60)
    )
    assert hits >= 48  # 57 expected; fewer than 48 has a probability below 1e-4


def row(size: int, times, variant: str = "default", **more) -> Row:
    made = Row(variant, None, None, size, size // 4, "in-place", 2, 1.0)
    made.rounds_us, made.unit_us = list(times), list(times)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def result(*rows: Row) -> Result:
    request = {"collective": "all_reduce", "dtype": "float32", "op": "sum"}
    return Result(header={"ranks": 2}, request=request, rows=list(rows), complete=True)


def test_the_fastest_of_each_size_and_where_it_changes():
    rows = [
        row(8, [1.0], "LL"), row(8, [2.0], "Simple"),
        row(1024, [3.0], "LL"), row(1024, [3.5], "Simple"),
        row(4096, [9.0], "LL"), row(4096, [4.0], "Simple"),
        row(8192, [1.0], "LL", wrong=3), row(8192, [5.0], "Simple"),
    ]  # fmt: skip
    best = winners(rows, "in-place")
    assert [one.variant for one in best.values()] == ["LL", "LL", "Simple", "Simple"]
    assert [str(one) for one in crossovers(best)] == ["from 4K: LL -> Simple"]
    assert winners(rows, "out-of-place") == {}


def test_a_result_survives_its_json(tmp_path):
    found = result(
        row(8, [1.0, 2.0], wrong=0, actual=Actual("Ring", "LL", 2), enqueue_us=3.0),
        row(16, [], reason="no such thing"),
    )
    path = tmp_path / "found.json"
    path.write_text(found.to_json())
    assert read(path) == found
    assert found.to_csv().count("\n") == 3


def test_bandwidths_are_derived():
    one = row(1 << 20, [100.0], factor=1.5)
    assert one.algbw == pytest.approx(10.48576)
    assert one.busbw == pytest.approx(15.72864)
    assert one.traffic_nbytes == 1.5 * (1 << 20)
    assert not one.ring_equivalent
    assert row(8, [1.0], algo="NVLS").ring_equivalent
    assert not row(8, [1.0], algo="NVLS", actual=Actual("Ring", "LL", 1)).ring_equivalent
    assert table.cells(row(8, [1.0], algo="NVLS"))[13].endswith("*")


@pytest.mark.parametrize(("suffix", "start"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_pictures_of_one_rank_of_several_variants_and_of_a_cut_run_are_drawn(
    tmp_path, suffix, start
):
    pytest.importorskip("matplotlib")
    rows = [
        row(size, [size / 100, size / 90], name, factor=factor, place=place)
        for size in (8, 64, 512)
        for name in ("LL", "Simple")
        for place in ("in-place", "out-of-place")
        for factor in (0.0,)
    ]
    rows.append(row(4096, [], "LL", reason="no such thing"))
    found = result(*rows)
    found.complete = False
    path = tmp_path / f"found{suffix}"
    plot.draw(found, path)
    first = path.read_bytes()
    assert first.startswith(start)
    plot.draw(found, path)
    assert path.read_bytes() == first  # no date, no random ids


NCCL_TESTS = {
    "version": "2.19.6",
    "results": [
        {
            "size": 1024, "count": 256, "type": "float", "redop": "sum", "root": "    -1",
            "out_of_place": {"time": 10.0, "alg_bw": 0.1, "bus_bw": 0.15, "nwrong": 0.0},
            "in_place": {"time": 9.0, "alg_bw": 0.11, "bus_bw": 0.17, "nwrong": None},
        }
    ],
}  # fmt: skip


def test_nccl_tests_own_json_is_read_and_compared(tmp_path):
    path = tmp_path / "theirs.json"
    path.write_text(json.dumps(NCCL_TESTS))
    theirs = read(path)
    assert [(one.place, one.time_us, one.wrong) for one in theirs.rows] == [
        ("out-of-place", 10.0, 0), ("in-place", 9.0, None),
    ]  # fmt: skip
    (pair,) = compare.pair(theirs, result(row(1024, [9.9, 9.9])))
    assert pair.ratio.value == pytest.approx(1.1)
    assert pair.ratio.beyond_noise is None
    assert pair.slower_by(5)
    assert not pair.slower_by(15)


def test_only_what_is_beyond_noise_counts_as_slower():
    first = result(row(8, [1.0, 1.4, 0.7]), row(16, [1.0, 1.01, 0.99]))
    second = result(row(8, [1.2, 1.7, 0.8]), row(16, [1.2, 1.21, 1.19]))
    pairs = compare.pair(first, second)
    assert [one.slower_by(5) for one in pairs] == [False, True]
    assert [cells[-1] for cells in table.compared(pairs)] == ["", "B slower"]


def test_results_that_have_nothing_in_common_are_refused():
    with pytest.raises(SettingsError, match="nothing to compare"):
        compare.pair(result(row(8, [1.0])), result(row(16, [1.0])))
    other = result(row(8, [1.0]))
    other.request["dtype"] = "float16"
    with pytest.raises(SettingsError, match="dtype: float32 and float16"):
        compare.pair(result(row(8, [1.0])), other)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"trlow_bench": 1}', '{"results": [{}]}'])
def test_a_file_that_is_no_result_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"x\.json"):
        read(path)


TOPO = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tNV18\tSYS\t0-15\t0
GPU1\tNV18\t X \tPIX\t0-15\t0
GPU2\tSYS\tPIX\t X \t16-31\t1
"""


def test_links_come_from_the_matrix():
    assert read_links(TOPO.splitlines(), [0, 1]) == {"0-1": "NV18"}
    assert read_links(TOPO.splitlines(), [2, 0, 1]) == {"2-0": "SYS", "2-1": "PIX", "0-1": "NV18"}
    assert read_links([], [0, 1]) is None
