"""NCCL: how it is found, and what its errors say. `nccl_header` declares the interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from trlow.binding import clib
from trlow.binding.clib import Interface, Library
from trlow.binding.nccl_config import (
    COLL_CONFIG_SINCE,
    CONFIG_SINCE,
    STRUCTURES,
    CollConfig,
    Config,
    ConfigExt,
    SimInfo,
    UniqueId,
    WaitSignalDesc,
    coll_config,
    config,
    sim_info,
)
from trlow.binding.nccl_header import (
    PROTOTYPES,
    TYPES,
    ncclCommMemStat_t,
    ncclDataType_t,
    ncclRedOp_t,
    ncclResult_t,
    ncclScalarResidence_t,
)
from trlow.binding.prototype import read_prototypes, read_types
from trlow.errors import NcclError

__all__ = [
    "COLL_CONFIG_SINCE",
    "CONFIG_SINCE",
    "INTERFACE",
    "PROTOTYPES",
    "STRUCTURES",
    "TYPES",
    "CollConfig",
    "Config",
    "ConfigExt",
    "SimInfo",
    "UniqueId",
    "WaitSignalDesc",
    "coll_config",
    "config",
    "load",
    "ncclCommMemStat_t",
    "ncclDataType_t",
    "ncclRedOp_t",
    "ncclResult_t",
    "ncclScalarResidence_t",
    "sim_info",
]


def load(path: str | None = None, *, variables: Mapping[str, str] | None = None) -> Library:
    """NCCL from `path`, or else from where cuda.pathfinder finds it. LibraryError.

    Errors of its calls show the NCCL_* entries of `variables`, the environment that NCCL reads.
    """
    return clib.find(replace(INTERFACE, failure=partial(_failure, variables or {})), path)


def _version_text(code: int) -> str:
    """22809 -> "2.28.9" (2.9 and later)."""
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _failure(variables: Mapping[str, str], library: Library, function: str, code: int) -> NcclError:
    """`ncclGetLastError` may speak of an earlier failure, so it is shown and never decided by."""
    text: bytes | None = library.ncclGetErrorString(code)
    last: bytes | None = library.ncclGetLastError(None)
    name = _NAMES.get(code, "unknown result")
    details = [(text or b"").decode(errors="replace")]
    if last and last.strip():
        details.append(f"last error: {last.decode(errors='replace').strip()}")
    settings = [f"{key}={variables[key]}" for key in sorted(variables) if key.startswith("NCCL_")]
    if settings:
        details.append(f"in effect: {' '.join(settings)}")
    return NcclError(function, code, name, detail="; ".join(filter(None, details)))


_NAMES = {int(code): code.name for code in ncclResult_t}
# A communicator made with blocking = 0 may answer "in progress" to whatever uses it; one that
# blocks never does.
_IN_PROGRESS = frozenset({ncclResult_t.ncclInProgress})
_TABLE = read_prototypes(PROTOTYPES, read_types(TYPES, STRUCTURES))

INTERFACE = Interface(
    title="NCCL",
    short="nccl",
    prototypes=_TABLE,
    status="ncclResult_t",
    failure=partial(_failure, {}),
    version_function="ncclGetVersion",
    minimum=21400,  # the first with ncclConfig_t
    version_text=_version_text,
    tolerated={
        name: _IN_PROGRESS
        for name, prototype in _TABLE.items()
        if name == "ncclGroupEnd" or any("ncclComm_t" in kind for kind in prototype.parameters)
    },
    remedy="pip install 'trlow[cu13]' or name the file in Settings.nccl_library",
)
