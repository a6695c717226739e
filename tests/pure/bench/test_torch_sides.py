"""Names of bench/torch_ddp.py's sides, and which of them another one is compared with."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(BENCH))
    try:
        import torch_process
        import torch_table
        import torch_variant
    finally:
        sys.path.remove(str(BENCH))
    return SimpleNamespace(process=torch_process, table=torch_table, variant=torch_variant)


def measured(scripts, times):
    """Sides by name, each with the ms of its rounds."""
    wave = {}
    for name, rounds in times.items():
        side = SimpleNamespace(
            name=name, variant=scripts.variant.variant_of(name), setup=[], failure=None, ready_s=0.0
        )
        found = wave[name] = scripts.table.Found(side)
        keys = ("step_s", "issue_s", "issue_cpu_s", "cpu_s")
        found.rounds = [[dict.fromkeys(keys, ms / 1e3)] for ms in rounds]
    return wave


@pytest.mark.parametrize("awake", ["alone_awake_compile", "alone_compile_awake"])
def test_a_side_is_compared_with_those_alone_of_its_own_compilation(scripts, awake):
    times = {"alone": [1, 1], "alone_compile": [2, 4], awake: [4, 8], "trlow_compile": [5, 10]}
    wave = measured(scripts, times)
    line = wave["trlow_compile"].line(wave)
    assert [line[key]["of"] for key in scripts.table.RATIOS] == ["alone", "alone_compile", awake]
    assert [line[key]["median"] for key in scripts.table.RATIOS] == [7.5, 2.5, 1.25]
    line = measured(scripts, {"alone_compile": [2], "trlow": [3]})
    assert line["trlow"].line(line)["ratio_same"] is None


@pytest.mark.parametrize(
    "name", ["trlow_awake", "ddp_graph_awake", "alone_awake_awake", "alone_graph", "trlow_what"]
)
def test_a_name_that_says_nothing_is_refused(scripts, name):
    with pytest.raises(ValueError, match="says nothing here"):
        scripts.variant.variant_of(name)


def test_a_side_without_links_tells_nccl_so(scripts, monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)

    def variables(name):
        common, variant = {"threads": 1, "device": "cuda"}, scripts.variant.variant_of(name)
        return scripts.process.environment(variant, common, (0, 1), 0, Path("/nowhere"))

    for name in ("trlow_nop2p", "ddp_graph_nop2p"):
        assert variables(name)["NCCL_P2P_DISABLE"] == "1"
    assert "NCCL_P2P_DISABLE" not in variables("trlow")
    with pytest.raises(ValueError, match="says nothing here"):
        scripts.variant.variant_of("alone_nop2p")


def test_links_that_are_awake_need_gpus(scripts):
    assert scripts.variant.variant_of("alone_awake").needs_cuda
    assert not scripts.variant.variant_of("alone").needs_cuda
