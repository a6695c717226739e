"""One machine's devices behind one set of bound libraries.

A ``Platform`` is either the host device or CUDA; everything above calls the same function names on
it. NCCL is loaded on first use only, so that a single rank never loads it. Every helper here that
takes a stream or an event leaves the caller's current device as it was.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_char, c_int, c_longlong, c_size_t, c_void_p
from typing import TYPE_CHECKING

from trlow import loopback, nccl_variables
from trlow.binding import cudart as cudart_binding
from trlow.binding import driver as driver_binding
from trlow.binding import host as host_binding
from trlow.binding import nccl as nccl_binding
from trlow.binding.calls import CallList
from trlow.errors import CudaError, LibraryError, SettingsError, UsageError
from trlow.interop import NON_BLOCKING, StreamHandle, check_lent
from trlow.kernel_cache import KernelCache
from trlow.settings import set_variables, variables_in_effect

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from trlow.binding.clib import Library, Prepared
    from trlow.binding.host import HostLibraries
    from trlow.settings import Settings

DISABLE_TIMING = 2  # cudaEventDisableTiming
NATIVE_ATOMICS = 3  # cudaDevP2PAttrNativeAtomicSupported
NO_DEVICE = (35, 100)  # cudaErrorInsufficientDriver, cudaErrorNoDevice: both mean "no GPU"


_owner: int | None = None  # the process that first used a platform; a fork copies this


def forked() -> bool:
    """Whether this process was forked from one that had used a platform before.

    Neither CUDA nor NCCL nor the threads of a runtime are there in such a child.
    """
    return _owner is not None and _owner != os.getpid()


def check_process() -> None:
    """Raise ``UsageError``, which names the parent, in a process that was ``forked``."""
    if forked():
        raise UsageError(
            f"process {os.getpid()} was forked from process {_owner} after that had opened its "
            "devices, which do not work in a child; fork before the first use of trlow, or start "
            "the child afresh (multiprocessing's spawn)"
        )


class Platform:
    """The bound libraries of the host device or of CUDA, and what they say of the machine."""

    def __init__(self, name: str, settings: Settings) -> None:
        """Load the runtime and the driver of ``name`` ("host" or "cuda").

        Raises ``LibraryError`` when a library is missing, ``UsageError`` in a forked child of a
        process that has done this before.
        """
        global _owner
        check_process()
        _owner = os.getpid()
        self.name = name
        self.kernel_cache = KernelCache(settings.kernel_cache_folder)
        self._settings = settings
        self.host: Library | None = None
        self._nccl: Library | None = None
        self._extensions: Library | None = None
        if name == "host":
            libraries = host_binding.load(settings.host_library)
            self.host = libraries.host
            self.cudart: Library = libraries.cudart
            self.driver: Library = libraries.driver
            self._host_nccl: Library | None = libraries.nccl
            self._configure_host(libraries)
        else:
            self.cudart = cudart_binding.load(settings.cudart_library)
            self.driver = driver_binding.load(settings.driver_library)
            self._host_nccl = None

    def _configure_host(self, libraries: HostLibraries) -> None:
        settings = self._settings
        try:
            libraries.host.trlowHostConfigure(
                settings.host_devices, settings.host_workers, settings.host_schedule_seed, 0
            )
        except CudaError as error:
            why = libraries.nccl.ncclGetLastError(None).decode()
            raise SettingsError(f"the host device cannot be set up so: {why}") from error

    @classmethod
    def open(cls, settings: Settings) -> Platform:
        """The platform that ``settings.device`` names; "auto" takes GPUs if there are any."""
        if settings.device != "auto":
            platform = cls(settings.device, settings)
            if platform.device_count() == 0:
                message = (
                    f"device={settings.device!r} but the CUDA runtime reports no GPU; "
                    "use device='host' or 'auto'"
                )
                raise SettingsError(message)
            return platform
        try:
            platform = cls("cuda", settings)
            if platform.device_count() > 0:
                return platform
        except LibraryError:
            pass  # "auto" asks whether CUDA is here; no library is the answer "no"
        return cls("host", settings)

    @property
    def nccl(self) -> Library:
        """The collectives' library, loaded on first use.

        Raises ``LibraryError``, and ``SettingsError`` where NCCL cannot be set as asked any more.
        """
        check_process()
        if self._nccl is None:
            self._nccl = self._host_nccl or self._load_nccl()
        return self._nccl

    def _load_nccl(self) -> Library:
        missing: dict[str, str] = {}  # all of it is asked for before any of it is set
        if self._settings.loopback_only:
            missing |= loopback.missing()
        if not self._settings.graph_mixing:
            wanted = {"NCCL_GRAPH_MIXING_SUPPORT": ("0",)}
            missing |= nccl_variables.missing_for("graph_mixing", "True", wanted)
        set_variables(missing)
        library = nccl_binding.load(self._settings.nccl_library, variables=variables_in_effect())
        nccl_variables.note_first_use()
        return library

    @property
    def libraries(self) -> dict[str, Library]:
        """Every library loaded so far, by the name of its interface."""
        found = {"cudart": self.cudart, "driver": self.driver}
        if self._nccl is not None:
            found["nccl"] = self._nccl
        return found

    def device_count(self) -> int:
        """Devices of this platform; 0 where there is no driver or no GPU."""
        check_process()
        count = c_int()
        code = self.cudart.cudaGetDeviceCount(byref(count))
        return 0 if code in NO_DEVICE else count.value

    def memory(self, device: int) -> tuple[int, int]:
        """(free, total) bytes of ``device``."""
        free, total = c_size_t(), c_size_t()
        with self.on(device):
            self.cudart.cudaMemGetInfo(byref(free), byref(total))
        return free.value, total.value

    def reaches(self, device: int, peer: int) -> bool:
        """Whether ``device`` can write to the memory of ``peer`` over a link such as NVLink.

        PCIe does not count: there is no atomic access to a peer over it, and where a machine gets
        copies between its GPUs wrong, or is told not to make them, it is over PCIe.
        """
        can, atomic = c_int(), c_int()
        self.cudart.cudaDeviceCanAccessPeer(byref(can), device, peer)
        self.cudart.cudaDeviceGetP2PAttribute(byref(atomic), NATIVE_ATOMICS, device, peer)
        return bool(can.value and atomic.value)

    @property
    def _loop(self) -> Library:
        """What makes lists of calls: the host device's library, on CUDA as well."""
        path, known = self._settings.host_library, self.host or self._extensions
        self._extensions = known or host_binding.load_extensions(path)
        return self._extensions

    def call_list(self, calls: Sequence[Prepared]) -> CallList:
        """``calls`` as one that makes them all in C. Raises ``LibraryError``."""
        return CallList(self._loop, calls)

    def clock(self, nanoseconds: c_longlong) -> Prepared:
        """The call, in such a list, that reads the host's monotonic clock."""
        return self._loop.prepare("trlowHostClock", byref(nanoseconds))

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Run the body with ``device`` current and give the caller's device back."""
        check_process()
        before = c_int()
        self.cudart.cudaGetDevice(byref(before))
        if before.value == device:
            yield
            return
        self.cudart.cudaSetDevice(device)
        try:
            yield
        finally:
            self.cudart.cudaSetDevice(before.value)

    @contextmanager
    def issuing(self) -> Iterator[None]:
        """Declare that the calling thread may still issue work while the body runs.

        The host device needs it to tell a rank that is missing from one that is late (design,
        section 7). CUDA has no such notion.
        """
        if self.host is None:
            yield
            return
        self.host.trlowHostIssuerEnter()
        try:
            yield
        finally:
            self.host.trlowHostIssuerLeave()


def _destroy_all(destroy: Callable[[int], object], handles: dict[Hashable, int]) -> None:
    """Empty ``handles``, calling ``destroy`` on each even when some calls raise."""
    with ExitStack() as stack:
        while handles:
            stack.callback(destroy, handles.popitem()[1])


class Streams:
    """The non-blocking streams of one rank by key. Made and closed on the rank's own thread.

    Those that are ``lent`` are used as they are, and not destroyed.
    """

    def __init__(
        self,
        platform: Platform,
        keys: Iterable[Hashable],
        lent: Mapping[Hashable, int] | None = None,
    ) -> None:
        """Raises ``UsageError`` for a lent stream that blocks, or is another device's."""
        self._platform = platform
        self._lent = dict(lent or {})
        self._handles: dict[Hashable, int] = {}  # those made here
        for key, handle in self._lent.items():
            check_lent(platform.cudart, key, handle)
        try:
            for key in keys:
                if key not in self._lent:
                    made = c_void_p()
                    platform.cudart.cudaStreamCreateWithFlags(byref(made), NON_BLOCKING)
                    self._handles[key] = made.value or 0
        except BaseException:
            self.close()
            raise

    def __getitem__(self, key: Hashable) -> int:
        """The handle (cudaStream_t) of the stream named ``key``."""
        return self._lent[key] if key in self._lent else self._handles[key]

    def object(self, key: Hashable) -> StreamHandle:
        """The stream named ``key`` for libraries that take an object with ``__cuda_stream__``."""
        return StreamHandle(self[key])

    def synchronize(self) -> None:
        """Wait for every stream. Only outside the replay loop."""
        for handle in (*self._handles.values(), *self._lent.values()):
            self._platform.cudart.cudaStreamSynchronize(handle)

    def close(self) -> None:
        """Destroy the streams; a second call does nothing. One that fails spares no other."""
        self._lent.clear()
        _destroy_all(self._platform.cudart.cudaStreamDestroy, self._handles)


class Events:
    """Events of one rank by key, without timing, made before the loop and reused.

    A thread that waits for one spins rather than sleeps: it holds no lock of Python's then, and
    goes on within a microsecond.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._handles: dict[Hashable, int] = {}

    def __getitem__(self, key: Hashable) -> int:
        """The event named ``key``, made on first use (never inside the replay loop)."""
        if key not in self._handles:
            handle = c_void_p()
            self._platform.cudart.cudaEventCreateWithFlags(byref(handle), DISABLE_TIMING)
            self._handles[key] = handle.value or 0
        return self._handles[key]

    def close(self) -> None:
        """Destroy the events; a second call does nothing. One that fails spares no other."""
        _destroy_all(self._platform.cudart.cudaEventDestroy, self._handles)


class Pinned:
    """Page-locked host memory that a copy engine can read while the CPU goes on."""

    def __init__(self, platform: Platform, nbytes: int) -> None:
        self._platform = platform
        self.nbytes = nbytes
        pointer = c_void_p()
        platform.cudart.cudaHostAlloc(byref(pointer), max(nbytes, 1), 0)
        self.address: int = pointer.value or 0

    @property
    def bytes(self) -> memoryview:
        """The memory itself; not to be used after ``close``."""
        return memoryview((c_char * self.nbytes).from_address(self.address)).cast("B")

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self.address:
            address, self.address = self.address, 0
            self._platform.cudart.cudaFreeHost(address)
