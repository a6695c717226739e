"""What holds for every kernel: it can be warmed with extents 0, and it gives the same bytes as one
thread, as blocks of fibers, and with each of the processor's instruction sets.

Lanes, strands and trees are fixed by the source, so even sums agree byte for byte on the host.
"""

from __future__ import annotations

import subprocess
from ctypes import CDLL, addressof, c_longlong, c_void_p

import kernel_tables
import numpy as np
import pytest

from trlow.kernel import declarations, source_folder

EXTENTS = {  # by name of the parameter; sums of 3 x 3 taps over 5 channels, tails everywhere
    "n": 3, "h": 6, "width": 7, "cin": 21, "ho": 3, "wo": 4, "cout": 35, "kh": 3, "kw": 3,
    "stride": 2, "pad": 1, "rows": 300, "c": 19, "hw": 9, "k": 2, "classes": 10, "by": 3,
    "index": 2, "count": 1003, "nbytes": 1003, "entries": 33, "turns": 3,
}  # fmt: skip
LARGEST = 16_384  # elements; more than any parameter needs with these extents
INSTRUCTION_SETS = ("run_baseline", "run_avx2", "run_avx512")
ELEMENT = {"f32": np.float32, "u16": np.uint16, "i32": np.int32, "u8": np.uint8, "i64": np.int64}
POSITIVE = {"var", "next_var", "prev_var", "eps", "v", "steps"}
CLOCK = {"stamp"}  # reads the clock: never the same bytes twice
KERNELS = sorted(declarations())
REPEATABLE = [name for name in KERNELS if name not in CLOCK]
RUNNERS = """
INCLUDES
namespace trlow_host {
void register_kernel(KernelMode, KernelEntry*) {}
}
void (*const table[][3])(void**, trlow_host::Geometry) = {ROWS};
extern "C" int supported(int set) {
  if (set == 0) return 1;
  if (set == 1) return __builtin_cpu_supports("avx2");
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
extern "C" void run(int kernel, int set, void** params) { table[kernel][set](params, {}); }
"""


def inputs(name):
    """Arguments of a kernel: random numbers for arrays, EXTENTS for integers."""
    rng = np.random.default_rng(11)
    arguments = []
    for c_type, parameter in declarations()[name].parameters:
        if "*" not in c_type:
            arguments.append(EXTENTS[parameter])
        elif "i32" in c_type:  # flags: not set; labels: classes
            high = 10 if parameter == "labels" else 1
            arguments.append(rng.integers(0, high, LARGEST, np.int32))
        elif parameter == "table":
            arguments.append(kernel_tables.table(name, EXTENTS["entries"]))
        elif "f64" in c_type:  # betas and decays
            arguments.append(rng.uniform(0.5, 0.9, LARGEST))
        elif "f32" in c_type:
            spread = rng.standard_normal(LARGEST).astype(np.float32)
            arguments.append(abs(spread) if parameter in POSITIVE else spread)
        else:
            dtype = ELEMENT[c_type.removeprefix("const ").rstrip("* ")]
            arguments.append(rng.integers(0, 256, LARGEST, np.uint16).astype(dtype))
    return arguments


def digest(arrays):
    return [a.tobytes() for a in arrays]


@pytest.mark.parametrize("name", REPEATABLE)
def test_one_thread_and_blocks_of_fibers_give_the_same_bytes(run_each, name):
    before = digest(a for a in inputs(name) if isinstance(a, np.ndarray))
    outcomes = {str(mode): digest(arrays) for mode, arrays in run_each(name, lambda: inputs(name))}
    serial = outcomes.pop("serial")
    assert serial != before or name.startswith("nan_check")
    for mode, outcome in outcomes.items():
        assert outcome == serial, mode


@pytest.mark.parametrize("name", KERNELS)
def test_with_extents_zero_a_kernel_touches_no_memory(run, name):
    # Every pointer is to nothing, so a read or a write would end the process.
    run(name, *(0 for _ in declarations()[name].parameters))


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    """All kernels with all their runners, compiled apart from the host device."""
    folder = tmp_path_factory.mktemp("runners")
    sources = sorted({d.source for d in declarations().values()})
    includes = "\n".join(f'#include "{source}"' for source in sources)
    rows = ",\n".join(
        "{" + ", ".join(f"Runner<&{name}>::{each}" for each in INSTRUCTION_SETS) + "}"
        for name in KERNELS
    )
    text = RUNNERS.replace("INCLUDES", includes).replace("ROWS", rows)
    (folder / "runners.cpp").write_text(text)
    kernels = source_folder()
    subprocess.run(
        ["g++", "-std=c++17", "-O3", "-ffp-contract=off", "-fopenmp-simd", "-DTRLOW_HOST_SERIAL",
         "-fPIC", "-shared", f"-I{kernels}", f"-I{kernels.parent / 'host'}",
         str(folder / "runners.cpp"), "-o", str(folder / "runners.so")],
        check=True, timeout=100,
    )  # fmt: skip
    return CDLL(str(folder / "runners.so"))


@pytest.mark.skipif(
    not (source_folder().parent / "host").is_dir(), reason="needs the checkout's native/host"
)
@pytest.mark.parametrize("name", REPEATABLE)
def test_every_instruction_set_gives_the_same_bytes(runners, name):
    outcomes = []
    for index in range(len(INSTRUCTION_SETS)):
        if not runners.supported(index):
            continue
        arguments = inputs(name)
        cells = [c_longlong(a.ctypes.data if isinstance(a, np.ndarray) else a) for a in arguments]
        pointers = (c_void_p * len(cells))(*map(addressof, cells))
        runners.run(KERNELS.index(name), index, pointers)
        outcomes.append(digest(a for a in arguments if isinstance(a, np.ndarray)))
    assert all(outcome == outcomes[0] for outcome in outcomes)
