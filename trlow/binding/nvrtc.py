"""NVRTC through ``cuda.bindings.nvrtc``: one source text to a CUBIN.

The package is loaded on first use only: importing trlow loads no CUDA library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trlow.errors import CompileError

__all__ = ["compile_cubin"]


def compile_cubin(
    source: bytes, name: str, headers: dict[str, bytes], options: Sequence[str]
) -> bytes:
    """Compile ``source`` (called ``name`` in messages) with the in-memory ``headers``.

    ``options`` must name a real architecture ("--gpu-architecture=sm_90"), else there is no CUBIN.
    Raises ``CompileError`` with the compiler's log.
    """
    from cuda.bindings import nvrtc  # noqa: PLC0415  a CUDA library, loaded when used

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
        size: int = _check("nvrtcGetCUBINSize", name, nvrtc.nvrtcGetCUBINSize(program))
        cubin = bytes(size)
        _check("nvrtcGetCUBIN", name, nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


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
