"""Where libraries are looked for, what is said when they are not there, and what stays apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trlow.binding import clib, cudart, driver, host, nccl
from trlow.errors import LibraryError, UsageError

STUB = """
int cudaRuntimeGetVersion(int* v) { *v = 13000; return 0; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int ncclGetVersion(int* v) { *v = 22809; return 0; }
int trlowHostLive(const char* what) { return what[0]; }
int trlowHostKernelMode(int mode) { return mode; }
"""


@pytest.mark.parametrize("module", [cudart, driver, nccl, host])
def test_a_path_that_does_not_exist_is_named_and_nothing_else_is_tried(module):
    with pytest.raises(LibraryError, match=r"'/no/such/lib\.so'.*cannot open shared object file"):
        module.load("/no/such/lib.so")


def test_a_file_that_is_no_library_is_named(tmp_path):
    path = tmp_path / "libnccl.so.2"
    path.write_text("no ELF")
    with pytest.raises(LibraryError, match=r"NCCL cannot be loaded from .*libnccl\.so\.2"):
        nccl.load(str(path))


def test_another_library_is_noticed(build_stub):
    path = build_stub("int something(void) { return 0; }")
    with pytest.raises(LibraryError, match="is not NCCL: it has no ncclGetVersion"):
        nccl.load(path)


@pytest.mark.parametrize("module", [cudart, driver, nccl])
def test_without_a_library_the_error_lists_where_it_looked(module, monkeypatch):
    pathfinder = pytest.importorskip("cuda.pathfinder", reason="no cuda.pathfinder: cuda-python")

    def nothing(name):
        raise pathfinder.DynamicLibNotFoundError(f"no lib{name}\n  in /one\n  in /two\n")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", nothing)
    with pytest.raises(LibraryError) as caught:
        module.load()
    message = str(caught.value)
    assert message.startswith(f"{module.INTERFACE.title} was not found; looked: no path was given")
    assert all(entry in message for entry in sys.path if entry.endswith("site-packages"))
    assert f"no lib{module.INTERFACE.short} in /one in /two; " in message
    assert message.endswith(module.INTERFACE.remedy)
    assert "\n" not in message


def test_without_pathfinder_the_error_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(LibraryError, match=r"cuda\.pathfinder, .* is not installed"):
        nccl.load()


def test_a_bare_name_is_searched_by_the_loader_and_its_path_is_told():
    libc = clib.Interface(
        title="C library", short="c", prototypes={}, status="int", failure=lambda *_: None
    )
    library = clib.open_library(libc, "libc.so.6", "settings")
    assert Path(library.path).is_absolute()
    assert Path(library.path).name.startswith("libc")


def test_a_host_device_that_is_not_built_says_how_to_build_it(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "DEFAULT_PATH", tmp_path / "libtrlow_host.so")
    with pytest.raises(LibraryError, match=r"no file .*libtrlow_host\.so; run `make native`"):
        host.load()


def test_the_host_device_is_four_tables_over_one_file(build_stub):
    path = build_stub(STUB, "libtrlow_host.so")
    libraries = host.load(path)
    tables = (libraries.cudart, libraries.driver, libraries.nccl, libraries.host)
    assert [table.version for table in tables] == [13000, 13000, 22809, 0]
    assert {table.path for table in tables} == {path}
    assert {table.how for table in tables} == {"host"}
    assert libraries.host.trlowHostLive(b"streams") == ord("s")
    assert libraries.host.trlowHostKernelMode(0) == 0
    with pytest.raises(Exception, match=r"trlowHostKernelMode failed: cudaErrorInvalidValue \(1\)"):
        libraries.host.trlowHostKernelMode(1)
    with pytest.raises(LibraryError, match="has no trlowHostCalls"):
        libraries.host.trlowHostCalls(b"*")


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_symbols_of_the_host_device_stay_out_of_the_process(build_stub):
    path = build_stub(STUB, "libtrlow_host.so")
    code = f"""
import ctypes
from trlow.binding import host
host.load({path!r})
print(hasattr(ctypes.CDLL(None), "trlowHostLive"))
ctypes.CDLL({path!r}, mode=ctypes.RTLD_GLOBAL)
print(hasattr(ctypes.CDLL(None), "trlowHostLive"))
"""
    assert run_python(code).split() == ["False", "True"]


def test_two_copies_of_one_library_are_seen(build_stub):
    paths = sorted([build_stub(STUB, "libnccl.so.2"), build_stub(STUB, "libnccl-0a1b.so.2.28.3")])
    code = f"""
import ctypes
from trlow.binding import clib, nccl
print(clib.copies("nccl"))
for path in {paths!r}:
    nccl.load(path)
print(clib.copies("nccl"), clib.copies("ccl"))
"""
    assert run_python(code).splitlines() == ["()", f"{tuple(paths)} ()"]


def test_bindings_load_no_library_and_no_foreign_package_on_import():
    code = """
import sys
from trlow.binding import clib, cudart, driver, host, nccl
print([name for name in sys.modules if name.split(".")[0] in {"cuda", "numpy"}])
print([clib.copies(name) for name in ("cudart", "cuda", "nccl", "trlow_host")])
"""
    loaded, mapped = run_python(code).splitlines()
    assert "cuda" not in loaded
    assert mapped == "[(), (), (), ()]"


class Loaded:
    """As much of a Library as `config` asks: its version."""

    def __init__(self, version):
        self.version = version

    require = clib.Library.require
    interface = nccl.INTERFACE
    path = "somewhere"
    version_text = "old"


@pytest.mark.parametrize(("field", "since"), sorted(nccl.CONFIG_SINCE.items()))
def test_a_config_field_is_refused_below_its_version(field, since):
    value = b"name" if field in {"netName", "commName"} else 1
    assert getattr(nccl.config(Loaded(since), **{field: value}), field) == value
    with pytest.raises(LibraryError, match=rf"ncclConfig_t\.{field} needs NCCL >= 2"):
        nccl.config(Loaded(since - 1), **{field: value})


@pytest.mark.parametrize(("field", "since"), sorted(nccl.COLL_CONFIG_SINCE.items()))
def test_a_field_of_one_calls_config_is_refused_below_its_version(field, since):
    value = {"ext": None, "algSelection": b"RING_LL"}.get(field, 1)
    config = nccl.coll_config(Loaded(since), **{field: value})
    assert field == "ext" or getattr(config, field) == value
    with pytest.raises(LibraryError, match=r"needs NCCL >= 2\.3"):
        nccl.coll_config(Loaded(since - 1), **{field: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"minCTA": 1}, "no field 'minCTA'; it has blocking, "),
        ({"size": 1}, "no field 'size'"),
        ({"minCTAs": "four"}, "minCTAs cannot be 'four'"),
        ({"commName": 4}, "commName cannot be 4"),
        ({"minCTAs": 2**32 + 4}, "cannot hold 4294967300"),
    ],
)
def test_bad_config_values_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        nccl.config(Loaded(23203), **values)


def test_fields_of_a_blank_config_are_unset():
    config = nccl.config(Loaded(23203))
    numbers = {n for n in nccl.CONFIG_SINCE if n not in {"netName", "commName"}}
    assert {getattr(config, name) for name in numbers} == {-(2**31)}
    assert (config.netName, config.commName) == (None, None)
    assert nccl.coll_config(Loaded(23203)).forceAlgSelection == 1
    assert nccl.sim_info().estimatedTime == -1.0
