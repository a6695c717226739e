"""loopback_only against the real libnccl: an id alone makes it listen, also without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trlow import loopback, nccl_variables
from trlow.errors import SettingsError
from trlow.settings import Settings

SET = {"NCCL_SOCKET_IFNAME": "=lo", "NCCL_RAS_ENABLE": "0", "NCCL_OOB_NET_ENABLE": "0"}
TESTS = Path(__file__).parent.parent

# The driver is what this machine may lack; NCCL makes an id without it.
PRELUDE = f"""
import os, sys
from ctypes import byref
sys.path.insert(0, {str(TESTS)!r})
from listening import listening, others
from trlow import device
from trlow.binding.nccl import UniqueId
from trlow.errors import SettingsError
from trlow.settings import Settings

device.driver_binding.load = lambda path: None

def use(**fields):
    platform = device.Platform("cuda", Settings(device="cuda", **fields))
    platform.nccl.ncclGetUniqueId(byref(UniqueId()))
    return platform

def show():
    print(*listening())
    print(*(f"{{key}}={{value}}" for key, value in sorted(os.environ.items()) if "NCCL_" in key))
"""


def run(code, **variables):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("NCCL_")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, **variables},
    )


def seen(done):
    assert (done.returncode, done.stderr) == (0, "")
    addresses, variables = done.stdout.splitlines()
    return set(addresses.split()), dict(pair.split("=", 1) for pair in variables.split())


@pytest.fixture(autouse=True)
def _needs_the_library(real_nccl, real_cudart):
    pass


def test_with_it_only_loopback_listens():
    addresses, variables = seen(run("use(loopback_only=True); show()"))
    assert addresses == {"127.0.0.1"}
    assert variables == SET


def test_without_it_something_else_listens_and_nothing_is_set():
    if not run("print(*others())").stdout.strip():
        pytest.skip("loopback is the only interface here")
    addresses, variables = seen(run("use(); show()"))
    assert addresses
    assert "127.0.0.1" not in addresses
    assert variables == {}


def test_what_the_user_has_set_so_already_is_kept():
    have = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}
    addresses, variables = seen(run("use(loopback_only=True); show()", **have))
    assert addresses == {"127.0.0.1"}
    assert variables == {**SET, **have}


def test_it_can_be_asked_for_again():
    addresses, _ = seen(run("use(loopback_only=True); use(loopback_only=True); use(); show()"))
    assert addresses == {"127.0.0.1"}


LATE = """
use()
try:
    use(loopback_only=True)
except SettingsError as error:
    print(error)
"""


def test_after_nccls_first_use_it_is_too_late():
    done = run(LATE)
    assert (done.returncode, done.stderr) == (0, "")
    assert "comes too late" in done.stdout
    assert "NCCL_SOCKET_IFNAME, NCCL_RAS_ENABLE" in done.stdout


def test_it_is_not_too_late_where_the_user_had_set_everything():
    assert run(LATE, **SET).stdout == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("NCCL_SOCKET_IFNAME", "^lo"),
        ("NCCL_RAS_ENABLE", "1"),
        ("NCCL_OOB_NET_ENABLE", "1"),
        ("NCCL_COMM_ID", "192.0.2.7:4711"),
    ],
)
def test_what_the_user_has_set_otherwise_is_an_error_that_names_it(monkeypatch, name, value):
    for variable in (*SET, "NCCL_COMM_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(nccl_variables, "_at_first_use", None)
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        loopback.missing()
    for words in (f"{name}={value!r}", "unset it", "loopback_only=False", "TRLOW_LOOPBACK_ONLY=0"):
        assert words in str(caught.value)
    assert not (set(SET) - {name}) & set(os.environ)  # nothing is set where one cannot be


def test_the_library_does_not_ask_for_it():
    assert Settings().loopback_only is False


def test_graph_mixing_is_left_out_where_it_can_be():
    _, variables = seen(run("use(graph_mixing=False); use(graph_mixing=False); use(); show()"))
    assert variables == {"NCCL_GRAPH_MIXING_SUPPORT": "0"}


@pytest.mark.parametrize("have", [{}, {"NCCL_GRAPH_MIXING_SUPPORT": "1"}])
def test_graph_mixing_too_late_or_set_otherwise_is_an_error(have):
    done = run(LATE.replace("loopback_only=True", "graph_mixing=False"), **have)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("NCCL_GRAPH_MIXING_SUPPORT", "graph_mixing=True (TRLOW_GRAPH_MIXING=1)"):
        assert words in done.stdout
    assert ("comes too late" in done.stdout) == (not have)


def test_where_one_cannot_be_set_the_other_is_not():
    code = """
    try:
        use(loopback_only=True, graph_mixing=False)
    except SettingsError as error:
        print("refused")
    show()
    """
    done = run(code, NCCL_GRAPH_MIXING_SUPPORT="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["refused", "NCCL_GRAPH_MIXING_SUPPORT=1"]


def test_an_empty_variable_counts_as_unset():
    _, variables = seen(run("use(graph_mixing=False); show()", NCCL_GRAPH_MIXING_SUPPORT=""))
    assert variables == {"NCCL_GRAPH_MIXING_SUPPORT": "0"}


def test_the_library_leaves_graph_mixing_as_it_is():
    assert Settings().graph_mixing is True
