"""Which image a device gets: CUBIN or PTX, kept or compiled, and never compiled twice."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trlow import kernel_image
from trlow.binding import nvrtc
from trlow.errors import CompileError, LibraryError
from trlow.kernel_cache import KernelCache
from trlow.kernel_image import Target, cache_key, choose_target, compile_source, image_of

KNOWN = (75, 80, 86, 90, 100, 120)
SOURCE = "range_metrics.cc"  # the fastest to compile
DRIVER = (99, 0)


@pytest.fixture(scope="module")
def compiler():
    try:
        return nvrtc.compiler()
    except LibraryError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path):
    return KernelCache(str(tmp_path / "kernels"))


@pytest.fixture
def compiled(monkeypatch, compiler):
    """A process that has made no image yet; the targets that it compiles for."""
    targets = []

    def counted(source, target):
        targets.append(target)
        return compile_source(source, target)

    monkeypatch.setattr(kernel_image, "_images", {})
    monkeypatch.setattr(kernel_image, "compile_source", counted)
    return targets


# ------------------------------------------------------------------------------- the target


@pytest.mark.parametrize("versions", [((13, 0), (13, 0)), ((13, 2), (12, 8)), ((12, 8), (13, 2))])
def test_a_known_architecture_is_a_cubin_whatever_the_versions(versions):
    for device in KNOWN:
        assert choose_target(device, KNOWN, *versions) == Target("cubin", device)


@pytest.mark.parametrize("driver", [(13, 0), (13, 1), (14, 0)])
@pytest.mark.parametrize(("device", "highest"), [(130, 120), (103, 100), (89, 86), (78, 75)])
def test_an_unknown_one_gets_ptx_of_the_highest_below_it_where_the_driver_is_not_older(
    device, highest, driver
):
    assert choose_target(device, KNOWN, (13, 0), driver) == Target("ptx", highest)


@pytest.mark.parametrize("driver", [(12, 9), (13, 0)])
def test_an_older_driver_is_an_error_with_both_versions_and_the_remedy(driver):
    with pytest.raises(CompileError) as caught:
        choose_target(130, KNOWN, (13, 1), driver)
    text = str(caught.value)
    assert caught.value.code == 5
    for words in (
        "NVRTC 13.1 does not know sm_130",
        f"the driver is for CUDA {driver[0]}.{driver[1]}",
        "install an NVRTC that knows sm_130, or a driver for CUDA 13.1 or newer",
    ):
        assert words in text


def test_a_gpu_older_than_everything_known_is_an_error_with_its_own_remedy():
    with pytest.raises(CompileError, match=r"older than sm_75.*NVRTC of an older CUDA"):
        choose_target(70, KNOWN, (12, 0), (13, 0))


# ---------------------------------------------------------------------------------- the key


def test_the_compiler_is_the_one_that_compiles(compiler):
    binding = pytest.importorskip("cuda.bindings.nvrtc")
    _, major, minor = binding.nvrtcVersion()
    assert compiler.version == (major, minor)
    assert f"{major}.{minor}" in compiler.identity
    assert compiler.path in (found := nvrtc.clib.copies("nvrtc"))
    assert len(found) == 1


def test_the_key_covers_source_header_options_and_compiler(compiler, monkeypatch, tmp_path):
    base = kernel_image.source_folder()
    for name in (SOURCE, "range_scale.cc", kernel_image.HEADER):
        (tmp_path / name).write_bytes((base / name).read_bytes())
    monkeypatch.setattr(kernel_image, "source_folder", lambda: tmp_path)
    cubin = Target("cubin", 90)
    keys = [cache_key(SOURCE, cubin, compiler)]
    assert cache_key(SOURCE, cubin, compiler) == keys[0]
    keys += [
        cache_key("range_scale.cc", cubin, compiler),
        cache_key(SOURCE, Target("cubin", 80), compiler),
        cache_key(SOURCE, Target("ptx", 90), compiler),
        cache_key(SOURCE, cubin, nvrtc.Compiler((13, 1), compiler.path, compiler.nbytes)),
        cache_key(SOURCE, cubin, nvrtc.Compiler(compiler.version, compiler.path, 1)),
    ]
    monkeypatch.setattr(kernel_image, "NVRTC_OPTIONS", ("--std=c++17",))
    keys.append(cache_key(SOURCE, cubin, compiler))
    for name in (SOURCE, kernel_image.HEADER):
        path = tmp_path / name
        path.write_bytes(path.read_bytes() + b"\n")
        keys.append(cache_key(SOURCE, cubin, compiler))
    assert len(set(keys)) == len(keys)


# -------------------------------------------------------------------------------- the image


def test_a_second_process_reads_what_the_first_compiled(compiled, cache, monkeypatch):
    image = image_of(SOURCE, 90, DRIVER, cache)
    assert image.startswith(b"\x7fELF")
    monkeypatch.setattr(kernel_image, "_images", {})
    assert image_of(SOURCE, 90, DRIVER, cache) == image
    assert compiled == [Target("cubin", 90)]


def test_a_poisoned_entry_is_compiled_again_and_written_anew(
    compiled, cache, tmp_path, monkeypatch
):
    image = image_of(SOURCE, 90, DRIVER, cache)
    (entry,) = (tmp_path / "kernels").iterdir()
    good = entry.read_bytes()
    entry.write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    monkeypatch.setattr(kernel_image, "_images", {})
    assert image_of(SOURCE, 90, DRIVER, cache) == image
    assert len(compiled) == 2
    assert entry.read_bytes() == good


@pytest.mark.parametrize("folder", [None, "/proc/trlow", "/dev/null/trlow"])
def test_without_a_cache_everything_is_compiled(compiled, folder):
    assert image_of(SOURCE, 90, DRIVER, KernelCache(folder)).startswith(b"\x7fELF")
    assert len(compiled) == 1


def test_an_architecture_that_nvrtc_does_not_know_is_ptx_and_is_kept_too(
    compiled, cache, monkeypatch
):
    highest = max(nvrtc.supported_architectures())
    image = image_of(SOURCE, 990, DRIVER, cache)
    assert f".target sm_{highest}".encode() in image
    assert image.endswith(b"\0")  # the driver reads PTX as text
    monkeypatch.setattr(kernel_image, "_images", {})
    assert image_of(SOURCE, 990, DRIVER, cache) == image
    assert compiled == [Target("ptx", highest)]
    with pytest.raises(CompileError, match="refuses PTX"):  # kept or not: this driver is older
        image_of(SOURCE, 990, (11, 0), cache)


def test_ranks_that_ask_at_once_compile_once(compiled, cache):
    images, gate = [], threading.Barrier(4)

    def rank():
        gate.wait()
        images.append(image_of(SOURCE, 90, DRIVER, cache))

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1
    assert len(images) == 4
    assert len(set(images)) == 1


def test_with_a_warm_cache_the_compilers_binding_is_not_imported(compiled, cache):
    image_of(SOURCE, 90, DRIVER, cache)
    script = (
        "import sys\n"
        "from trlow.kernel_cache import KernelCache\n"
        "from trlow.kernel_image import image_of\n"
        f"image = image_of({SOURCE!r}, int(sys.argv[2]), {DRIVER}, KernelCache(sys.argv[1]))\n"
        "print('cuda.bindings.nvrtc' in sys.modules)\n"
    )
    for architecture, imported in (("90", "False"), ("80", "True")):
        command = [sys.executable, "-c", script, cache.folder, architecture]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.stdout.strip(), done.stderr) == (imported, "")


def test_no_nvrtc_is_a_library_error(monkeypatch, cache):
    def missing(*_):
        raise LibraryError("NVRTC was not found")

    monkeypatch.setattr(nvrtc.clib, "find", missing)
    monkeypatch.setattr(kernel_image, "_images", {})
    nvrtc.compiler.cache_clear()
    with pytest.raises(LibraryError, match="NVRTC was not found"):
        image_of(SOURCE, 90, DRIVER, cache)
