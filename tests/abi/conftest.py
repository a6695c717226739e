"""Where NVIDIA's headers are, and two compilers: one for assertions, one for stub libraries."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trlow.binding import cudart, nccl
from trlow.errors import LibraryError

# The wheel that holds each header, by CUDA major version as pip names them.
WHEELS = {
    "cuda_runtime_api.h": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "cuda.h": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "crt/host_defines.h": ("nvidia-cuda-crt", "nvidia-cuda-nvcc-cu12"),
    "nv/target": ("nvidia-cuda-cccl", "nvidia-cuda-cccl-cu12"),
    "nvrtc.h": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "nccl.h": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}


def include_directory(header: str) -> Path:
    """The folder that makes `#include <header>` work; skips aloud where no wheel has it."""
    for wheel in WHEELS[header]:
        try:
            files = importlib.metadata.files(wheel) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            if str(file).endswith(f"/{header}"):
                path = Path(str(file.locate())).resolve()
                return path.parents[header.count("/")]
    pytest.skip(f"no wheel with {header}: pip install {WHEELS[header][0]}")


def compiler(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH")
    return found


@pytest.fixture(scope="session")
def cuda_includes() -> list[Path]:
    return [include_directory(h) for h in ("cuda_runtime_api.h", "cuda.h", "crt/host_defines.h")]


@pytest.fixture(scope="session")
def nvrtc_includes() -> list[Path]:
    return [include_directory("nvrtc.h")]


# The wheel's nccl.h is one release; folders of others' headers may be named, separated by colons.
OTHER_RELEASES = list(filter(None, os.environ.get("TRLOW_TEST_NCCL_INCLUDES", "").split(":")))


@pytest.fixture(scope="session", params=["wheel", *OTHER_RELEASES])
def nccl_includes(request, cuda_includes) -> list[Path]:
    wheel = request.param == "wheel"
    nccl = include_directory("nccl.h") if wheel else Path(request.param)
    return [nccl, *cuda_includes, include_directory("nv/target")]


@pytest.fixture(scope="session")
def check_source(tmp_path_factory):
    """Compile text without making a file of it: returns the compiler's complaints, "" if none."""

    def check(source: str, includes=(), language: str = "c++") -> str:
        suffix, command = {
            "c++": (".cc", [compiler("g++"), "-std=c++17"]),
            "c": (".c", [compiler("gcc"), "-std=c11"]),
        }[language]
        path = tmp_path_factory.mktemp("check") / f"check{suffix}"
        path.write_text(source)
        flags = ["-fsyntax-only", "-Wall", "-Wextra", "-Werror"]
        system = [f"-isystem{include}" for include in includes]
        done = subprocess.run(
            [*command, *flags, *system, str(path)], capture_output=True, text=True, timeout=100
        )
        return "" if done.returncode == 0 else done.stderr or "failed without a word"

    return check


@pytest.fixture(scope="session")
def build_stub(tmp_path_factory):
    """Compile C text to a shared library and return its path."""

    def build(source: str, name: str = "libstub.so") -> str:
        folder = tmp_path_factory.mktemp("stub")
        path = folder / "stub.c"
        path.write_text(source)
        flags = ["-std=c11", "-O1", "-shared", "-fPIC", "-pthread"]
        done = subprocess.run(
            [compiler("gcc"), *flags, "-o", str(folder / name), str(path)],
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return str(folder / name)

    return build


@pytest.fixture(scope="session")
def real_cudart():
    """The CUDA runtime that this environment has; skips aloud without one."""
    try:
        return cudart.load()
    except LibraryError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def real_nccl():
    try:
        return nccl.load()
    except LibraryError as error:
        pytest.skip(str(error))
