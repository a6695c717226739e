"""Handles that cross a border: what others lend to a runtime, and its streams for others.

A stream goes either way as an object with ``__cuda_stream__()``, which returns (0, cudaStream_t).
Whatever crosses stays with whoever made it. Memory goes out by ``trlow.dlpack``.
"""

from __future__ import annotations

import operator
from ctypes import byref, c_int, c_uint
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from trlow.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from trlow.binding.clib import Library

PROTOCOL = 0  # version of __cuda_stream__
NON_BLOCKING = 1  # cudaStreamNonBlocking: no stream ever orders itself with the legacy stream
STREAM_DEVICE_SINCE = 12080  # version of the CUDA runtime that has cudaStreamGetDevice
LEGACY, PER_THREAD = (0, 1), 2  # cudaStreamLegacy has two handles; cudaStreamPerThread


@dataclass(frozen=True, slots=True)
class StreamHandle:
    """A cudaStream_t, a callback's for instance, for libraries that take ``__cuda_stream__``.

    Owns nothing: a runtime's stream is invalid once that is closed.
    """

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """(version of the protocol, cudaStream_t)."""
        return PROTOCOL, self.handle


def handle_of(stream: object, what: str) -> int:
    """The cudaStream_t of an int or of an object with ``__cuda_stream__``.

    Raises ``UsageError``, which begins with ``what``, for anything else and for default streams.
    """
    method = getattr(stream, "__cuda_stream__", None)
    handle = stream
    if method is not None:
        answer = method() if callable(method) else method
        if not isinstance(answer, tuple) or len(answer) != 2 or answer[0] != PROTOCOL:
            raise UsageError(
                f"{what}: __cuda_stream__ gave {answer!r}; the protocol known here is ({PROTOCOL}, "
                "handle)"
            )
        handle = answer[1]
    if type(handle) is not int or handle < 0:
        raise UsageError(f"{what}: {stream!r} is neither a handle nor has it __cuda_stream__")
    if handle in LEGACY:
        raise UsageError(
            f"{what}: the legacy default stream orders itself with every blocking stream of its "
            "device and cannot be captured; make one with cudaStreamNonBlocking"
        )
    if handle == PER_THREAD:
        raise UsageError(
            f"{what}: the per-thread default stream is another one on each of the threads that "
            "work for a rank; make one with cudaStreamNonBlocking"
        )
    return handle


def check_lent(cudart: Library, key: Hashable, handle: int) -> None:
    """Refuse a lent stream that blocks, or is of another device than the current one.

    Raises ``UsageError``.
    """
    flags = c_uint()
    cudart.cudaStreamGetFlags(handle, byref(flags))
    if not flags.value & NON_BLOCKING:
        raise UsageError(
            f"the stream given as {key} orders itself with the legacy default stream, so that what "
            "others do there could break a capture; make it with cudaStreamNonBlocking"
        )
    if cudart.version < STREAM_DEVICE_SINCE:
        return  # a stream of another device fails where it is first used
    own, current = c_int(), c_int()
    cudart.cudaStreamGetDevice(handle, byref(own))
    cudart.cudaGetDevice(byref(current))
    if own.value != current.value:
        raise UsageError(
            f"the stream given as {key} is of device {own.value}, its rank's is {current.value}"
        )


@dataclass(frozen=True, slots=True)
class Lent:
    """What a runtime uses and does not own: one of each for each rank."""

    communicators: tuple[int, ...] | None = None  # ncclComm_t
    streams: Mapping[Hashable, tuple[int, ...]] = field(default_factory=dict)  # cudaStream_t

    @classmethod
    def checked(
        cls,
        communicators: Sequence[int] | None,
        streams: Mapping[Any, Sequence[object]] | None,
        ranks: int,
        known: Collection[Hashable],
    ) -> Self:
        """Handles of what was given; ``known`` are the streams of a rank. Raises ``UsageError``."""
        for what, items in (("communicators", communicators), *(streams or {}).items()):
            if items is not None and len(items) != ranks:
                raise UsageError(f"{what}: {len(items)} were given for {ranks} ranks, one for each")
        if communicators is not None and ranks == 1:
            raise UsageError("communicators: a single rank uses none, and loads no NCCL; give none")
        unknown = [key for key in streams or {} if key not in known]
        if unknown:
            raise UsageError(f"streams: {unknown} is not among {[str(key) for key in known]}")
        handles = {
            key: tuple(handle_of(item, f"{key} of rank {rank}") for rank, item in enumerate(items))
            for key, items in (streams or {}).items()
        }
        everything = [handle for each in handles.values() for handle in each]
        if len(set(everything)) < len(everything):
            raise UsageError("streams: one stream is given twice; each has a place of its own")
        return cls(None if communicators is None else _comms(communicators), handles)

    def of_rank(self, rank: int) -> dict[Hashable, int]:
        """The streams of one rank."""
        return {key: handles[rank] for key, handles in self.streams.items()}


def _comms(given: Sequence[int]) -> tuple[int, ...]:
    try:
        found = tuple(operator.index(handle) for handle in given)
    except TypeError as error:
        raise UsageError(f"communicators are ncclComm_t handles, as ints: {error}") from None
    if 0 in found or len(set(found)) < len(found):
        raise UsageError("communicators: a handle is null or given twice; each rank has its own")
    return found
