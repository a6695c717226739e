"""Communicators of a measurement, with what a variant asks of them: CTA limits, registrations.

Groups run on the coordinator; if something raises inside one, a call with a null communicator
poisons it, so that nothing of it is launched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref, c_int, c_void_p
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trlow.bench.exact import encode, factors
from trlow.binding.nccl import UniqueId, coll_config, config
from trlow.binding.nccl_header import (
    NCCL_WIN_COLL_SYMMETRIC,
    ncclRedOp_t,
    ncclScalarResidence_t,
)
from trlow.communicator import indivisible
from trlow.errors import ForeignError, SettingsError

if TYPE_CHECKING:
    from trlow.bench.job import Job
    from trlow.bench.seat import Seat
    from trlow.device import Platform


class Links:
    """One communicator per rank, the reduction, and what was registered. Coordinator only."""

    def __init__(self, platform: Platform, job: Job, devices: Sequence[int]) -> None:
        self._nccl = platform.nccl
        self._platform = platform
        self._job = job
        self._devices = devices
        self._windows: list[tuple[int, int]] = []  # (rank, ncclWindow_t)
        self._made: list[tuple[int, int]] = []  # (rank, ncclRedOp_t)
        self.selection = job.variant.selection(self._nccl.version)
        self.config = (
            coll_config(self._nccl, algSelection=self.selection) if self.selection else None
        )
        self.handles = self._limited() if job.variant.ctas else self._plain()
        self.reductions = [0] * len(devices)

    def _plain(self) -> list[int]:
        count = len(self._devices)
        handles = (c_void_p * count)()
        with self._platform.on(self._devices[0]):
            self._nccl.ncclCommInitAll(handles, count, (c_int * count)(*self._devices))
        return [handle or 0 for handle in handles]

    def _limited(self) -> list[int]:
        least, most = self._job.variant.ctas or (1, 1)
        options = config(self._nccl, minCTAs=least, maxCTAs=most)
        identity = UniqueId()
        self._nccl.ncclGetUniqueId(byref(identity))
        handles = [c_void_p() for _ in self._devices]
        with self._platform.on(self._devices[0]), indivisible(self._nccl):
            for rank, device in enumerate(self._devices):
                self._platform.cudart.cudaSetDevice(device)
                self._nccl.ncclCommInitRankConfig(
                    byref(handles[rank]), len(handles), identity, rank, byref(options)
                )
        return [handle.value or 0 for handle in handles]

    def prepare(self, seats: Sequence[Seat]) -> None:
        """Reductions, registrations and windows, before any call."""
        for seat in seats:
            with self._platform.on(seat.device):
                self.reductions[seat.rank] = self._reduction(seat)
        kind = self._job.variant.buffers
        for name in self._job.buffers if kind != "plain" else ():
            if kind == "window":
                self._register_window(seats, name)
                continue
            for seat in seats:
                handle = c_void_p()
                whole = (seat.bases[name], self._job.buffer_nbytes)
                with self._platform.on(seat.device):
                    self._nccl.ncclCommRegister(self.handles[seat.rank], *whole, byref(handle))
                seat.registrations.append(handle.value or 0)

    def _register_window(self, seats: Sequence[Seat], name: str) -> None:
        windows = [c_void_p() for _ in seats]
        with indivisible(self._nccl):
            for seat, window in zip(seats, windows, strict=True):
                self._nccl.ncclCommWindowRegister(
                    self.handles[seat.rank],
                    seat.bases[name],
                    self._job.buffer_nbytes,
                    byref(window),
                    NCCL_WIN_COLL_SYMMETRIC,
                )
        made = [(rank, window.value) for rank, window in enumerate(windows) if window.value]
        self._windows += made
        if len(made) < len(windows):
            raise SettingsError(
                "--buffers window: NCCL registered no window and gave no error, as it does where "
                "memory cannot be symmetric: GPUs without peer access, NCCL_CUMEM_ENABLE=0 or "
                "NCCL_WIN_ENABLE=0"
            )

    def _reduction(self, seat: Seat) -> int:
        """The ncclRedOp_t of one rank; a premultiplied sum is made for it."""
        op = self._job.nccl_op
        if op != "mulsum":
            return int(ncclRedOp_t[f"nccl{op.capitalize()}"])
        made = c_int()
        create = partial(self._nccl.ncclRedOpCreatePreMulSum, byref(made))
        code, handle = self._job.element.nccl_code, self.handles[seat.rank]
        if self._job.variant.mean:
            share = np.array([1.0 / len(self.handles)])
            seat.upload(seat.factor, _narrowed(share, self._job.dtype))
            create(seat.factor, code, ncclScalarResidence_t.ncclScalarDevice, handle)
        else:
            factor = factors(op, len(self.handles))[seat.rank]
            scalar = encode(np.array([factor]), self._job.element)
            immediate = ncclScalarResidence_t.ncclScalarHostImmediate
            create(scalar.ctypes.data, code, immediate, handle)
        self._made.append((seat.rank, made.value))
        return made.value

    def abort(self) -> None:
        """Abort every rank on helper threads, so that what spins comes back. No wait."""
        handles, self.handles = self.handles, []
        for handle in handles:
            threading.Thread(target=self._abort, args=(handle,), daemon=True).start()

    def _abort(self, handle: int) -> None:
        with suppress(ForeignError):
            self._nccl.ncclCommAbort(handle)

    def close(self, seats: Sequence[Seat]) -> None:
        """Windows, registrations, reductions, communicators; graphs are gone."""
        nccl, handles = self._nccl, self.handles
        releases: list[tuple[int, Callable[..., Any]]] = [
            (rank, partial(nccl.ncclCommWindowDeregister, handles[rank], window))
            for rank, window in self._windows
        ]
        releases += [
            (seat.rank, partial(nccl.ncclCommDeregister, handles[seat.rank], token))
            for seat in seats
            for token in seat.registrations
        ]
        releases += [
            (rank, partial(nccl.ncclRedOpDestroy, made, handles[rank])) for rank, made in self._made
        ]
        releases += [(rank, partial(nccl.ncclCommDestroy, one)) for rank, one in enumerate(handles)]
        for rank, release in releases:
            with self._platform.on(self._devices[rank]):
                release()


def _narrowed(values: np.ndarray[Any, np.dtype[np.float64]], dtype: str) -> Any:
    """A power of two in a float's own bytes."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"float16": np.float16, "float64": np.float64}.get(dtype, np.float32))
