"""The host device: one shared library that answers as CUDA runtime, driver and NCCL.

`load` gives its four tables over the one file, loaded RTLD_LOCAL so that a real libcudart in the
process is not disturbed. PROTOTYPES are its own extensions; every one that returns
trlowHostStatus_t returns 0 or a cudaError code, the others return what they count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trlow.binding import cudart, driver, nccl
from trlow.binding.calls import Entry
from trlow.binding.clib import Interface, Library, open_library
from trlow.binding.prototype import read_prototypes, read_types
from trlow.errors import CudaError, LibraryError

TYPES = """
typedef int trlowHostStatus_t;
typedef struct { const void* function; unsigned long long words[12]; } trlowHostCall;
"""

PROTOTYPES = """
trlowHostStatus_t trlowHostConfigure(int devices, int workers, unsigned long long seed,
    long long device_nbytes);
trlowHostStatus_t trlowHostKernelMode(int mode);
trlowHostStatus_t trlowHostFail(const char* function, long long nth, int code);
long long trlowHostCalls(const char* function);
int trlowHostLive(const char* what);
trlowHostStatus_t trlowHostIssuerEnter(void);
trlowHostStatus_t trlowHostIssuerLeave(void);
trlowHostStatus_t trlowHostProgressTimeout(int milliseconds);
trlowHostStatus_t trlowHostClock(long long* nanoseconds);
long long trlowHostRun(const trlowHostCall* calls, long long count, int* code);
"""

DEFAULT_PATH = Path(__file__).resolve().parents[1] / "_native" / "libtrlow_host.so"


@dataclass(frozen=True, slots=True)
class HostLibraries:
    """Four tables over one file: three interfaces of NVIDIA's and the extensions."""

    cudart: Library
    driver: Library
    nccl: Library
    host: Library


def load(path: str | None = None) -> HostLibraries:
    """The host device from `path`, or else the one built into the package. LibraryError."""
    tables = (cudart.INTERFACE, driver.INTERFACE, nccl.INTERFACE, INTERFACE)
    return HostLibraries(*(_open(table, path) for table in tables))


def load_extensions(path: str | None = None) -> Library:
    """Its own functions alone: `trlowHostRun` makes calls of any library. LibraryError."""
    return _open(INTERFACE, path)


def _open(table: Interface, path: str | None) -> Library:
    if path is None and not DEFAULT_PATH.is_file():
        raise LibraryError(
            f"the host device is not built: no file {DEFAULT_PATH}; run `make native`"
        )
    return open_library(table, path or str(DEFAULT_PATH), "host")


def _failure(library: Library, function: str, code: int) -> CudaError:
    name = _NAMES.get(code, "unrecognized error code")
    return CudaError(function, code, name, detail=f"host device {library.path}")


_NAMES = {int(code): code.name for code in cudart.cudaError}

INTERFACE = Interface(
    title="host device",
    short="trlow_host",
    prototypes=read_prototypes(PROTOTYPES, read_types(TYPES, {"trlowHostCall": Entry})),
    status="trlowHostStatus_t",
    failure=_failure,
    remedy="run `make native`",
)
