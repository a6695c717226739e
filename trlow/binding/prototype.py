"""C declarations read as data: one line of C becomes argument types, result type and version.

Only the C that the tables of this package use is understood: functions without function-pointer or
array parameters, `typedef struct X* name;`, enums, scalar typedefs, one level of `#if MACRO >= N`.
Anything else raises UsageError when the table is read, so no function is ever bound by a guess.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from trlow.errors import UsageError

__all__ = ["Prototype", "read_enum", "read_prototypes", "read_types"]

_SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint,
    "long long": ctypes.c_longlong,
    "unsigned long long": ctypes.c_ulonglong,
    "size_t": ctypes.c_size_t,
    "uint64_t": ctypes.c_uint64,
    "float": ctypes.c_float,
}
_IF = re.compile(r"#if \w+ >= (\d+)")
_FUNCTION = re.compile(r"(?P<result>[\w ]+?\*?) ?(?P<name>\w+)\((?P<parameters>.*)\)")
_PARAMETER = re.compile(r"(?P<type>[\w ]+?) ?(?P<stars>\**) ?(?P<name>\w+)")
_HANDLE = re.compile(r"typedef struct \w+\* (\w+);")
_ENUM = re.compile(
    r"^(?:typedef )?enum (\w+) \{[^}]*\}|^typedef enum \{[^}]*\} (\w+);", re.MULTILINE
)
_ENUM_ALIAS = re.compile(r"^\} (\w+);|^typedef enum \w+ (\w+);", re.MULTILINE)
_SCALAR = re.compile(rf"typedef ({'|'.join(_SCALARS)}) (\w+);")
_CALLBACK = re.compile(r"typedef void \(\*(\w+)\)\(void\* \w+\);")


@dataclass(frozen=True, slots=True)
class Prototype:
    """One C function: its name is the exported symbol, `since` the version code that brought it."""

    name: str
    result: str  # the C type as written
    restype: Any  # its ctypes type
    parameters: tuple[str, ...]  # the C types as written, without names
    argtypes: tuple[Any, ...]
    since: int  # 0: in every version that trlow supports


def read_types(text: str, structures: Mapping[str, Any]) -> dict[str, Any]:
    """The ctypes types of the names that `text` defines; `structures` gives those of its structs.

    Handles become c_void_p (an int in Python), enums c_int, `void (*)(void*)` a CFUNCTYPE.
    """
    types: dict[str, Any] = dict(_SCALARS)
    types |= dict.fromkeys(_HANDLE.findall(text), ctypes.c_void_p)
    for pattern in (_ENUM, _ENUM_ALIAS):
        for names in pattern.findall(text):
            types |= dict.fromkeys(filter(None, names), ctypes.c_int)
    types |= {name: _SCALARS[scalar] for scalar, name in _SCALAR.findall(text)}
    types |= dict.fromkeys(_CALLBACK.findall(text), ctypes.CFUNCTYPE(None, ctypes.c_void_p))
    return types | dict(structures)


def read_enum(text: str, name: str) -> Any:
    """The IntEnum that `text` defines as `enum name { … }` or `typedef enum { … } name;`.

    Made from the C text, so no code stands in two places; typed Any because mypy cannot read C.
    """
    match = re.search(rf"enum {name} \{{([^}}]*)\}}|enum \w*\s?\{{([^}}]*)\}} {name};", text)
    if match is None:
        raise UsageError(f"no enum {name} is declared")
    pairs = (entry.split("=") for entry in (match[1] or match[2]).split(","))
    return IntEnum(name, {key.strip(): int(value, 0) for key, value in pairs})


def read_prototypes(text: str, types: Mapping[str, Any]) -> dict[str, Prototype]:
    """Every function of `text` by name. UsageError names a line that is not understood."""
    table: dict[str, Prototype] = {}
    for since, statement in _statements(text):
        match = _FUNCTION.fullmatch(statement)
        if match is None:
            raise UsageError(f"not a C prototype that can be bound: {statement!r}")
        if match["name"] in table:
            raise UsageError(f"{match['name']} is declared twice")
        void = match["parameters"] == "void"
        parameters = () if void else tuple(match["parameters"].split(", "))
        declared = tuple(_without_name(parameter, statement) for parameter in parameters)
        table[match["name"]] = Prototype(
            name=match["name"],
            result=match["result"],
            restype=_ctype(match["result"], types, statement),
            parameters=declared,
            argtypes=tuple(_ctype(parameter, types, statement) for parameter in declared),
            since=since,
        )
    return table


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """(version code, statement without its semicolon), white space folded."""
    since = 0
    pending: list[str] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("#"):
            condition = _IF.fullmatch(line)
            if pending or (condition is None and line != "#endif"):
                raise UsageError(f"not a version guard that can be read: {line!r}")
            since = int(condition[1]) if condition else 0
            continue
        pending.append(line)
        if line.endswith(";"):
            yield since, " ".join(pending)[:-1]
            pending = []
    if pending:
        raise UsageError(f"a prototype does not end: {' '.join(pending)!r}")


def _without_name(parameter: str, statement: str) -> str:
    match = _PARAMETER.fullmatch(parameter)
    if match is None:
        raise UsageError(f"parameter {parameter!r} of {statement!r} cannot be read")
    return match["type"] + match["stars"]


def _ctype(declared: str, types: Mapping[str, Any], statement: str) -> Any:
    """The ctypes type of a C type. `void*` and handles take an address as an int."""
    bare = declared.rstrip("*")
    stars = len(declared) - len(bare)
    base = re.sub(r"\b(const|struct|enum) ", "", bare)
    if base == "void" and stars:
        result: Any = ctypes.c_void_p
        stars -= 1
    elif base == "char" and stars and (stars > 1 or bare.startswith("const ")):
        result = ctypes.c_char_p
        stars -= 1
    elif base == "char" and stars:
        result = ctypes.c_char
    elif base in types:
        result = types[base]
    else:
        raise UsageError(f"type {declared!r} of {statement!r} is not declared")
    for _ in range(stars):
        result = ctypes.POINTER(result)
    return result
