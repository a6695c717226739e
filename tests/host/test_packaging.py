"""What is shipped: the source archive builds, and the wheel holds what it needs."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build" / "native"

pytestmark = pytest.mark.skipif(
    not (ROOT / "native").is_dir(), reason="the sources are not here: an installed wheel is tested"
)


def hatchling(folder: Path, target: str, out: Path, **variables: str):
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, **variables},
    )


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """The source archive, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    done = hatchling(ROOT, "sdist", folder)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("trlow-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (unpacked,) = (path for path in folder.iterdir() if path.is_dir())
    if OBJECTS.is_dir():
        # Objects are named by a hash of all that went into them, so those of the same sources save
        # a minute, and a source or header that the archive lacks would still be missed.
        ours = shutil.ignore_patterns("linked", "address", "thread")
        shutil.copytree(OBJECTS, unpacked / "build" / "native", ignore=ours)
    return unpacked


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    """The wheel, built from the source archive: what the archive lacks would be missing here."""
    folder = tmp_path_factory.mktemp("wheel")
    done = hatchling(sources, "wheel", folder)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.timeout(400)
def test_the_wheel_is_of_this_platform_and_any_python(wheel):
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{platform}.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/WHEEL"))
        facts = email.message_from_bytes(archive.read(name))
    assert facts["Root-Is-Purelib"] == "false"
    assert facts["Tag"] == f"py3-none-{platform}"


@pytest.mark.timeout(400)
def test_the_wheel_holds_library_kernels_and_every_module_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "trlow").rglob("*.py")
        if "_native" not in path.parts
    }
    kernels = {f"trlow/_native/kernels/{path.name}" for path in (ROOT / "native/kernels").iterdir()}
    assert len(modules) > 20
    assert len(kernels) > 10
    extra = {"trlow/_native/libtrlow_host.so", "trlow/py.typed", "trlow/torch/README.md"}
    assert names == modules | kernels | extra


@pytest.mark.timeout(400)
def test_the_core_needs_numpy_and_cuda_python_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        facts = email.message_from_bytes(archive.read(name))
    needs = [need for need in facts.get_all("Requires-Dist") if "extra ==" not in need]
    assert sorted(need.split(">")[0].strip() for need in needs) == ["cuda-python", "numpy"]
    extras = {"cu12", "cu13", "cli", "data", "plot", "torch", "test", "dev"}
    assert set(facts.get_all("Provides-Extra")) == extras
    assert facts["License-Expression"] == "MIT"


def test_the_source_archive_holds_sources_and_nothing_that_was_built(sources):
    (archive,) = sources.parent.glob("trlow-*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {name.partition("/")[2] for name in tar.getnames()}
    assert {"native/build.py", "native/hatch_build.py", "Makefile", "README.md"} <= files
    assert not [name for name in files if "_native" in name or name.endswith((".so", ".o", ".pyc"))]
    assert not [name for name in files if name.startswith((".venv", ".git/", "build/"))]


def test_without_a_compiler_the_build_says_so_in_one_line(sources, tmp_path):
    # A fresh copy would compile; one that cannot must say what to install. PATH holds no compiler.
    done = hatchling(sources, "wheel", tmp_path, PATH=str(tmp_path), CXX="")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert "host device was not built" in line
    assert "g++" in line
    assert list(tmp_path.iterdir()) == []


def test_every_dependency_says_what_it_is_for():
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    project = tomllib.loads("\n".join(lines))["project"]
    needs = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    for need in needs:
        written = [line for line in lines if f'"{need}"' in line]
        assert written
        assert all("#" in line for line in written), need


def test_every_ignored_lint_says_why():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lint = text[text.index("[tool.ruff.lint]") : text.index("[tool.mypy]")]
    rules = [line for line in lint.splitlines() if line.startswith('    "')]
    assert len(rules) > 20
    assert all("#" in line for line in rules), rules
