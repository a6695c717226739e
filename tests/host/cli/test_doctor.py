"""`trlow doctor`: what is there is found, what is missing is said; only a broken trlow fails."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path

import pytest

from trlow.binding import host
from trlow.cli import findings
from trlow.cli.selftest import mean_over_ranks
from trlow.device import Platform
from trlow.errors import CudaError, RankError
from trlow.settings import Settings


def as_json(outcome) -> dict:
    return json.loads(outcome.out)


def test_it_works_here_and_says_so(trlow):
    outcome = trlow("doctor")
    assert (outcome.code, outcome.err) == (0, "")
    assert "works" in outcome.out.splitlines()[0]
    for word in ("libraries", "devices", "host device", "trlow_host", "cudart", "nccl", "nvrtc"):
        assert word in outcome.out


def test_json_says_the_same(trlow):
    outcome = trlow("doctor", "--json")
    found = as_json(outcome)
    assert outcome.code == 0
    assert found["ok"] is True
    libraries = {library["name"]: library for library in found["libraries"]}
    assert list(libraries) == ["trlow_host", "cudart", "cuda", "nccl", "nvrtc"]
    host = libraries["trlow_host"]
    assert host["path"].endswith("libtrlow_host.so")
    assert host["error"] is None
    for library in libraries.values():
        # Found with path, version and how, or missing with a reason: never neither.
        there = [library[key] is not None for key in ("path", "version", "how")]
        assert all(there) != (library["error"] is not None)
    assert len(found["peer_access"]) == len(found["gpus"])


def test_the_wheels_are_found_with_their_versions(trlow):
    if not Path(sysconfig.get_path("purelib"), "nvidia", "nccl").is_dir():
        pytest.skip("needs the wheels of the extra trlow[cu13] in this environment")
    found = as_json(trlow("doctor", "--json"))
    libraries = {library["name"]: library for library in found["libraries"]}
    assert libraries["nccl"]["version"].startswith("2.")
    assert libraries["nccl"]["how"] == "pathfinder"
    assert libraries["nccl"]["path"].endswith("libnccl.so.2")


def test_a_missing_library_is_a_finding_and_no_failure(trlow, monkeypatch):
    monkeypatch.setenv("TRLOW_NCCL_LIBRARY", "/no/such/libnccl.so.2")
    outcome = trlow("doctor", "--json")
    assert outcome.code == 0
    found = as_json(outcome)
    (nccl,) = (library for library in found["libraries"] if library["name"] == "nccl")
    assert "/no/such/libnccl.so.2" in nccl["error"]
    reasons = {problem["what"]: problem["why"] for problem in found["cannot"]}
    assert "/no/such/libnccl.so.2" in reasons["training on more than one GPU"]
    assert found["environment"]["TRLOW_NCCL_LIBRARY"] == "/no/such/libnccl.so.2"
    assert "/no/such/libnccl.so.2" in trlow("doctor").out


def test_the_kernel_cache_is_shown_and_whether_it_can_be_used(trlow, monkeypatch, tmp_path):
    folder = str(tmp_path / "kernels")
    monkeypatch.setenv("TRLOW_KERNEL_CACHE", folder)
    assert as_json(trlow("doctor", "--json"))["kernel_cache"] == {"folder": folder, "problem": None}
    assert f"kernel cache: {folder}\n" in trlow("doctor").out
    Path(folder).chmod(0o777)
    outcome = trlow("doctor")
    assert outcome.code == 0
    assert "every start compiles" in outcome.out
    assert (
        "can be written by others" in as_json(trlow("doctor", "--json"))["kernel_cache"]["problem"]
    )
    monkeypatch.setenv("TRLOW_KERNEL_CACHE", "off")
    found = as_json(trlow("doctor", "--json"))["kernel_cache"]
    assert found == {"folder": None, "problem": "it is switched off"}


def test_a_missing_host_device_is_exit_code_1_with_the_reason(trlow, monkeypatch):
    monkeypatch.setenv("TRLOW_HOST_LIBRARY", "/no/such/host.so")
    outcome = trlow("doctor")
    assert outcome.code == 1
    assert "IS BROKEN" in outcome.out
    assert "/no/such/host.so" in outcome.out
    assert as_json(trlow("doctor", "--json"))["ok"] is False


def test_variables_in_effect_are_shown_and_others_are_not(trlow, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("TRLOW_SEED", "3")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    found = as_json(trlow("doctor", "--json"))
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert found["environment"]["TRLOW_SEED"] == "3"
    assert "SECRET_TOKEN" not in found["environment"]
    text = trlow("doctor").out
    assert "NCCL_DEBUG" in text
    assert "SECRET_TOKEN" not in text


def test_a_variable_that_nothing_reads_is_a_finding(trlow, monkeypatch):
    monkeypatch.setenv("TRLOW_SEDE", "3")
    outcome = trlow("doctor")
    assert outcome.code == 0
    assert "training with TRLOW_SEDE: no such variable" in outcome.out


def test_a_second_copy_is_reported(trlow, monkeypatch, tmp_path):
    (tmp_path / "libnccl.so.2").write_bytes(b"")
    monkeypatch.setattr(findings, "SYSTEM_FOLDERS", (str(tmp_path),))
    found = as_json(trlow("doctor", "--json"))
    (nccl,) = (library for library in found["libraries"] if library["name"] == "nccl")
    assert str(tmp_path / "libnccl.so.2") in nccl["copies"]
    assert str(tmp_path / "libnccl.so.2") in trlow("doctor").out


def test_without_scikit_learn_the_digits_are_what_cannot_work(trlow, monkeypatch):
    real = findings.importlib.util.find_spec
    monkeypatch.setattr(
        findings.importlib.util,
        "find_spec",
        lambda name: None if name == "sklearn" else real(name),
    )
    found = as_json(trlow("doctor", "--json"))
    reasons = {problem["what"]: problem["why"] for problem in found["cannot"]}
    assert "trlow[data]" in reasons["train --data digits"]


def test_without_nvrtc_kernels_cannot_be_compiled(trlow, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    outcome = trlow("doctor", "--json")
    assert outcome.code == 0
    what = [problem["what"] for problem in as_json(outcome)["cannot"]]
    assert "compiling kernels for a GPU" in what


def test_the_self_test_notices_a_wrong_mean(monkeypatch):
    settings = Settings(device="host", gpus="0-3", host_devices=4)
    mean_over_ranks(settings)
    from trlow.arena import Arena

    real = Arena.copy_out
    monkeypatch.setattr(Arena, "copy_out", lambda self, what: real(self, what) + 1)
    with pytest.raises(RankError, match=r"should be 1\.5"):
        mean_over_ranks(settings)


@pytest.fixture
def host_devices_as_gpus(monkeypatch):
    """The host device answers as CUDA does, so what is asked of GPUs can be asked of it."""
    monkeypatch.setattr(findings, "Platform", lambda _name, settings: Platform("host", settings))
    there = host.load()
    monkeypatch.setattr(findings.cudart, "load", lambda _path: there.cudart)
    monkeypatch.setattr(findings.driver, "load", lambda _path: there.driver)


def test_every_gpu_is_shown_with_its_memory_and_peers(trlow, host_devices_as_gpus):
    found = as_json(trlow("doctor", "--json"))
    assert [gpu["index"] for gpu in found["gpus"]] == [0, 1, 2, 3]
    for gpu in found["gpus"]:
        assert list(gpu) == [
            "index", "name", "compute_capability", "memory_nbytes", "free_nbytes",
        ]  # fmt: skip
        assert 0 < gpu["free_nbytes"] <= gpu["memory_nbytes"]
        assert re.fullmatch(r"\d+\.\d", gpu["compute_capability"])
        assert gpu["name"]
    assert found["peer_access"] == [[True] * 4] * 4
    text = trlow("doctor").out
    assert "peer access" in text
    assert text.count("yes") == 16


def test_what_a_machine_of_three_gpus_cannot_do(trlow, host_devices_as_gpus, monkeypatch):
    monkeypatch.setenv("TRLOW_HOST_DEVICES", "3")
    monkeypatch.setattr(findings, "_can_access", lambda *_: False)
    found = as_json(trlow("doctor", "--json"))
    what = {problem["what"] for problem in found["cannot"]}
    assert "training on all 3 GPUs without --any-world-size" in what
    assert "direct copies between some GPUs" in what
    assert "training on GPUs" not in what


def test_a_gpu_that_fails_when_asked_is_a_finding(trlow, host_devices_as_gpus, monkeypatch):
    def fail(*_arguments):
        raise CudaError("cudaMemGetInfo", 2, "cudaErrorMemoryAllocation", device=0)

    monkeypatch.setattr(findings, "_gpu", fail)
    outcome = trlow("doctor", "--json")
    assert outcome.code == 0
    reasons = {problem["what"]: problem["why"] for problem in as_json(outcome)["cannot"]}
    assert "cudaMemGetInfo failed" in reasons["asking the GPUs what they are"]
