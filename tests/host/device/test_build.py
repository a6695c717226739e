"""The build of the host device: what it refuses, and that the sanitizers see nothing."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "native" / "build.py"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SCRIPT.exists(), reason="needs a checkout: native/ is not here"),
]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("trlow_native_build_tested", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_without_a_compiler_it_says_so_in_one_line(tmp_path):
    environment = {"PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path, "--build", tmp_path],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no C++ compiler" in done.stderr


def test_cxx_is_honoured(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path, "--build", tmp_path],
        capture_output=True, text=True, env={**os.environ, "CXX": "no-such-compiler --flag"},
    )  # fmt: skip
    assert done.returncode == 1
    assert "CXX names 'no-such-compiler'" in done.stderr


def test_a_definition_that_differs_from_its_prototype_does_not_compile(build, tmp_path):
    (tmp_path / "prototypes.h").write_text(build.prototypes_header())
    codes = []
    for definition in (
        "cudaError_t cudaSetDevice(int)",
        "int cudaSetDevice(int)",
        "cudaError_t cudaSetDevice(long)",
        "cudaError_t cudaSetDevise(int)",  # a name that no prototype has
    ):
        source = tmp_path / "definition.cpp"
        source.write_text(f'#include "prototypes.h"\nextern "C" {definition} {{ return {{}}; }}')
        command = [*build.find_compiler(), *build.COMMON, *build.HOST]
        command += [f"-I{tmp_path}", "-fsyntax-only", source]
        codes.append(subprocess.run(command, capture_output=True).returncode)
    assert codes == [0, 1, 1, 1]


def test_a_second_build_compiles_nothing(build, tmp_path, monkeypatch):
    library = ROOT / "trlow" / "_native" / "libtrlow_host.so"
    build.build(strict=True)
    before = library.stat().st_mtime_ns
    commands = []
    run = build.run
    monkeypatch.setattr(build, "run", lambda command: commands.append(command) or run(command))
    build.build(strict=True)
    assert library.stat().st_mtime_ns == before
    assert [command[-1] for command in commands] == ["--version"]


def runtime_is_there(build, flags, tmp_path):
    source = tmp_path / "probe.cpp"
    source.write_text("int main() { return 0; }")
    program = tmp_path / "probe"
    compiler = build.find_compiler()
    made = subprocess.run([*compiler, *flags, source, "-o", program], capture_output=True)
    return made.returncode == 0 and subprocess.run([program]).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_capture_and_replay_on_four_ranks_are_clean(build, tmp_path, sanitizer):
    flags = build.SANITIZERS[sanitizer]
    if not runtime_is_there(build, flags, tmp_path):
        pytest.skip(f"the compiler has no working runtime of {flags[0]}")
    library = build.build(
        ROOT / "build" / "native" / sanitizer / "lib", sanitize=sanitizer, strict=True
    )
    program = tmp_path / "four_ranks"
    source = Path(__file__).with_name("four_ranks.cpp")
    headers = ROOT / "build" / "native" / sanitizer
    subprocess.run(
        [
            *build.find_compiler(), "-std=c++17", "-Wall", "-Wextra", "-Werror", *flags,
            f"-I{headers}", source, library, "-pthread", f"-Wl,-rpath,{library.parent}",
            "-o", program,
        ],
        check=True,
    )  # fmt: skip
    options = {
        "ASAN_OPTIONS": "detect_leaks=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
    }
    for mode, seed in (("0", "0"), ("0", "6"), ("1", "3")):
        done = subprocess.run(
            [program, mode, seed],
            capture_output=True, text=True, timeout=100, env={**os.environ, **options},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr[:4000]


def test_a_strict_build_allows_no_warning_and_an_install_does(build, tmp_path, monkeypatch):
    source = tmp_path / "warned.cpp"
    source.write_text("static int unused;\n")
    monkeypatch.setattr(build, "units", lambda: [build.Unit(source, (), "host")])
    for _ in range(2):  # the object of the first build does not hide the warning from the second
        with pytest.raises(build.BuildError, match="no warning"):
            build.build(tmp_path / "out", build_dir=tmp_path / "work", strict=True)
    assert not (tmp_path / "out" / build.NAME).exists()
    assert build.build(tmp_path / "out", build_dir=tmp_path / "work").exists()


# Builds one small source, with a definition that makes its object another one than that of others,
# and writes down when its own commands begin and end.
SMALL_BUILD = """
import importlib.util, pathlib, sys, time
script, folder, name = sys.argv[1:]
folder = pathlib.Path(folder)
spec = importlib.util.spec_from_file_location("trlow_native_build", script)
build = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
build.COMMON += (f"-DNAME_{name}",)
build.units = lambda: [build.Unit(folder / "small.cpp", (), "host")]
run = build.run

def noted(command):
    with (folder / "log").open("a") as log:
        log.write(name + "\\n")
    time.sleep(0.1)
    return run(command)

build.run = noted
build.build(folder / name, build_dir=folder / "work", strict=True)
"""


def test_two_builds_in_one_folder_take_turns(build, tmp_path):
    """Each removes what it takes for stale, which may be what the other one links."""
    (tmp_path / "small.cpp").write_text("static_assert(true);\n")
    names = ("first", "second")
    builds = [
        subprocess.Popen(
            [sys.executable, "-c", SMALL_BUILD, SCRIPT, tmp_path, name],
            stderr=subprocess.PIPE, text=True,
        )
        for name in names
    ]  # fmt: skip
    said = [process.communicate(timeout=100)[1] for process in builds]
    assert ([process.returncode for process in builds], said) == ([0, 0], ["", ""])
    assert all((tmp_path / name / build.NAME).exists() for name in names)
    order = (tmp_path / "log").read_text().split()
    assert order in ([*["first"] * 3, *["second"] * 3], [*["second"] * 3, *["first"] * 3])


def test_a_build_that_waits_too_long_says_who_holds_the_folder(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "WAIT_S", 0.1)
    work = tmp_path / "work"
    with build.alone_in(work), pytest.raises(build.BuildError) as caught:
        build.build(tmp_path / "out", build_dir=work)
    assert f"process {os.getpid()} builds in {work}" in str(caught.value)
    with build.alone_in(work):  # and it is let go of
        pass
