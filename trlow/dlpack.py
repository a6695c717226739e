"""Memory of an arena for other array libraries, without a copy and without importing them.

A ``DeviceArray`` speaks DLPack (numpy, torch, cupy and jax have ``from_dlpack``) and the array
interface of its platform. Whoever takes a capsule keeps a small description alive, never the
memory: that is the arena's, and goes when its runtime is closed.

numpy makes the capsule, of an array that is never read, and device and element type are put right
in it afterwards. A capsule may be destroyed while an exception is on its way, which no function of
Python survives, so its destructor has to be C: one made by ctypes would lose the exception.
"""

from __future__ import annotations

import math
from ctypes import (
    PYFUNCTYPE,
    Structure,
    c_char_p,
    c_int32,
    c_uint8,
    c_uint16,
    c_void_p,
    py_object,
    pythonapi,
)
from typing import TYPE_CHECKING, Any

import numpy as np

from trlow.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from trlow.dtype import DType

# dlpack.h
CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA of DLDeviceType
BEHIND_VERSION = 32  # bytes before dl_tensor: version, manager_ctx, deleter, flags
CODES = {  # DLDataTypeCode of the types that numpy does not have; float8 since DLPack 1.1
    "bfloat16": 4,
    "float8_e4m3": 10,  # kDLFloat8_e4m3fn, as CUDA's __nv_fp8_e4m3 is
    "float8_e5m2": 12,
}
# What may be a stream of CUDA: nothing known, no order wanted, the legacy and the per-thread one.
# 0 is none of them by the protocol, which cannot tell which of the last two it would mean.
FIRST_STREAM = -1

_pointer_of = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", pythonapi))


class _Tensor(Structure):
    """The beginning of DLTensor; ndim, shape, strides and byte_offset follow."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
    )


class _Described:
    """What numpy takes for memory. It owns nothing, and nothing reads the array made of it."""

    def __init__(self, interface: dict[str, object]) -> None:
        self.__array_interface__ = interface


class DeviceArray:
    """Elements of an arena, as they lie there, for whoever reads one of these protocols.

    DLPack: ``__dlpack__`` and ``__dlpack_device__``, with bfloat16 and float8 under their own names
    (numpy refuses them). Array interface: CUDA memory has ``__cuda_array_interface__`` (version 3),
    the host device's ``__array_interface__``, bfloat16 as uint16 and float8 as uint8.

    Nothing here owns the memory, nor does what other libraries make of it: all of it is invalid
    once the runtime is closed, and is not to be used while a step runs.
    """

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        dtype: DType,
        device: tuple[int, int],
        check: Callable[[], object],
    ) -> None:
        """``strides`` in elements, None for row-major ones; ``device`` as DLPack numbers it.

        ``check()`` raises where nothing may be handed out.
        """
        self.shape = shape
        self.dtype = dtype
        self._device = device
        self._check = check
        self._interface: dict[str, object] = {
            "shape": shape,
            "typestr": dtype.numpy.str,
            "data": (address, False),
            "strides": strides and tuple(stride * dtype.itemsize for stride in strides),
            "version": 3,
        }
        if device[0] == CPU:
            self.__array_interface__ = self._interface
        else:
            self.__cuda_array_interface__ = self._interface | {"stream": None}

    def __dlpack_device__(self) -> tuple[int, int]:
        """(2, device ordinal) on CUDA, (1, 0) on the host device."""
        return self._device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the memory itself.

        It is given while the runtime does nothing, and every call of a runtime waits for what it
        has begun: so whatever was written is there for any ``stream``, and nothing is enqueued on
        it. On a rank's own thread, in a callback, order is the callback's.

        Raises ``UsageError`` for a closed runtime, from inside another call, while a stepper has
        the runtime, and for a stream that is none; ``BufferError`` for another device or a copy.
        """
        self._check_stream(stream)
        if copy:
            raise BufferError("copy=True: this is the memory itself; copy what is made of it")
        if dl_device is not None and tuple(dl_device) != self._device:
            raise BufferError(
                f"the memory is on DLPack device {self._device}, asked for {tuple(dl_device)}; "
                "copy what is made of it, or use copy_out()"
            )
        self._check()
        versioned = max_version is not None and max_version >= (1, 0) and _NUMPY_HAS_VERSIONS
        array = np.asarray(_Described(self._interface))
        capsule = array.__dlpack__(max_version=(1, 0)) if versioned else array.__dlpack__()
        self._put_right(capsule, versioned=versioned)
        return capsule

    def _check_stream(self, stream: int | None) -> None:
        if stream is None:
            return
        if self._device[0] == CPU:
            raise UsageError(f"stream={stream!r}: host memory has no streams; pass None")
        if type(stream) is not int or stream < FIRST_STREAM or stream == 0:
            raise UsageError(
                f"stream={stream!r}: CUDA's streams are None, -1 (no order wanted), 1 (legacy), 2 "
                "(per-thread default) or a handle"
            )

    def _put_right(self, capsule: object, *, versioned: bool) -> None:
        name = b"dltensor_versioned" if versioned else b"dltensor"
        address = _pointer_of(capsule, name) + (BEHIND_VERSION if versioned else 0)
        tensor = _Tensor.from_address(address)
        tensor.device_type, tensor.device_id = self._device
        if self.dtype.name in CODES:
            tensor.code = CODES[self.dtype.name]


def check_layout(
    what: object, count: int, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> None:
    """Refuse a shape that needs more than ``count`` elements, and strides that are not dense.

    Dense: some order of the dimensions is row-major, so that no two elements are at one place and
    none lies between others. Raises ``UsageError``.
    """
    if any(extent < 0 for extent in shape) or math.prod(shape) > count:
        raise UsageError(f"{what} has {count} elements, too few for the shape {shape}")
    if strides is None or not math.prod(shape):
        return
    if len(strides) != len(shape):
        raise UsageError(f"{what}: {len(strides)} strides for the {len(shape)} extents of {shape}")
    dense = 1
    for stride, extent in sorted(zip(strides, shape, strict=True)):
        if extent == 1:
            continue  # its stride is never used
        if stride != dense:
            raise UsageError(
                f"{what}: strides {strides} of shape {shape} are not dense: in elements, they must "
                "be those of a contiguous tensor whose dimensions were reordered"
            )
        dense *= extent


def _numpy_has_versions() -> bool:
    """Whether numpy knows versioned capsules: since 2.1. Others make what they read read-only."""
    try:
        np.empty(0).__dlpack__(max_version=(1, 0))
    except TypeError:
        return False
    return True


_NUMPY_HAS_VERSIONS = _numpy_has_versions()
