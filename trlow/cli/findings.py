"""What is on this machine, as plain data: libraries, devices, variables, and what cannot work.

Nothing here fails because something is missing: what is missing is a finding. Only a host device
that does not work means that trlow itself is broken.
"""

from __future__ import annotations

import importlib.util
import platform as machine
import re
import sysconfig
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, create_string_buffer
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from trlow.binding import cudart, driver, host, nccl
from trlow.binding.clib import Library, copies
from trlow.cli.selftest import mean_over_ranks
from trlow.device import Platform
from trlow.errors import TrlowError
from trlow.kernel_cache import KernelCache
from trlow.settings import Settings, unknown_variables, variables_in_effect
from trlow.version import __version__

# Where a second copy is likely to lie, beside the wheels' own folder.
SYSTEM_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/lib",
    "/usr/local/cuda/lib64",
)


@dataclass(slots=True)
class Shared:
    """One library: what was loaded, or why it could not be."""

    name: str
    path: str | None = None
    version: str | None = None
    how: str | None = None
    error: str | None = None
    copies: list[str] = field(default_factory=list)  # other files of this library


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as CUDA sees it; memory in bytes."""

    index: int
    name: str
    compute_capability: str
    memory_nbytes: int
    free_nbytes: int


@dataclass(frozen=True, slots=True)
class Cache:
    """Where compiled kernels are kept, and why they cannot be."""

    folder: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that cannot work here, why, in the words of what was tried."""

    what: str
    why: str


@dataclass(slots=True)
class Findings:
    """Everything that doctor says."""

    trlow: str
    python: str
    numpy: str
    ok: bool = False  # trlow itself works
    libraries: list[Shared] = field(default_factory=list)
    host_devices: int = 0
    gpus: list[Gpu] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)  # [from][to]
    kernel_cache: Cache = field(default_factory=Cache)
    environment: dict[str, str] = field(default_factory=dict)
    cannot: list[Problem] = field(default_factory=list)


def examine(settings: Settings) -> Findings:
    """Look at everything once. The host device runs a small program; no GPU does."""
    found = Findings(__version__, machine.python_version(), np.__version__)
    found.environment = variables_in_effect()
    folder = settings.kernel_cache_folder
    found.kernel_cache = Cache(folder, KernelCache(folder).problem())
    _examine_host(found, settings)
    runtime = _examine_library(found, "cudart", lambda: cudart.load(settings.cudart_library))
    kernel_driver = _examine_library(found, "cuda", lambda: driver.load(settings.driver_library))
    collectives = _examine_library(found, "nccl", lambda: nccl.load(settings.nccl_library))
    compiler = _examine_nvrtc(found)
    if runtime is not None and kernel_driver is not None:
        _examine_gpus(found, settings)
    _explain(found, runtime, kernel_driver, collectives, compiler=compiler)
    return found


def _examine_host(found: Findings, settings: Settings) -> None:
    shared = Shared("trlow_host")
    found.libraries.append(shared)
    try:
        library = host.load(settings.host_library).host
        shared.path, shared.how, shared.version = library.path, library.how, found.trlow
        here = replace(settings, device="host", gpus="0-1", host_devices=settings.host_devices)
        found.host_devices = here.host_devices
        mean_over_ranks(replace(here, host_devices=max(2, here.host_devices)))
    except TrlowError as error:
        shared.error = str(error)
        found.cannot.append(Problem("anything: the host device does not work", str(error)))
    else:
        found.ok = True


def _examine_library(found: Findings, name: str, load: Callable[[], Library]) -> Library | None:
    shared = Shared(name)
    found.libraries.append(shared)
    try:
        library = load()
    except TrlowError as error:
        shared.error = str(error)
        shared.copies = _other_copies(name, None)
        return None
    shared.path, shared.how, shared.version = library.path, library.how, library.version_text
    shared.copies = _other_copies(name, library.path)
    return library


def _examine_nvrtc(found: Findings) -> bool:
    """NVRTC comes through cuda.bindings, which finds it by itself."""
    shared = Shared("nvrtc")
    found.libraries.append(shared)
    try:
        # Loaded here: a foreign package that costs time, and may be of another CUDA version.
        from cuda.bindings import nvrtc  # noqa: PLC0415

        code, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        shared.error = f"cuda.bindings.nvrtc: {str(error).rstrip(' .;')}; pip install 'trlow[cu13]'"
        shared.copies = _other_copies("nvrtc", None)
        return False
    if int(code) != 0:
        shared.error = f"nvrtcVersion failed: {code}"
        return False
    mapped = copies("nvrtc")
    shared.path, shared.how = mapped[0] if mapped else None, "cuda.bindings"
    shared.version = f"{major}.{minor}"
    shared.copies = _other_copies("nvrtc", shared.path)
    return True


def _other_copies(short: str, loaded: str | None) -> list[str]:
    """Return other files lib<short>.so*: mapped into this process, in wheels, in system folders."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/lib")
    folders = [*wheels, *map(Path, SYSTEM_FOLDERS)]
    pattern = re.compile(rf"lib{re.escape(short)}\.so(\.[0-9]+)*")
    there = {
        str(path.resolve())
        for folder in folders
        if folder.is_dir()
        for path in folder.iterdir()
        if pattern.fullmatch(path.name)
    }
    there.update(str(Path(path).resolve()) for path in copies(short))
    return sorted(there - {loaded})


def _examine_gpus(found: Findings, settings: Settings) -> None:
    try:
        platform = Platform("cuda", settings)
        count = platform.device_count()
        found.gpus = [_gpu(platform, index) for index in range(count)]
        found.peer_access = [
            [here == there or _can_access(platform, here, there) for there in range(count)]
            for here in range(count)
        ]
    except TrlowError as error:
        found.cannot.append(Problem("asking the GPUs what they are", str(error)))


def _gpu(platform: Platform, index: int) -> Gpu:
    free, total = platform.memory(index)
    name = create_string_buffer(256)
    handle, major, minor = c_int(), c_int(), c_int()
    platform.driver.cuInit(0)
    platform.driver.cuDeviceGet(byref(handle), index)
    platform.driver.cuDeviceGetName(name, len(name), handle)
    attribute, get = cudart.cudaDeviceAttr, platform.cudart.cudaDeviceGetAttribute
    get(byref(major), attribute.cudaDevAttrComputeCapabilityMajor, index)
    get(byref(minor), attribute.cudaDevAttrComputeCapabilityMinor, index)
    text = name.value.decode(errors="replace")
    return Gpu(index, text, f"{major.value}.{minor.value}", total, free)


def _can_access(platform: Platform, here: int, there: int) -> bool:
    can = c_int()
    platform.cudart.cudaDeviceCanAccessPeer(byref(can), here, there)
    return bool(can.value)


def _explain(
    found: Findings,
    runtime: Library | None,
    kernel_driver: Library | None,
    collectives: Library | None,
    *,
    compiler: bool,
) -> None:
    """Say what cannot work, and why."""
    errors = {shared.name: shared.error or "" for shared in found.libraries}
    on_gpus = "training on GPUs"
    if kernel_driver is None:
        found.cannot.append(Problem(on_gpus, errors["cuda"]))
    if runtime is None:
        found.cannot.append(Problem(on_gpus, errors["cudart"]))
    if runtime is not None and kernel_driver is not None:
        found.cannot += [Problem(on_gpus, why) for why in _reasons(found, runtime, kernel_driver)]
    for name in unknown_variables():
        found.cannot.append(Problem(f"training with {name}", "no such variable; train refuses it"))
    if not compiler:
        found.cannot.append(Problem("compiling kernels for a GPU", errors["nvrtc"]))
    if collectives is None:
        found.cannot.append(Problem("training on more than one GPU", errors["nccl"]))
    found.cannot += _problems_of_several(found)
    if importlib.util.find_spec("sklearn") is None:
        why = "scikit-learn is not installed; pip install 'trlow[data]'"
        found.cannot.append(Problem("train --data digits", why))


def _reasons(found: Findings, runtime: Library, kernel_driver: Library) -> Iterator[str]:
    """Why no GPU can be trained on although both of CUDA's libraries are there."""
    if not found.gpus:
        yield "the driver shows no GPU to this process"
    if runtime.version // 1000 > kernel_driver.version // 1000:
        yield (
            f"CUDA runtime {runtime.version_text} is newer than what the driver supports "
            f"({kernel_driver.version_text}); install trlow[cu12] or a newer driver"
        )


def _problems_of_several(found: Findings) -> Iterator[Problem]:
    """What the GPUs cannot do together."""
    count = len(found.gpus)
    if count & (count - 1):
        what = f"training on all {count} GPUs without --any-world-size"
        yield Problem(what, "the number of ranks is no power of two")
    if not all(all(row) for row in found.peer_access):
        why = "CUDA grants no peer access to them"
        yield Problem("direct copies between some GPUs", why)
