"""NCCL's structures, and how their fields are set for the library that is loaded.

NCCL copies as much of a configuration as it knows and ignores the rest in silence, so one struct of
the newest layout serves every version, and it is here that a field which the loaded library does
not know is refused.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TypeVar

from trlow.binding.clib import Library
from trlow.errors import UsageError

__all__ = [
    "COLL_CONFIG_SINCE",
    "CONFIG_SINCE",
    "STRUCTURES",
    "CollConfig",
    "Config",
    "ConfigExt",
    "SimInfo",
    "UniqueId",
    "WaitSignalDesc",
    "coll_config",
    "config",
    "sim_info",
]

_LAYOUT = 23203  # the release whose header the structures below repeat
_MAGIC = 0xCAFEBEEF
_SIM_MAGIC = 0x74685283
_UNSET = -(2**31)  # NCCL_CONFIG_UNDEF_INT


class UniqueId(ctypes.Structure):
    """ncclUniqueId: 128 raw bytes, NULs among them, passed by value. `bytes(id)` reads them all."""

    _fields_ = (("internal", ctypes.c_ubyte * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t of 2.32, 120 bytes; make one with `config`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_char_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int),
        ("graphUsageMode", ctypes.c_int),
        ("numRmaCtx", ctypes.c_int),
        ("maxP2pPeers", ctypes.c_int),
        ("graphStreamOrdering", ctypes.c_int),
        ("launchOrderImplicit", ctypes.c_int),
        ("numRmaSig", ctypes.c_int),
        ("rmaEagerInit", ctypes.c_int),
        ("hostCftMode", ctypes.c_int),
        ("nvlsHostMode", ctypes.c_int),
    )


class ConfigExt(ctypes.Structure):
    """ncclConfigExt_t: one option of a vendor's library; NVIDIA's ignores all of them."""

    class Key(ctypes.Structure):
        """Who reads the option, and which it is."""

        _fields_ = (("vendorId", ctypes.c_int), ("optionId", ctypes.c_int))

    class Value(ctypes.Union):
        """An int, a C string or an address."""

        _fields_ = (("i", ctypes.c_int), ("s", ctypes.c_char_p), ("raw", ctypes.c_void_p))

    _fields_ = (("next", ctypes.c_void_p), ("key", Key), ("val", Value))


class CollConfig(ctypes.Structure):
    """ncclCollConfig_t of 2.32, the options of one call; make one with `coll_config`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("ext", ctypes.POINTER(ConfigExt)),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("algSelection", ctypes.c_char_p),
        ("forceAlgSelection", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("userProfilerTag", ctypes.c_uint64),
        ("launchCompletionEvent", ctypes.c_void_p),
    )


class SimInfo(ctypes.Structure):
    """ncclSimInfo_t; make one with `sim_info`."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("estimatedTime", ctypes.c_float),
    )


class WaitSignalDesc(ctypes.Structure):
    """ncclWaitSignalDesc_t: how many signals of which peer to wait for."""

    _fields_ = (
        ("opCnt", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("sigIdx", ctypes.c_int),
        ("ctx", ctypes.c_int),
    )


STRUCTURES: Mapping[str, type[ctypes.Structure]] = {
    "ncclUniqueId": UniqueId,
    "ncclConfig_t": Config,
    "ncclConfigExt_t": ConfigExt,
    "ncclCollConfig_t": CollConfig,
    "ncclSimInfo_t": SimInfo,
    "ncclWaitSignalDesc_t": WaitSignalDesc,
}

# The release that brought each field, read from the headers of the releases.
CONFIG_SINCE: Mapping[str, int] = {
    "blocking": 21400,
    **dict.fromkeys(("cgaClusterSize", "minCTAs", "maxCTAs", "netName"), 21700),
    "splitShare": 21800,
    "trafficClass": 22600,
    **dict.fromkeys(("commName", "collnetEnable", "CTAPolicy", "shrinkShare", "nvlsCTAs"), 22700),
    **dict.fromkeys(("nChannelsPerNetPeer", "nvlinkCentricSched"), 22800),
    **dict.fromkeys(("graphUsageMode", "numRmaCtx"), 22900),
    "maxP2pPeers": 23000,
    "graphStreamOrdering": 23007,
    **dict.fromkeys(("launchOrderImplicit", "numRmaSig", "rmaEagerInit", "hostCftMode"), 23100),
    "nvlsHostMode": 23200,
}
COLL_CONFIG_SINCE: Mapping[str, int] = {
    **dict.fromkeys(("ext", "minCTAs", "maxCTAs", "nvlsCTAs", "cgaClusterSize"), 23100),
    **dict.fromkeys(("algSelection", "forceAlgSelection", "CTAPolicy", "userProfilerTag"), 23100),
    "launchCompletionEvent": 23200,
}

_Filled = TypeVar("_Filled", Config, CollConfig)


def config(library: Library, **values: int | str | bytes) -> Config:
    """An ncclConfig_t with every field unset but `values`.

    Raises LibraryError if the loaded library is too old for a field, UsageError if there is no such
    field or its value has the wrong type or does not fit.
    """
    blank = Config(size=ctypes.sizeof(Config), magic=_MAGIC, version=_LAYOUT)
    for name, kind in Config._fields_[3:]:
        if kind is ctypes.c_int:
            setattr(blank, name, _UNSET)
    return _filled(blank, "ncclConfig_t", CONFIG_SINCE, library, values)


def coll_config(library: Library, **values: object) -> CollConfig:
    """An ncclCollConfig_t with every field unset but `values`, for one call (ncclAllReduceConfig…).

    The caller keeps it alive during the call. Errors as of `config`; NCCL before 2.31 has none.
    """
    library.require("ncclCollConfig_t", min(COLL_CONFIG_SINCE.values()))
    blank = CollConfig(
        size=ctypes.sizeof(CollConfig), magic=_MAGIC, version=_LAYOUT, forceAlgSelection=1
    )
    for name in ("minCTAs", "maxCTAs", "nvlsCTAs", "cgaClusterSize", "CTAPolicy"):
        setattr(blank, name, _UNSET)
    return _filled(blank, "ncclCollConfig_t", COLL_CONFIG_SINCE, library, values)


def sim_info() -> SimInfo:
    """An ncclSimInfo_t as ncclGroupSimulateEnd wants it; estimatedTime is -1 until it is known."""
    return SimInfo(
        size=ctypes.sizeof(SimInfo), magic=_SIM_MAGIC, version=_LAYOUT, estimatedTime=-1.0
    )


def _filled(
    blank: _Filled,
    title: str,
    since: Mapping[str, int],
    library: Library,
    values: Mapping[str, object],
) -> _Filled:
    kinds = {field[0]: field[1] for field in blank._fields_}
    for name, value in values.items():
        if name not in since:
            raise UsageError(f"{title} has no field {name!r}; it has {', '.join(since)}")
        library.require(f"{title}.{name}", since[name])
        given = value.encode() if isinstance(value, str) else value
        # ctypes would take an int for a string, as its address.
        if isinstance(given, bytes) != (kinds[name] is ctypes.c_char_p):
            raise UsageError(f"{title}.{name} cannot be {value!r}")
        try:
            setattr(blank, name, given)
        except TypeError as error:
            raise UsageError(f"{title}.{name} cannot be {value!r}: {error}") from error
        if isinstance(given, int) and (getattr(blank, name) or 0) != given:
            raise UsageError(f"{title}.{name} cannot hold {given}: its C type is too small")
    return blank
