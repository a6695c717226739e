"""A shared library whose every call is checked.

A `Library` has one attribute per function of its table: a ctypes function with argument types,
result type and an `errcheck`, so that no call can skip the check and no pointer is cut to 32 bits.
Functions bind at first use, because an older library may lack some; the gate compares the full
version code AND the symbol, and never skips in silence. Only `ctypes.CDLL` is used: `PyDLL` would
keep the interpreter locked during the call. ctypes cuts an int that a C type cannot hold; ranges
are checked above this floor.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock, get_ident
from typing import Any

from trlow.binding.prototype import Prototype
from trlow.errors import ForeignError, LibraryError

__all__ = [
    "ANY_CODE",
    "Interface",
    "Library",
    "Prepared",
    "copies",
    "count",
    "counting",
    "find",
    "is_counting",
    "open_library",
]

ANY_CODE = range(-(2**31), 2**31)  # of a function whose return value is an answer, not a verdict

Calls = Counter[tuple[int, str]]
_counters: list[Calls] = []
_counters_lock = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """What one library is to trlow: its functions, how it tells its version, how it fails."""

    title: str  # in messages: "NCCL"
    short: str  # cuda.pathfinder's name, and lib<short>.so: "nccl"
    prototypes: Mapping[str, Prototype]
    status: str  # the C result type that is an error code
    failure: Callable[[Library, str, int], ForeignError]
    version_function: str | None = None
    minimum: int = 0  # the oldest version code that can be used at all
    version_text: Callable[[int], str] = str
    tolerated: Mapping[str, Container[int]] = field(default_factory=dict)  # beside 0
    remedy: str = ""  # what to do when it is missing


class Prepared(partial[Any]):
    """A call of C whose arguments are converted already: to be called, or to be put into a list."""

    __slots__ = ("given", "library", "name")
    library: Library
    name: str
    given: tuple[Any, ...]  # its arguments, as they were


class Library:
    """A loaded library. `path` is the file the loader took, `how` says who named it."""

    def __init__(self, interface: Interface, cdll: ctypes.CDLL, how: str) -> None:
        """Ask for the version before anything else; LibraryError if too old or not this library."""
        self.interface = interface
        self.how = how
        self.path = _loaded_from(cdll)
        self.version = 0
        self._cdll = cdll
        self._unconverting: dict[str, Callable[..., Any]] = {}  # for converted arguments alone
        if interface.version_function is not None:
            if not self._exports(interface.version_function):
                raise LibraryError(
                    f"{self.path} is not {interface.title}: it has no {interface.version_function}"
                )
            version = ctypes.c_int()
            self._bind(interface.prototypes[interface.version_function])(ctypes.byref(version))
            self.version = version.value
        self.require("trlow", interface.minimum)

    def __repr__(self) -> str:
        return f"<{self.interface.title} {self.version_text} from {self.path} ({self.how})>"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Bind the C function `name`; the next look-up finds it as a plain attribute.

        Raises AttributeError if the table has no such function, LibraryError if the loaded library
        is too old for it.
        """
        if name.startswith("_"):
            raise AttributeError(name)
        function = self._bind(self._gated(name))
        setattr(self, name, function)
        return function

    def address(self, name: str) -> int:
        """Where the C function `name` is. AttributeError, LibraryError as for its attribute."""
        self._gated(name)
        return ctypes.cast(self._cdll[name], ctypes.c_void_p).value or 0

    def prepare(self, name: str, *arguments: Any) -> Prepared:
        """The call `name(*arguments)`, for loops in which converting them is most of the cost.

        The prototype converts them here, once; the call then passes what came of it. It is checked
        and counted as any other. AttributeError, LibraryError as for the function itself; TypeError
        for arguments that the prototype does not take.
        """
        getattr(self, name)  # the gate
        prototype = self.prototype(name)
        if len(arguments) != len(prototype.argtypes):
            raise TypeError(
                f"{name} takes {len(prototype.argtypes)} arguments, got {len(arguments)}"
            )
        pairs = zip(prototype.argtypes, arguments, strict=True)
        converted = [argtype.from_param(argument) for argtype, argument in pairs]
        if name not in self._unconverting:
            self._unconverting[name] = self._bind(prototype, convert=False)
        prepared = Prepared(self._unconverting[name], *converted)
        prepared.library, prepared.name, prepared.given = self, name, arguments
        return prepared

    @property
    def version_text(self) -> str:
        """The version as people write it."""
        return self.interface.version_text(self.version)

    def has(self, name: str) -> bool:
        """Whether `name` can be called: version and symbol. AttributeError on an unknown name."""
        return self.version >= self.prototype(name).since and self._exports(name)

    def require(self, what: str, since: int) -> None:
        """Raise LibraryError if the library is older than version code `since`."""
        if self.version < since:
            raise LibraryError(
                f"{what} needs {self.interface.title} >= {self.interface.version_text(since)}, "
                f"loaded {self.version_text} from {self.path}"
            )

    def judge(self, name: str, code: int) -> None:
        """Raise the error of a call of `name` that returned `code`, unless that is no failure."""
        if code and code not in self.interface.tolerated.get(name, ()):
            raise self.interface.failure(self, name, code)

    def prototype(self, name: str) -> Prototype:
        """How `name` is declared, whether or not the loaded library has it. AttributeError."""
        try:
            return self.interface.prototypes[name]
        except KeyError:
            raise AttributeError(
                f"trlow binds no {self.interface.title} function {name!r}"
            ) from None

    def _gated(self, name: str) -> Prototype:
        """How `name` is declared, if the loaded library has it."""
        prototype = self.prototype(name)
        self.require(name, prototype.since)
        if not self._exports(name):
            raise LibraryError(
                f"{self.interface.title} {self.version_text} from {self.path} has no {name}, "
                f"although its version should; {self.interface.remedy or 'use another build'}"
            )
        return prototype

    def _exports(self, name: str) -> bool:
        try:
            self._cdll[name]
        except AttributeError:
            return False
        return True

    def _bind(self, prototype: Prototype, *, convert: bool = True) -> Callable[..., Any]:
        function = self._cdll[prototype.name]
        if convert:
            function.argtypes = prototype.argtypes
        function.restype = prototype.restype
        function.errcheck = self._check(prototype)
        return function

    def _check(self, prototype: Prototype) -> Callable[[Any, Any, Any], Any]:
        """What runs after every call: tens of nanoseconds while nothing failed or is counted."""
        name = prototype.name
        fail = self.interface.failure
        allowed = self.interface.tolerated.get(name, ())

        def check_status(code: int, _function: Any, _arguments: Any) -> int:
            if _counters:
                count((name,))
            if code and code not in allowed:
                raise fail(self, name, code)
            return code

        def pass_result(result: Any, _function: Any, _arguments: Any) -> Any:
            if _counters:
                count((name,))
            return result

        return check_status if prototype.result == self.interface.status else pass_result


def find(interface: Interface, path: str | None) -> Library:
    """Load from `path`, which is never replaced by another, or else where cuda.pathfinder finds it.

    Raises LibraryError that lists where it looked.
    """
    if path is not None:
        return open_library(interface, path, "settings")
    try:
        from cuda import pathfinder  # noqa: PLC0415  foreign: loads only when used
    except ImportError as error:
        raise LibraryError(
            f"{interface.title} was not found: no path was given, and cuda.pathfinder, which would "
            "search, is not installed; pip install cuda-python"
        ) from error
    try:
        found = pathfinder.load_nvidia_dynamic_lib(interface.short)
    except RuntimeError as error:  # the root of pathfinder's "not found" and "not available"
        raise LibraryError(
            f"{interface.title} was not found; looked: no path was given; the wheels in "
            f"{', '.join(_site_packages()) or 'no site-packages'}; conda; the system loader "
            f"(LD_LIBRARY_PATH, ldconfig); CUDA_HOME; cuda.pathfinder says: "
            f"{' '.join(str(error).split()).rstrip('.')}; {interface.remedy}"
        ) from error
    return open_library(interface, str(found.abs_path), "pathfinder")


def open_library(interface: Interface, path: str, how: str) -> Library:
    """Load the file `path` (RTLD_LOCAL) as `interface`. LibraryError carries the loader's words."""
    try:
        cdll = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise LibraryError(
            f"{interface.title} cannot be loaded from {path!r} ({how}): {error}; "
            f"{interface.remedy or 'name another file'}"
        ) from error
    return Library(interface, cdll, how)


def copies(short: str) -> tuple[str, ...]:
    """Paths of every lib<short>.so that this process has mapped; more than one is worth a warning.

    Wheels that bundle a library add a hash to its name (libcudart-1a2b3c4d.so.12); these count.
    """
    pattern = re.compile(rf"lib{re.escape(short)}(-[0-9a-f]+)?\.so(\.[0-9]+)*")
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    paths = {line.split(maxsplit=5)[-1] for line in mapped.splitlines() if "/" in line}
    return tuple(sorted(path for path in paths if pattern.fullmatch(Path(path).name)))


@contextmanager
def counting() -> Iterator[Calls]:
    """Count the calls that return while the body runs, by (thread identity, C name).

    Every library and thread is seen; counters may nest. Outside of this a call pays for one test.
    """
    calls: Calls = Counter()
    with _counters_lock:
        _counters.append(calls)
    try:
        yield calls
    finally:
        with _counters_lock:
            _counters[:] = [other for other in _counters if other is not calls]


def is_counting() -> bool:
    """Whether anybody counts calls."""
    return bool(_counters)


def count(names: Iterable[str]) -> None:
    """Note calls of the calling thread that returned, wherever calls are counted."""
    for calls in tuple(_counters):
        for name in names:
            calls[get_ident(), name] += 1  # no two threads share a key: no increment is lost


def _site_packages() -> list[str]:
    return [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]


class _LinkMap(ctypes.Structure):
    """The public head of glibc's struct link_map (link.h)."""

    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


def _loaded_from(cdll: ctypes.CDLL) -> str:
    """The real path of the file that the loader took: a bare name does not tell."""
    dlinfo = ctypes.CDLL(None).dlinfo
    dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    dlinfo.restype = ctypes.c_int
    link_map = ctypes.POINTER(_LinkMap)()
    rtld_di_linkmap = 2  # dlfcn.h
    if dlinfo(cdll._handle, rtld_di_linkmap, ctypes.byref(link_map)) != 0:  # noqa: SLF001  ctypes keeps the handle there
        raise LibraryError(f"the loader does not tell where {cdll._name!r} came from")  # noqa: SLF001
    return str(Path(link_map.contents.l_name.decode(errors="surrogateescape")).resolve())
