"""The second oracle for CUDA: NVIDIA's own cuda.bindings."""

from __future__ import annotations

import re

import pytest

from trlow.binding import cudart, driver

runtime = pytest.importorskip("cuda.bindings.runtime", reason="no cuda.bindings: cuda-python")
cu = pytest.importorskip("cuda.bindings.driver", reason="no cuda.bindings: cuda-python")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (cudart.cudaError, runtime.cudaError_t),
        (cudart.cudaMemcpyKind, runtime.cudaMemcpyKind),
        (cudart.cudaStreamCaptureMode, runtime.cudaStreamCaptureMode),
        (cudart.cudaStreamCaptureStatus, runtime.cudaStreamCaptureStatus),
        (cudart.cudaGraphNodeType, runtime.cudaGraphNodeType),
        (cudart.cudaDeviceAttr, runtime.cudaDeviceAttr),
        (cudart.cudaDeviceP2PAttr, runtime.cudaDeviceP2PAttr),
        (cudart.cudaMemoryType, runtime.cudaMemoryType),
        (driver.CUresult, cu.CUresult),
        (driver.CUfunction_attribute, cu.CUfunction_attribute),
        (driver.CUdevice_attribute, cu.CUdevice_attribute),
        (driver.CUmoduleLoadingMode, cu.CUmoduleLoadingMode),
    ],
)
def test_codes_have_the_values_of_cuda_bindings(ours, theirs):
    members = {name: int(value) for name, value in theirs.__members__.items()}
    mine = {name: int(value) for name, value in ours.__members__.items()}
    mine.pop("cudaErrorApiFailureBase", None)  # deprecated: a bound of the enum, never returned
    assert mine == {name: members[name] for name in mine}


def test_error_names_of_the_loaded_runtime_are_those_of_cuda_bindings(real_cudart):
    for code in cudart.cudaError:
        if code is cudart.cudaError.cudaErrorApiFailureBase:
            continue
        name = real_cudart.cudaGetErrorName(code)
        assert name.decode() == code.name
        assert runtime.cudaGetErrorName(runtime.cudaError_t(int(code)))[1] == name


def test_every_bound_function_but_renamed_ones_exists_there():
    missing = [
        name
        for module, theirs in ((cudart, runtime), (driver, cu))
        for name in module.INTERFACE.prototypes
        if not hasattr(theirs, re.sub(r"_v[23]$", "", name))
    ]
    assert missing == []
