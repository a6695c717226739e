"""The kernels of one device: found by their declarations, loaded, launched.

The declaration in a kernel's source is the only one: name, parameters and kind are read from it
here, so that a call with a wrong number of arguments fails before it reaches the driver. Every
parameter is 8 bytes, a pointer or a 64-bit extent. The host device has the same kernels compiled
in; for it nothing is compiled at run time.
"""

from __future__ import annotations

import re
from ctypes import addressof, byref, c_char_p, c_int, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from trlow.binding.driver import KernelNodeParams
from trlow.errors import UsageError
from trlow.kernel_image import image_of, source_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from ctypes import Array

    from trlow.binding.clib import Prepared
    from trlow.device import Platform

BLOCK_THREADS = 256
MAX_BLOCKS = 65_535  # kernels stride over the rest of their work
HOST_IMAGE = b"trlow-host-kernels\0"
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # cudaDeviceAttr

_DECLARATION = re.compile(
    r"^TRLOW_(BLOCK_)?KERNEL\(\s*(\w+)\s*,([^)]*)\)", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a kernel's source says of it."""

    name: str
    parameters: tuple[tuple[str, str], ...]  # (C type, name), each 8 bytes
    block: bool  # one block per work item, or a flat loop over the work items
    source: str  # file name

    @property
    def extents(self) -> tuple[bool, ...]:
        """Per parameter whether it is a 64-bit extent (True) or a pointer (False)."""
        return tuple("*" not in c_type for c_type, _ in self.parameters)

    def grid(self, work: int) -> int:
        """Blocks to launch for ``work`` items."""
        blocks = work if self.block else -(-work // BLOCK_THREADS)
        return min(max(blocks, 1), MAX_BLOCKS)


@cache
def declarations() -> dict[str, Declaration]:
    """Every declared kernel by name."""
    found: dict[str, Declaration] = {}
    for path in sorted(source_folder().glob("*.cc")):
        for block, name, parameters in _DECLARATION.findall(path.read_text()):
            pairs = tuple(_parameter(text) for text in parameters.split(","))
            found[name] = Declaration(name, pairs, bool(block), path.name)
    return found


def _parameter(text: str) -> tuple[str, str]:
    c_type, name = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    return re.sub(r"\s+", " ", c_type), name


class Kernels:
    """The kernels of one rank's device. Made, used and closed on the rank's own thread."""

    def __init__(self, platform: Platform, device: int) -> None:
        self._platform = platform
        self._device = device
        self._modules: dict[str, int] = {}
        self._functions: dict[str, int] = {}

    def load(self, names: Iterable[str]) -> None:
        """Load every kernel of ``names``, so that no launch is a first use later on.

        Raises ``UsageError`` for an unknown name, ``CompileError``, ``CudaError``.
        """
        for name in names:
            if name in self._functions:
                continue
            if name not in declarations():
                known = ", ".join(sorted(declarations()))
                message = f"no kernel is named {name!r}; there are {known}"
                raise UsageError(message)
            function = c_void_p()
            module = self._module(declarations()[name].source)
            self._platform.driver.cuModuleGetFunction(byref(function), module, name.encode())
            self._functions[name] = function.value or 0

    def _module(self, source: str) -> int:
        key, image = (
            ("host", HOST_IMAGE)
            if self._platform.name == "host"
            else (source, self._compiled(source))
        )
        if key not in self._modules:
            module = c_void_p()
            self._platform.driver.cuModuleLoadData(byref(module), c_char_p(image))
            self._modules[key] = module.value or 0
        return self._modules[key]

    def _compiled(self, source: str) -> bytes:
        major, minor = c_int(), c_int()
        get = self._platform.cudart.cudaDeviceGetAttribute
        get(byref(major), COMPUTE_CAPABILITY_MAJOR, self._device)
        get(byref(minor), COMPUTE_CAPABILITY_MINOR, self._device)
        version = self._platform.driver.version  # 13010 is CUDA 13.1
        driver = (version // 1000, version % 1000 // 10)
        cache = self._platform.kernel_cache
        return image_of(source, 10 * major.value + minor.value, driver, cache)

    def launch(self, name: str, values: Sequence[int], work: int, stream: int) -> None:
        """Enqueue one kernel on ``stream``. ``values`` are addresses and extents in order.

        Raises ``UsageError`` for a wrong number of values, ``CudaError``.
        """
        self._platform.driver.cuLaunchKernel(*self._launch(name, values, work, stream))

    def prepare(self, name: str, values: Sequence[int], work: int, stream: int) -> Prepared:
        """``launch`` as a call to be made later, and more than once."""
        arguments = self._launch(name, values, work, stream)
        return self._platform.driver.prepare("cuLaunchKernel", *arguments)

    def _launch(self, name: str, values: Sequence[int], work: int, stream: int) -> tuple[Any, ...]:
        """The arguments of cuLaunchKernel, which copies the values before it returns."""
        declaration = declarations()[name]
        if len(values) != len(declaration.parameters):
            message = f"{name} takes {len(declaration.parameters)} arguments, got {len(values)}"
            raise UsageError(message)
        grid, function = declaration.grid(work), self._functions[name]
        return function, grid, 1, 1, BLOCK_THREADS, 1, 1, 0, stream, _pack(values), None

    def add_node(
        self, name: str, values: Sequence[int], work: int, graph: int, before: Array[c_void_p]
    ) -> int:
        """Put a launch of ``name`` into ``graph`` behind the nodes ``before``; returns the node."""
        grid, node = declarations()[name].grid(work), c_void_p()
        launch = KernelNodeParams(
            self._functions[name], grid, 1, 1, BLOCK_THREADS, 1, 1, 0, _pack(values)
        )
        self._platform.driver.cuGraphAddKernelNode_v2(
            byref(node), graph, before, len(before), byref(launch)
        )
        return node.value or 0

    def warm(self, name: str, address: int, stream: int) -> None:
        """Launch ``name`` with every extent 0: it touches nothing, and is no longer a first use."""
        values = [0 if extent else address for extent in declarations()[name].extents]
        self.launch(name, values, 0, stream)

    def close(self) -> None:
        """Unload the modules; a second call does nothing."""
        self._functions.clear()
        while self._modules:
            _, module = self._modules.popitem()
            self._platform.driver.cuModuleUnload(module)


def _pack(values: Sequence[int]) -> Array[c_void_p]:
    """The addresses that cuLaunchKernel reads, and behind them the 8-byte values they lead to."""
    packed = (c_void_p * (2 * len(values)))()
    first = addressof(packed) + 8 * len(values)
    packed[:] = [*range(first, first + 8 * len(values), 8), *values]
    return packed
