"""One device allocation per rank, and the addresses that a plan gives its bytes.

The plan says offsets, the arena adds a base. All ranks use the same plan, so a DTensor has the same
offset on each of them. Every device call of an arena runs on its rank's own thread, through the
``call`` that the runtime hands in; a caller on any other thread waits in Python.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from ctypes import byref, c_int, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trlow.binding.nccl_header import NCCL_WIN_REQUIRED_ALIGNMENT
from trlow.dlpack import CPU, CUDA, DeviceArray, check_layout
from trlow.dtensor import DTensor
from trlow.errors import ForeignError, PlanError, SettingsError, UsageError
from trlow.plan import Range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from trlow.device import Platform
    from trlow.plan import MemoryPlan
    from trlow.program import Program
    from trlow.settings import Settings

WINDOWS_SINCE, ABORTABLE_SINCE = 22700, 22907  # versions of NCCL
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3  # cudaMemcpyKind


def check_memory(platform: Platform, plan: MemoryPlan, devices: Sequence[int]) -> None:
    """Refuse a plan whose arena does not fit, before anything is allocated.

    Raises ``PlanError`` naming rank, wanted and free bytes.
    """
    for rank, device in enumerate(devices):
        free, _ = platform.memory(device)
        _check_room(plan.arena_nbytes, free, rank, device, "")


def _check_room(wanted: int, free: int, rank: int, device: int, when: str) -> None:
    if wanted > free:
        raise PlanError(
            f"the arena needs {wanted} bytes, rank {rank} (device {device}) has {free} free{when}; "
            "use a smaller batch, a smaller model or more ranks"
        )


def check_window(settings: Settings, platform: Platform, world_size: int) -> None:
    """Refuse symmetric windows where they cannot be, or could hang beyond an abort.

    Raises ``SettingsError``, or ``LibraryError`` for an NCCL that has none.
    """
    if settings.arena != "window":
        return
    if world_size == 1:
        raise SettingsError(
            "arena='window' with one rank: there is no communicator to register a window with; "
            "use arena='plain'"
        )
    platform.nccl.require("arena='window'", WINDOWS_SINCE)
    if platform.nccl.version < ABORTABLE_SINCE and not settings.allow_unabortable:
        since = platform.nccl.interface.version_text(ABORTABLE_SINCE)
        raise SettingsError(
            f"arena='window' with NCCL {platform.nccl.version_text}: below {since} its kernels on "
            "windows do not look for an abort, so when a rank does not come nothing but the end of "
            "the process helps; set allow_unabortable, take a newer NCCL, or use arena='plain'"
        )


def check_ranges(plan: MemoryPlan, program: Program) -> None:
    """Refuse a program of another plan: its addresses would lie outside of the arena.

    Raises ``PlanError`` naming the stage and the range.
    """
    for stages in program.phases:
        for stage in stages:
            for item in (*stage.reads, *stage.writes):
                _check_inside(plan, item, f"stage {stage.name} of {program.name!r}")


def _check_inside(plan: MemoryPlan, item: Range, who: str) -> None:
    if item.end > plan.arena_nbytes:
        raise PlanError(
            f"{who} uses {item.first}..{item.last} at {item.offset} to {item.end}, the arena of "
            f"this plan ends at {plan.arena_nbytes}: make the program from the runtime's own plan"
        )


class Arena:
    """The memory of one rank. ``call(function)`` runs a function on the rank's own thread."""

    def __init__(
        self,
        platform: Platform,
        plan: MemoryPlan,
        rank: int,
        stream: int,
        call: Callable[[Callable[[], Any]], Any],
        *,
        window: bool = False,
    ) -> None:
        """Allocate ``plan.arena_nbytes`` bytes and zero them. Runs on the rank's own thread.

        ``stream`` carries this arena's own copies; with ``window`` the memory is NCCL's, as a
        symmetric window needs it. Communicators have taken their memory by now, so what is free is
        asked again: ``PlanError`` for a shortage; ``CudaError`` or ``NcclError`` where memory that
        is free cannot be had.
        """
        self.plan = plan
        self.rank = rank
        self._platform = platform
        self.on_host = platform.name == "host"
        self._cudart = platform.cudart
        self._stream = stream
        self._call = call
        self._nccl = platform.nccl if window else None
        self.nbytes = _window_nbytes(plan.arena_nbytes) if window else plan.arena_nbytes
        self.base = self._allocate_arena()
        try:
            self._cudart.cudaMemsetAsync(self.base, 0, self.nbytes, stream)
            self._cudart.cudaStreamSynchronize(stream)
        except BaseException:
            self.close()
            raise

    def _allocate_arena(self) -> int:
        self.device, free = self._room()
        when = " now that the communicators have theirs"
        _check_room(self.nbytes, free, self.rank, self.device, when)
        if self._nccl is None:
            return self._allocate(self.nbytes)
        return self._asked(self._nccl.ncclMemAlloc, self.nbytes)

    def _allocate(self, nbytes: int) -> int:
        return self._asked(self._cudart.cudaMalloc, nbytes)

    def _asked(self, allocate: Callable[..., Any], nbytes: int) -> int:
        device, free = self._room()
        pointer = c_void_p()
        try:
            allocate(byref(pointer), nbytes)
        except ForeignError as error:
            said = f"{error.detail}; {nbytes} bytes were wanted, {free} free"
            whole = (error.function, error.code, error.name)
            raise type(error)(*whole, rank=self.rank, device=device, detail=said) from error
        return pointer.value or 0

    def _room(self) -> tuple[int, int]:
        """This thread's device, and how many bytes it has free."""
        device = c_int()
        self._cudart.cudaGetDevice(byref(device))
        return device.value, self._platform.memory(device.value)[0]

    def address(self, what: str | Range) -> int:
        """The device address of a DTensor, region or range. Raises ``PlanError`` if unknown."""
        return self.base + self._range(what).offset

    def _range(self, what: str | Range) -> Range:
        if not isinstance(what, Range):
            return self.plan.range(what)
        _check_inside(self.plan, what, "a copy")
        return what

    def copy_in(self, what: str | Range, array: NDArray[Any]) -> None:
        """Copy ``array`` to a DTensor (its exact shape) or to a range (``count`` elements, flat).

        The numpy type must be the plan's (bfloat16 as uint16). Raises ``UsageError`` otherwise.
        """
        span, shape = self._extent(what)
        wanted = span.dtype.numpy
        if array.dtype != wanted or array.shape != shape:
            message = (
                f"{what}: got {array.dtype} {array.shape}, the plan says {wanted} {shape}; "
                "convert or reshape the array first"
            )
            raise UsageError(message)
        source = np.ascontiguousarray(array)

        def copy() -> None:  # holds the array for as long as the job may run
            target = self.base + span.offset
            self._copy(target, source.ctypes.data, source.nbytes, HOST_TO_DEVICE)

        self._call(copy)

    def copy_out(self, what: str | Range) -> NDArray[Any]:
        """A fresh numpy copy of a DTensor (in its shape) or of a range (flat)."""
        span, shape = self._extent(what)
        array = np.empty(shape, span.dtype.numpy)

        def copy() -> None:  # holds the array for as long as the job may run
            source = self.base + span.offset
            self._copy(array.ctypes.data, source, array.nbytes, DEVICE_TO_HOST)

        self._call(copy)
        return array

    def _extent(self, what: str | Range) -> tuple[Range, tuple[int, ...]]:
        """The bytes and the numpy shape of ``what``; a DTensor with variants has its largest."""
        span = self._range(what)
        if isinstance(what, str) and what not in self.plan.table:
            shape = self.plan[what].shape
            if math.prod(shape) * span.dtype.itemsize == span.nbytes:
                return span, shape
        return span, (span.count,)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        if nbytes:
            self._cudart.cudaMemcpyAsync(target, source, nbytes, kind, self._stream)
            self._cudart.cudaStreamSynchronize(self._stream)

    def array(
        self,
        what: str | Range | DTensor,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> DeviceArray:
        """The memory itself, for DLPack and the array interfaces. No copy; see ``DeviceArray``.

        ``shape`` may be any that fits, ``strides`` (in elements) any dense ones, such as those of a
        tensor whose channels come last. Raises ``UsageError`` for others, and once closed.
        """
        name, own = (what.name, what.shape) if isinstance(what, DTensor) else (what, None)
        span, whole = self._extent(name)
        wanted = tuple(shape if shape is not None else own if own is not None else whole)
        steps = None if strides is None else tuple(strides)
        check_layout(name, span.count, wanted, steps)
        self._check_open()
        where = (CPU, 0) if self.on_host else (CUDA, self.device)
        check = partial(self._call, self._check_open)
        return DeviceArray(self.base + span.offset, wanted, steps, span.dtype, where, check)

    def _check_open(self) -> None:
        if not self.base:
            raise UsageError("the arena is closed: it has no memory to hand out")

    def view(self, what: str | Range) -> NDArray[Any]:
        """A numpy view of the memory itself; host device only, ``UsageError`` on CUDA.

        Read it only while no step runs.
        """
        if not self.on_host:
            message = "a numpy view needs host memory; on CUDA use array() or copy_out()"
            raise UsageError(message)
        return np.asarray(self.array(what))

    @contextmanager
    def saved(self, ranges: Sequence[Range]) -> Iterator[None]:
        """Put the bytes of ``ranges`` back after the body, whatever it wrote to them.

        Runs on the rank's own thread, outside of any capture.
        """
        total = sum(item.nbytes for item in ranges)
        if not total:
            yield
            return
        copy = self._allocate(total)
        try:
            self._move(ranges, copy, restore=False)
            try:
                yield
            finally:
                self._move(ranges, copy, restore=True)
        finally:
            self._cudart.cudaFree(copy)

    def _move(self, ranges: Sequence[Range], copy: int, *, restore: bool) -> None:
        for item in ranges:
            ours = self.base + item.offset
            target, source = (ours, copy) if restore else (copy, ours)
            self._copy(target, source, item.nbytes, DEVICE_TO_DEVICE)
            copy += item.nbytes

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self.base:
            base, self.base = self.base, 0
            if self._nccl is None:
                self._cudart.cudaFree(base)
            else:
                self._nccl.ncclMemFree(base)


def _window_nbytes(nbytes: int) -> int:
    """Rounded up to what a window's size has to be a multiple of."""
    step = NCCL_WIN_REQUIRED_ALIGNMENT
    return max(-(-nbytes // step), 1) * step
