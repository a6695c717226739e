"""NVRTC: one source text to an image that the driver loads.

Compiling goes through ``cuda.bindings.nvrtc``, imported when something has to be compiled. What a
cache asks at every start, the compiler's version, is asked of the library alone: that takes 7 ms,
the import 45 ms more. Both come from ``cuda.pathfinder``, so both are the same file.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trlow.binding import clib
from trlow.binding.clib import Interface, Library
from trlow.binding.prototype import read_enum, read_prototypes, read_types
from trlow.errors import CompileError, LibraryError

__all__ = ["Compiler", "compile_image", "compiler", "supported_architectures"]

TYPES = """
typedef enum { NVRTC_SUCCESS = 0, NVRTC_ERROR_OUT_OF_MEMORY = 1, NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_INVALID_OPTION = 5, NVRTC_ERROR_COMPILATION = 6 } nvrtcResult;
"""
PROTOTYPES = """
nvrtcResult nvrtcVersion(int* major, int* minor);
"""
nvrtcResult = read_enum(TYPES, "nvrtcResult")


@dataclass(frozen=True, slots=True)
class Compiler:
    """Which NVRTC this process has."""

    version: tuple[int, int]
    path: str
    nbytes: int  # of the file: the version has no patch level, and builds differ in size

    @property
    def identity(self) -> str:
        """What a compiled image depends on beside its sources and options."""
        return f"NVRTC {self.version[0]}.{self.version[1]}, {self.nbytes} bytes"


@cache
def compiler() -> Compiler:
    """Load NVRTC and ask its version. Raises ``LibraryError`` where there is none."""
    library = clib.find(INTERFACE, None)
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    nbytes = Path(library.path).stat().st_size
    return Compiler((major.value, minor.value), library.path, nbytes)


def supported_architectures() -> tuple[int, ...]:
    """The architectures that NVRTC compiles for, ascending: 90 is sm_90."""
    nvrtc = _binding()
    found = _check("nvrtcGetSupportedArchs", "", nvrtc.nvrtcGetSupportedArchs())
    return tuple(sorted(int(architecture) for architecture in found))


def compile_image(
    source: bytes, name: str, headers: dict[str, bytes], options: Sequence[str], kind: str
) -> bytes:
    """Compile ``source`` (called ``name`` in messages) with the in-memory ``headers``.

    ``kind`` is "cubin", where ``options`` name a real architecture ("--gpu-architecture=sm_90"), or
    "ptx" with a virtual one (compute_90). Raises ``CompileError`` with the compiler's log.
    """
    nvrtc = _binding()
    texts, names = list(headers.values()), [key.encode() for key in headers]
    program = _check(
        "nvrtcCreateProgram",
        name,
        nvrtc.nvrtcCreateProgram(source, name.encode(), len(texts), texts, names),
    )
    try:
        words = [option.encode() for option in options]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        if int(code) != 0:
            log = _log(nvrtc, program, name)
            detail = f"{name}:\n{log}"
            raise CompileError("nvrtcCompileProgram", int(code), str(code), detail=detail, log=log)
        what = kind.upper()
        get_size, get = getattr(nvrtc, f"nvrtcGet{what}Size"), getattr(nvrtc, f"nvrtcGet{what}")
        image = bytes(_check(f"nvrtcGet{what}Size", name, get_size(program)))
        _check(f"nvrtcGet{what}", name, get(program, image))
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _binding() -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415  a CUDA library, loaded when used
    except ImportError as error:
        message = f"cuda.bindings.nvrtc cannot be imported: {error}; pip install cuda-python"
        raise LibraryError(message) from error
    return nvrtc


def _log(nvrtc: Any, program: Any, name: str) -> str:
    size: int = _check("nvrtcGetProgramLogSize", name, nvrtc.nvrtcGetProgramLogSize(program))
    log = bytes(size)
    _check("nvrtcGetProgramLog", name, nvrtc.nvrtcGetProgramLog(program, log))
    return log.decode(errors="replace").strip(" \0\n")


def _check(function: str, name: str, result: Sequence[Any]) -> Any:
    """The value behind the result code; a ``CompileError`` if the code is not 0."""
    code = result[0]
    if int(code) != 0:
        raise CompileError(function, int(code), str(code), detail=name)
    return result[1] if len(result) > 1 else None


def _failure(library: Library, function: str, code: int) -> CompileError:
    return CompileError(function, code, "nvrtcResult", detail=library.path)


INTERFACE = Interface(
    title="NVRTC",
    short="nvrtc",
    prototypes=read_prototypes(PROTOTYPES, read_types(TYPES, {})),
    status="nvrtcResult",
    failure=_failure,
    remedy="pip install 'trlow[cu13]' or 'trlow[cu12]'",
)
