"""Compile the host device: `python native/build.py`, or `build()` from the packaging hook.

The C prototypes that it implements are taken from `trlow/binding/*.py`, by parsing, not importing:
nothing of trlow has to be installed. A definition that differs from its prototype does not compile.
Each kernel source is compiled twice, as one vectorised thread and as blocks of fibers. Objects are
kept in `build/native`, named by a hash of everything that went into them; one build at a time
works in that folder, and another waits for it.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "libtrlow_host.so"
BINDINGS = ("cudart", "driver", "nccl_header", "host")
SANITIZERS = {
    # little optimisation: these builds look for errors, and compiling is what they cost
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O0"),
    "thread": ("-fsanitize=thread", "-O1"),
}
WARNED = ".warned"
WAIT_S = 600.0  # for another build in the same folder; one takes a minute or two
# An exported function without a prototype is an error.
HOST = ("-Wmissing-declarations", "-Werror=missing-declarations")
KERNEL = ("-fopenmp-simd",)  # `omp simd` pragmas only: no OpenMP runtime is linked
COMMON = (
    "-Wall",
    "-Wextra",
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
)
LINK = ("-shared", "-pthread", "-Wl,-Bsymbolic", "-Wl,-z,nodelete", "-Wl,-z,defs")


class BuildError(Exception):
    """The library was not built; the message is one line, the compiler's words are on stderr."""


@dataclass(frozen=True)
class Unit:
    """One compilation: a source, what is added to the common flags, and a suffix of its object."""

    source: Path
    flags: tuple[str, ...]
    suffix: str


def build(
    out_dir: Path | str | None = None,
    *,
    sanitize: str | None = None,
    build_dir: Path | str | None = None,
    strict: bool = False,
) -> Path:
    """Compile what changed and link the library into `out_dir`; returns its path.

    `sanitize`: "address" (with undefined behaviour) or "thread". `strict`: warnings are errors, as
    in every build from a checkout; an install must not fail because a newer compiler warns of more.
    Raises `BuildError`.
    """
    out = Path(out_dir) if out_dir else ROOT / "trlow" / "_native"
    work = Path(build_dir) if build_dir else ROOT / "build" / "native"
    if sanitize:
        work /= sanitize
    compiler = find_compiler()
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(work):
        write_if_changed(work / "prototypes.h", prototypes_header())
        extra = SANITIZERS[sanitize] if sanitize else ()
        objects = compile_all(compiler, extra, work)
        if strict and any(item.suffixes[-2] == WARNED for item in objects):
            raise BuildError("the compiler warned (see above); a strict build allows no warning")
        return link(objects, compiler, extra, out / NAME, work)


@contextmanager
def alone_in(work: Path) -> Iterator[None]:
    """Hold the folder of the objects: a build removes those that another one may be linking.

    The system lets go of it when the process ends. Raises `BuildError` after `WAIT_S`.
    """
    work.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + WAIT_S
    with (work / "lock").open("a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    raise BuildError(
                        f"process {holder} builds in {work} and holds {file.name} for more than "
                        f"{WAIT_S:g} s; end it, or choose another folder with --build"
                    ) from None
            time.sleep(0.05)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def compile_all(compiler: list[str], extra: tuple[str, ...], work: Path) -> list[Path]:
    """Compile every unit that changed; returns all objects."""
    headers = digest_of(
        [*ROOT.glob("native/host/*.h"), *ROOT.glob("native/kernels/*.h"), work / "prototypes.h"]
    )
    version = run([*compiler, "--version"]).stdout
    key = hashlib.sha256(f"{headers}{version}{compiler}{extra}".encode()).hexdigest()
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(lambda unit: compile_unit(unit, compiler, extra, work, key), units()))


def find_compiler() -> list[str]:
    """The C++ compiler's command: CXX, else g++, c++ or clang++ on PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]) is None:
            raise BuildError(f"CXX names {named[0]!r}, which is not on PATH; set CXX to a compiler")
        return named
    for name in ("g++", "c++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: install g++ (11 or newer), or set CXX to one")


def units() -> list[Unit]:
    """Every compilation of the library."""
    host = sorted(ROOT.glob("native/host/*.cpp"))
    kernels = sorted(ROOT.glob("native/kernels/*.cc"))
    return [
        *(Unit(source, HOST, "host") for source in host),
        *(Unit(source, (*KERNEL, "-DTRLOW_HOST_SERIAL"), "serial") for source in kernels),
        *(Unit(source, (*KERNEL, "-DTRLOW_HOST_FIBERS"), "fibers") for source in kernels),
    ]


def prototypes_header() -> str:
    """The bindings' types and prototypes as one C++ header."""
    types, prototypes = [], []
    for name in BINDINGS:
        constants = text_constants(ROOT / "trlow" / "binding" / f"{name}.py")
        types.append(constants["TYPES"])
        prototypes.append(constants["PROTOTYPES"])
    return "\n".join(
        (
            "// Generated from trlow/binding by native/build.py.",
            "#pragma once",
            "#pragma GCC visibility push(default)",
            'extern "C" {',
            *types,
            *prototypes,
            "}",
            "#pragma GCC visibility pop",
            "",
        )
    )


def text_constants(path: Path) -> dict[str, str]:
    """The module-level string constants TYPES and PROTOTYPES of a Python file."""
    found: dict[str, str] = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            continue
        for target in statement.targets:
            if isinstance(target, ast.Name) and target.id in {"TYPES", "PROTOTYPES"}:
                found[target.id] = str(statement.value.value)
    missing = {"TYPES", "PROTOTYPES"} - set(found)
    if missing:
        raise BuildError(f"{path}: no string constant {', '.join(sorted(missing))}")
    return found


def compile_unit(
    unit: Unit, compiler: list[str], extra: tuple[str, ...], work: Path, key: str
) -> Path:
    """Compile one source unless an object of exactly this input exists.

    An object whose compiler warned is compiled again every time, so that the warning is seen.
    """
    flags = [*COMMON, *extra, *unit.flags]
    includes = [f"-I{work}", f"-I{ROOT / 'native/host'}", f"-I{ROOT / 'native/kernels'}"]
    digest = hashlib.sha256(f"{key}{flags}".encode() + unit.source.read_bytes()).hexdigest()[:16]
    target = work / f"{unit.source.stem}.{unit.suffix}.{digest}.o"
    if not target.exists():
        for stale in work.glob(f"{unit.source.stem}.{unit.suffix}.*.o"):
            stale.unlink(missing_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        language = ["-x", "c++", "-c", str(unit.source)]
        done = run([*compiler, *flags, *includes, *language, "-o", str(partial)])
        if done.stderr:
            sys.stderr.write(done.stderr)
            target = target.with_suffix(f"{WARNED}.o")
        partial.replace(target)
    return target


def link(
    objects: list[Path], compiler: list[str], extra: tuple[str, ...], target: Path, work: Path
) -> Path:
    """Link unless the library is already that of these objects. Replaces it in one step."""
    stamp = work / "linked"
    names = "\n".join([str(target), *(item.name for item in objects)])
    if target.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == names:
        return target
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    run([*compiler, *extra, *LINK, *map(str, objects), "-o", str(partial)])
    partial.replace(target)
    stamp.write_text(names, encoding="utf-8")
    return target


def digest_of(paths: Iterable[Path]) -> str:
    """A digest of the files' names and contents."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_if_changed(path: Path, text: str) -> None:
    """Write `text`, unless the file says it already."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command; what it says on stderr is passed on if it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        source = next((word for word in command if word.endswith((".cpp", ".cc"))), "the library")
        raise BuildError(f"{command[0]} failed on {source} (exit code {done.returncode})")
    return done


def main() -> int:
    """The command line; one line on success or failure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the library (trlow/_native)")
    parser.add_argument("--build", type=Path, help="folder of the objects (build/native)")
    parser.add_argument("--sanitize", choices=sorted(SANITIZERS), help="instrument the library")
    given = parser.parse_args()
    try:
        library = build(given.out, sanitize=given.sanitize, build_dir=given.build, strict=True)
    except BuildError as error:
        print(f"trlow: {error}", file=sys.stderr)
        return 1
    print(f"built {library}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
