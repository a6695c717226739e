"""The real libraries of the wheels load and answer on a machine without a GPU."""

from __future__ import annotations

import ctypes
from ctypes import byref

import pytest

from trlow.binding import clib, cudart, nccl
from trlow.errors import CudaError, LibraryError, NcclError


@pytest.fixture
def no_gpu(real_cudart):
    if real_cudart.cudaGetDeviceCount(byref(ctypes.c_int())) == 0:
        pytest.skip("this machine has a GPU; what is tested is the answer without one")


def test_versions_and_paths(real_cudart, real_nccl):
    assert real_cudart.version >= 12000
    assert (
        real_cudart.version_text
        == f"{real_cudart.version // 1000}.{real_cudart.version % 1000 // 10}"
    )
    assert real_nccl.version >= 21400
    assert real_nccl.how == real_cudart.how == "pathfinder"
    for library, short in ((real_cudart, "cudart"), (real_nccl, "nccl")):
        assert library.path in clib.copies(short)
        assert library.path in repr(library)
        assert library.version_text in repr(library)


@pytest.mark.parametrize("name", ["real_cudart", "real_nccl"])
def test_exactly_the_functions_of_its_version_are_exported(request, name):
    library = request.getfixturevalue(name)
    for function, prototype in library.interface.prototypes.items():
        exported = hasattr(ctypes.CDLL(library.path), function)
        assert exported == (prototype.since <= library.version), function
        assert library.has(function) == exported


def test_unique_ids_are_128_bytes_and_differ(real_nccl):
    first, second = nccl.UniqueId(), nccl.UniqueId()
    real_nccl.ncclGetUniqueId(byref(first))
    real_nccl.ncclGetUniqueId(byref(second))
    assert len(bytes(first)) == 128
    assert bytes(first) != bytes(second)


def test_error_strings(real_cudart, real_nccl):
    assert real_cudart.cudaGetErrorString(2) == b"out of memory"
    assert real_nccl.ncclGetErrorString(5).startswith(b"invalid usage")
    assert real_nccl.ncclGetErrorString(4711) == b"unknown result code"


def test_without_a_gpu_the_device_count_is_an_answer_and_not_an_error(real_cudart, no_gpu):
    code = real_cudart.cudaGetDeviceCount(byref(ctypes.c_int()))
    assert code in cudart.NO_DEVICE
    assert real_cudart.cudaGetLastError() == code
    assert real_cudart.cudaPeekAtLastError() in {0, code}


def test_a_failing_runtime_call_carries_name_and_text(real_cudart, no_gpu):
    with pytest.raises(CudaError, match="cudaSetDevice failed: cudaError") as caught:
        real_cudart.cudaSetDevice(0)
    assert caught.value.code in cudart.NO_DEVICE
    assert caught.value.name == cudart.cudaError(caught.value.code).name
    assert caught.value.detail == real_cudart.cudaGetErrorString(caught.value.code).decode()


def test_a_failing_nccl_call_carries_last_error_and_variables(real_nccl):
    variables = {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring", "HOME": "/nowhere"}
    library = nccl.load(real_nccl.path, variables=variables)
    with pytest.raises(NcclError) as caught:
        library.ncclCommInitRank(byref(ctypes.c_void_p()), 0, nccl.UniqueId(), 5)
    assert caught.value.function == "ncclCommInitRank"
    assert caught.value.name == nccl.ncclResult_t(caught.value.code).name
    assert "in effect: NCCL_ALGO=Ring NCCL_DEBUG=WARN" in caught.value.detail
    assert "HOME" not in str(caught.value)
    assert library.how == "settings"


def test_a_newer_function_raises_before_anything_is_called(real_nccl):
    newer = [p for p in nccl.INTERFACE.prototypes.values() if p.since > real_nccl.version]
    if not newer:
        pytest.skip(f"NCCL {real_nccl.version_text} has every function of the table")
    for prototype in newer:
        assert not real_nccl.has(prototype.name)
        with pytest.raises(
            LibraryError, match=rf"^{prototype.name} needs NCCL >= 2\.\d+\.\d+, load"
        ):
            getattr(real_nccl, prototype.name)


def test_nvrtc_compiles_a_kernel_to_cubin():
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="no cuda.bindings: cuda-python")
    try:
        code, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"NVRTC does not load: {error}")
    assert (int(code), major >= 12, minor >= 0) == (0, True, True)
    source = b'extern "C" __global__ void one(float* x) { x[threadIdx.x] = 1.0f; }'
    code, program = nvrtc.nvrtcCreateProgram(source, b"one.cu", 0, [], [])
    assert int(code) == 0
    assert int(nvrtc.nvrtcCompileProgram(program, 1, [b"-arch=sm_90"])[0]) == 0
    code, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    assert int(nvrtc.nvrtcGetCUBIN(program, cubin)[0]) == int(code) == 0
    assert cubin.startswith(b"\x7fELF")
    assert int(nvrtc.nvrtcDestroyProgram(program)[0]) == 0
