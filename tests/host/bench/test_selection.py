"""Per-call selection against a real NCCL of 2.31 or later: as far as it checks without a GPU.

Its wheel is too large for every test run: TRLOW_TEST_NCCL_LIBRARIES names files, separated by
colons. NCCL reads a call's configuration before it looks at the communicator, so a configuration
that it accepts fails at the null communicator, and one that it refuses fails before.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trlow.bench.variant import ALGORITHMS, PROTOCOLS, SELECTION_SINCE, SIMPLE_ONLY, Variant

ASK = """
import ctypes, json, sys
from trlow.binding import nccl
library = nccl.load(sys.argv[1])
def call(config, name="ncclAllReduceConfig", more=(0,)):
    try:
        getattr(library, name)(None, None, 8, 7, *more, None, None, ctypes.byref(config))
    except Exception as error:
        return str(error)
found = {"version": library.version}
if library.version >= 23100:
    found["accepted"] = [
        call(nccl.coll_config(library, algSelection=text)) for text in sys.argv[2:]
    ]
    found["plain"] = call(nccl.coll_config(library), "ncclAllGatherConfig", ())
    bad = nccl.coll_config(library)
    bad.magic = 1
    found["magic"] = call(bad)
    found["force"] = call(nccl.coll_config(library, forceAlgSelection=7))
print(json.dumps(found))
"""


def libraries() -> list[str]:
    """Files that were named, and the installed wheel's."""
    named = list(filter(None, os.environ.get("TRLOW_TEST_NCCL_LIBRARIES", "").split(":")))
    for wheel in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        named += [str(file.locate()) for file in files if file.name == "libnccl.so.2"]
    return named


def selections() -> list[str]:
    pairs = [
        Variant(algo=algo, proto=proto)
        for algo in ALGORITHMS
        for proto in (PROTOCOLS if algo not in SIMPLE_ONLY else ("Simple", None))
    ]
    return [text for pair in pairs if (text := pair.selection(SELECTION_SINCE)) is not None]


@pytest.fixture(scope="module")
def asked() -> tuple[str, dict]:
    for path in libraries():
        command = [sys.executable, "-c", ASK, path, *selections()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        if found["version"] >= SELECTION_SINCE:
            return path, found
    pytest.skip("no NCCL >= 2.31: name its libnccl.so.2 in TRLOW_TEST_NCCL_LIBRARIES")


def test_nccl_takes_the_configurations_of_every_pair(asked):
    _, found = asked
    assert len(found["accepted"]) == len(selections())
    for said in (*found["accepted"], found["plain"]):
        assert "comm argument is NULL" in said


def test_nccl_refuses_what_is_no_configuration(asked):
    _, found = asked
    assert "magic mismatch" in found["magic"]
    assert "forceAlgSelection=7 is invalid" in found["force"]


def test_nccl_has_a_name_that_begins_with_each_selection_and_with_none_other(asked):
    path, _ = asked
    text = Path(path).read_bytes()
    names = [
        f"{algo}_{proto.upper()}"
        for algo in ALGORITHMS.values()
        for proto in PROTOCOLS
        # a linker lets TREE_SIMPLE be the end of NVLSTREE_SIMPLE
        if f"{algo}_{proto.upper()}\0".encode() in text
    ]
    assert {"RING_LL", "RING_LL128", "TREE_SIMPLE"} <= set(names)
    for selection in selections():
        matched = [name for name in names if name.startswith(selection)]
        assert matched == ([selection] if not selection.endswith("_") else [f"{selection}SIMPLE"])
