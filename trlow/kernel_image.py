"""From a kernel's source to an image that the driver of one device loads.

A CUBIN of the device's own architecture first: it loads whatever the driver's age. Where NVRTC is
older than the GPU and does not know its architecture, PTX of the highest that it knows, which the
driver compiles on; a driver refuses PTX from an NVRTC newer than itself, so then nothing can work
and the error says both versions. Compiled images are kept on disk.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trlow.binding import nvrtc
from trlow.errors import CompileError, LibraryError
from trlow.kernel_cache import KernelCache, key_of

HEADER = "trlow_kernel.h"
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false")  # no contraction, as in the host build


@dataclass(frozen=True, slots=True)
class Target:
    """What to compile for: ("cubin", 90) is sm_90, ("ptx", 90) compute_90."""

    kind: str
    architecture: int

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC's options."""
        prefix = "sm" if self.kind == "cubin" else "compute"
        return (*NVRTC_OPTIONS, f"--gpu-architecture={prefix}_{self.architecture}")


def choose_target(
    device: int, supported: Sequence[int], compiler: tuple[int, int], driver: tuple[int, int]
) -> Target:
    """The target for a device of architecture ``device``.

    ``supported`` are the architectures that NVRTC knows, ``compiler`` and ``driver`` the CUDA
    versions of NVRTC and of the driver. Raises ``CompileError`` where there is none.
    """
    if device in supported:
        return Target("cubin", device)
    older = [architecture for architecture in supported if architecture < device]
    versions = (
        f"NVRTC {_dotted(compiler)} does not know sm_{device}, and the driver is for CUDA "
        f"{_dotted(driver)}"
    )
    if not older:
        raise _refused(
            f"{versions}; the GPU is older than sm_{min(supported)}, the oldest that this NVRTC "
            "compiles for: install an NVRTC of an older CUDA"
        )
    if compiler > driver:
        raise _refused(
            f"{versions}, which refuses PTX of a newer NVRTC; install an NVRTC that knows "
            f"sm_{device}, or a driver for CUDA {_dotted(compiler)} or newer"
        )
    return Target("ptx", max(older))


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _refused(why: str) -> CompileError:
    """What nvrtcCompileProgram would say to the option, before it is asked."""
    code = nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION
    return CompileError("nvrtcCompileProgram", int(code), code.name, detail=why)


def source_folder() -> Path:
    """Where the kernel sources are: the checkout's own, or the installed package's copy."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "native" / "kernels", package / "_native" / "kernels"):
        if (folder / HEADER).is_file():
            return folder
    message = f"the kernel sources are missing beside {package}; reinstall trlow"
    raise LibraryError(message)


def compile_source(source: str, target: Target) -> bytes:
    """Compile one file of the kernel folder. Raises ``CompileError`` with the compiler's log."""
    text, headers = _read(source)
    return nvrtc.compile_image(text, source, headers, target.options, target.kind)


def cache_key(source: str, target: Target, compiler: nvrtc.Compiler) -> bytes:
    """The digest of everything that an image of ``source`` depends on."""
    text, headers = _read(source)
    parts = [source.encode(), text]
    for name, header in headers.items():
        parts += [name.encode(), header]
    parts += [option.encode() for option in target.options]
    return key_of([*parts, target.kind.encode(), compiler.identity.encode()])


def _read(source: str) -> tuple[bytes, dict[str, bytes]]:
    folder = source_folder()
    return (folder / source).read_bytes(), {HEADER: (folder / HEADER).read_bytes()}


_images: dict[tuple[str, int, tuple[int, int]], bytes] = {}
_images_lock = threading.Lock()  # ranks load the same kernels at once: one compiles, all have it


def image_of(source: str, device: int, driver: tuple[int, int], cache: KernelCache) -> bytes:
    """The image of ``source`` for a device of architecture ``device``; made once in a process.

    Raises ``LibraryError`` without NVRTC, ``CompileError``.
    """
    asked = (source, device, driver)
    with _images_lock:
        if asked not in _images:
            _images[asked] = _find_or_compile(source, device, driver, cache)
        return _images[asked]


def _find_or_compile(
    source: str, device: int, driver: tuple[int, int], cache: KernelCache
) -> bytes:
    compiler = nvrtc.compiler()
    # NVRTC is not asked what it knows before something has to be compiled: a CUBIN that it made
    # for this architecture says enough.
    best = Target("cubin", device)
    image = cache.read(cache_key(source, best, compiler))
    if image is not None:
        return image
    target = choose_target(device, nvrtc.supported_architectures(), compiler.version, driver)
    key = cache_key(source, target, compiler)
    image = cache.read(key) if target != best else None
    if image is None:
        image = compile_source(source, target)
        cache.write(key, image)
    return image
