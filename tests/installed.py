"""Run a part of the tests against an installed wheel, where the checkout cannot be imported.

What it finds is what an install in place hides: a module, a kernel source or a library that the
wheel lacks. The wheel goes into an environment of its own; its dependencies are borrowed from the
environment that runs this script. Arguments go to pytest.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Every floor once: the pure tower's layering, the host device and its kernels, the command line.
PARTS = (
    "tests/pure/test_layering.py",
    "tests/host/test_import.py",
    "tests/host/test_readme_example.py",
    "tests/host/cli",
)


def main() -> int:
    """Build, install, copy the tests, run them; return pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="trlow-installed-") as name:
        folder = Path(name)
        python = install(build(folder), folder / "venv")
        for part in ("tests", "README.md", "pyproject.toml"):
            source = ROOT / part
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / part)
        script = "import trlow; print(trlow.__file__)"
        place = subprocess.run(
            [python, "-c", script], cwd=folder, check=True, capture_output=True, text=True
        ).stdout.strip()
        if not Path(place).is_relative_to(folder):
            print(f"trlow was imported from {place} and not from the wheel", file=sys.stderr)
            return 1
        print(f"tests of the wheel, installed in {place}")
        command = [python, "-m", "pytest", "-q", "-m", "not slow", *PARTS, *sys.argv[1:]]
        return subprocess.run(command, cwd=folder).returncode


def build(folder: Path) -> Path:
    """Build the wheel with the backend that this environment has; return its file."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("trlow-*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel alone into a new environment that sees our packages; return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    variables = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", variables))
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "--python", python, "install", *options, wheel]
    subprocess.run(command, check=True)
    # A path in a .pth file is searched last, and its own .pth files, such as the one of an install
    # in place, are not read.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


if __name__ == "__main__":
    sys.exit(main())
