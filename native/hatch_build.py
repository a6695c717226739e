"""Build hook: compiles the host device and adds it, with the kernel sources, to the wheel.

Nothing compiles at import, so the library has to be there when the package is. The hook always
compiles in place, into `trlow/_native`: an install in place finds it there, and a wheel takes it
from there. A checkout has the kernel sources in `native/kernels`, a wheel gets a copy of them.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles for the targets "wheel" (also in place); a source archive needs no compiler."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build `trlow/_native`, and declare a wheel of this platform that holds it."""
        if self.target_name != "wheel":
            return
        root = Path(self.root)
        native = root / "trlow" / "_native"
        try:
            library = _build_module(root).build(native)
        except Exception as error:
            # One line, then no traceback of the build backend: the reader needs the remedy.
            raise SystemExit(f"trlow: the host device was not built: {error}") from error
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # ctypes: any Python, one platform
        if version == "editable":
            return
        build_data["force_include"][str(library)] = f"trlow/_native/{library.name}"
        build_data["force_include"][str(root / "native" / "kernels")] = "trlow/_native/kernels"


def _build_module(root: Path) -> ModuleType:
    """Return `native/build.py` as a module: it is a script beside this one, not a package."""
    spec = importlib.util.spec_from_file_location("trlow_native_build", root / "native/build.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("native/build.py is missing from the sources")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
