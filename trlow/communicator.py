"""The communicators of all ranks: made together, used in indivisible groups, aborted together.

NCCL launches whatever a group holds when it ends, even if the caller failed half-way. So every
argument of a group is prepared before ``ncclGroupStart``, and if something raises inside all the
same, a call with a null communicator poisons the group and nothing is launched.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import contextmanager, suppress
from ctypes import byref, c_int, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trlow.binding.nccl_header import (
    NCCL_WIN_COLL_SYMMETRIC,
    ncclDataType_t,
    ncclRedOp_t,
    ncclResult_t,
    ncclScalarResidence_t,
)
from trlow.errors import ForeignError, SettingsError, TrlowError, UsageError
from trlow.ranks import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from trlow.binding.clib import Library
    from trlow.device import Platform
    from trlow.ranks import Job

# "premulsum" is made per communicator, see _premulsum
REDUCE_OPS = {
    name: int(ncclRedOp_t[f"nccl{name.title()}"]) for name in ("sum", "prod", "max", "min", "avg")
}
QUIET = (ncclResult_t.ncclSuccess, ncclResult_t.ncclInProgress)


@contextmanager
def indivisible(nccl: Library) -> Iterator[None]:
    """One group of whatever the body issues; nothing of it happens if the body raises."""
    nccl.ncclGroupStart()
    try:
        yield
    except BaseException:
        # A call without a communicator has NCCL launch nothing of the group. Each refusal is what
        # was wanted; the error that matters is being raised.
        with suppress(ForeignError):
            nccl.ncclAllReduce(None, None, 0, ncclDataType_t.ncclFloat32, 0, None, None)
        with suppress(ForeignError):
            nccl.ncclGroupEnd()
        raise
    nccl.ncclGroupEnd()


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one rank with every argument as C takes it."""

    rank: int
    kind: str  # "all_reduce" or "broadcast"
    address: int  # in place
    count: int
    dtype_code: int
    op: str
    root: int
    stream: int
    factor: int | None = None  # address of premulsum's factor


class Communicators:
    """One communicator per rank of one process. Groups are issued by the coordinator only."""

    def __init__(
        self, platform: Platform, devices: Sequence[int], given: Sequence[int] | None = None
    ) -> None:
        """``ncclCommInitAll`` over ``devices``, or those that are ``given``. On the coordinator.

        Those that are given are checked, and never destroyed; an abort is theirs, too. Raises
        ``NcclError``, ``UsageError``.
        """
        self._nccl = platform.nccl
        self._platform = platform
        self.devices = tuple(devices)
        self._given = given is not None
        self.handles = self._make() if given is None else list(given)
        self._reductions: dict[tuple[int, int, int], int] = {}  # (rank, dtype, factor's address)
        self._windows: dict[int, int] = {}  # rank -> ncclWindow_t
        self._abort_lock = threading.Lock()
        self._aborts: list[Job] = []
        # They wait from now on: where the interpreter ends, Python 3.12 starts no thread any more.
        self._aborters: list[Worker] = []
        weakref.finalize(self, _dismiss, self._aborters).atexit = False
        try:
            if self._given:
                self._check_given()
            for rank in range(len(self.handles)):
                self._aborters.append(Worker(f"trlow-abort-{rank}"))
        except BaseException:
            self.close()
            raise

    def _make(self) -> list[int]:
        devices = self.devices
        handles = (c_void_p * len(devices))()
        with self._platform.on(devices[0]):  # the call leaves another device current
            self._nccl.ncclCommInitAll(handles, len(devices), (c_int * len(devices))(*devices))
        return [handle or 0 for handle in handles]

    def _check_given(self) -> None:
        errors = self.async_errors()
        for rank, (handle, device) in enumerate(zip(self.handles, self.devices, strict=True)):
            if rank in errors:
                raise UsageError(
                    f"the communicator given for rank {rank} is broken: {errors[rank]}"
                )
            wanted = {
                "ranks (ncclCommCount)": (self._nccl.ncclCommCount, len(self.devices)),
                "as its rank (ncclCommUserRank)": (self._nccl.ncclCommUserRank, rank),
                "as its device (ncclCommCuDevice)": (self._nccl.ncclCommCuDevice, device),
            }
            for what, (ask, right) in wanted.items():
                has = c_int()
                ask(handle, byref(has))
                if has.value != right:
                    raise UsageError(
                        f"the communicator given for rank {rank} has {has.value} {what}, the "
                        f"runtime needs {right}; give one for each rank, in the order of its "
                        f"devices {self.devices}"
                    )

    def group(self, calls: Iterable[Call]) -> None:
        """Issue all calls as one group, or nothing at all. Raises ``NcclError``, ``UsageError``."""
        prepared = [self._prepare(call) for call in calls]
        with indivisible(self._nccl):
            for issue in prepared:
                issue()

    def register(self, addresses: Sequence[int], nbytes: int) -> None:
        """Make the memory at ``addresses``, one for each rank, one symmetric window. Coordinator.

        Before any capture. Raises ``NcclError``, ``SettingsError`` where NCCL makes no window.
        """
        register = self._nccl.ncclCommWindowRegister
        windows = [c_void_p() for _ in self.handles]
        try:
            with indivisible(self._nccl):
                for handle, address, window in zip(self.handles, addresses, windows, strict=True):
                    register(handle, address, nbytes, byref(window), NCCL_WIN_COLL_SYMMETRIC)
        finally:
            self._windows = {r: window.value for r, window in enumerate(windows) if window.value}
        if len(self._windows) < len(windows):
            raise SettingsError(
                "arena='window': NCCL registered no window and gave no error, as it does where "
                "memory cannot be symmetric: GPUs without peer access, NCCL_CUMEM_ENABLE=0 or "
                "NCCL_WIN_ENABLE=0; use arena='plain'"
            )

    def _prepare(self, call: Call) -> Callable[[], object]:
        handle = self.handles[call.rank]
        if call.kind == "all_reduce":
            function, last = self._nccl.ncclAllReduce, self._reduction(call, handle)
        elif call.kind == "broadcast":
            function, last = self._nccl.ncclBroadcast, call.root
        else:
            message = f"a group knows all_reduce and broadcast, not {call.kind!r}"
            raise UsageError(message)
        arguments = (
            *(call.address, call.address, call.count, call.dtype_code, last),
            *(handle, call.stream),
        )
        return lambda: function(*arguments)

    def _reduction(self, call: Call, handle: int) -> int:
        """The ncclRedOp_t of a call.

        A premulsum reads its factor from device memory, and is made the first time that its
        collective is issued: in the warm-up, so never while a stream captures.
        """
        known = REDUCE_OPS.get(call.op)
        if known is not None:
            return known
        if call.op != "premulsum" or call.factor is None:
            message = f"all_reduce knows {', '.join(REDUCE_OPS)}, premulsum, not {call.op!r}"
            raise UsageError(message)
        key = (call.rank, call.dtype_code, call.factor)
        if key not in self._reductions:
            made, residence = c_int(), ncclScalarResidence_t.ncclScalarDevice  # read as it runs
            self._nccl.ncclRedOpCreatePreMulSum(
                byref(made), call.factor, call.dtype_code, residence, handle
            )
            self._reductions[key] = made.value
        return self._reductions[key]

    @property
    def last_error(self) -> str:
        """What NCCL said last; it may speak of an earlier failure, so never decide by it."""
        text: bytes = self._nccl.ncclGetLastError(None)
        return text.decode(errors="replace").strip()

    def async_errors(self) -> dict[int, str]:
        """The asynchronous error of each rank that has one. Does not wait."""
        found = {}
        for rank, handle in enumerate(self.handles):
            code = c_int()
            try:
                self._nccl.ncclCommGetAsyncError(handle, byref(code))
            except ForeignError as error:
                found[rank] = str(error)
                continue
            if code.value not in QUIET:
                text: bytes = self._nccl.ncclGetErrorString(code.value)
                found[rank] = text.decode(errors="replace")
        return found

    @property
    def aborting(self) -> bool:
        """Whether ``start_abort`` was called; nothing else may be done with them then."""
        with self._abort_lock:
            return bool(self._aborts)

    def start_abort(self) -> None:
        """Abort every rank on threads of their own at once, so that spinning kernels exit. No wait.

        The thread that waits for a run and one that closes the runtime may both call it.
        """
        with self._abort_lock:
            if not self.handles:
                return
            self._reductions.clear()  # both go with their communicators
            self._windows.clear()
            handles, self.handles = self.handles, []
            self._aborts = [
                aborter.submit(partial(self._nccl.ncclCommAbort, handle))
                for aborter, handle in zip(self._aborters, handles, strict=True)
            ]
        _dismiss(self._aborters)

    def join_abort(self, timeout_s: float) -> TrlowError | None:
        """Wait for the aborts. They return only when every graph that captured them is destroyed.

        Returns what went wrong, or None.
        """
        deadline = time.monotonic() + timeout_s
        with self._abort_lock:
            jobs = list(self._aborts)
        for job in jobs:
            job.wait(max(0.0, deadline - time.monotonic()))
        late = [rank for rank, job in enumerate(jobs) if not job.done]
        if late:
            return TrlowError(f"ncclCommAbort of ranks {late} took longer than {timeout_s:g} s")
        errors = [job.error for job in jobs if job.error is not None]
        if not errors or isinstance(errors[0], TrlowError):
            return errors[0] if errors else None  # type: ignore[return-value]
        return TrlowError(f"ncclCommAbort: {errors[0]!r}")

    def close(self) -> None:
        """Windows, reductions, own communicators; every graph that captured them must be gone."""
        with self._abort_lock:
            handles, self.handles = self.handles, []
        _dismiss(self._aborters)
        windows, self._windows = self._windows, {}
        reductions, self._reductions = self._reductions, {}
        releases = [
            (rank, partial(self._nccl.ncclCommWindowDeregister, handles[rank], window))
            for rank, window in windows.items()
        ]
        releases += [
            (rank, partial(self._nccl.ncclRedOpDestroy, made, handles[rank]))
            for (rank, _, _), made in reductions.items()
        ]
        releases += [
            (rank, partial(self._nccl.ncclCommDestroy, handle))
            for rank, handle in enumerate(handles)
            if not self._given
        ]
        first: ForeignError | None = None
        for rank, release in releases:
            try:
                with self._platform.on(self.devices[rank]):
                    release()
            except ForeignError as error:
                first = first or error.with_rank(rank, self.devices[rank])
        if first is not None:
            raise first


def _dismiss(aborters: Sequence[Worker]) -> None:
    """Let them end, behind what they were given."""
    for aborter in aborters:
        aborter.stop(0.0)
