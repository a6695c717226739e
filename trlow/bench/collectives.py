"""One record per collective: its call, its sizes and its bandwidths, as nccl-tests counts them.

A size is the larger of what a rank sends and receives; `count` is the element count in the call.
algbw is size over time; busbw is algbw times a factor that makes it comparable with a link's speed
if data goes around a ring. Under NVLS, where switches add, it is only ring-equivalent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trlow.errors import SettingsError

PLACES = ("out-of-place", "in-place")


@dataclass(frozen=True, slots=True)
class Collective:
    """What distinguishes one collective from the others."""

    name: str
    function: str  # of NCCL
    log_name: str  # in NCCL's log
    factor: Callable[[int], float]  # busbw over algbw, and bytes on a rank's link over size
    reduces: bool = False
    rooted: bool = False
    split: str = ""  # the side that has only 1/N of the size: "send", "recv" or neither
    in_place: bool = True
    algorithms: frozenset[str] = frozenset()  # that NCCL has for it at all

    def unit(self, itemsize: int, ranks: int) -> int:
        """What a size must be a multiple of."""
        return itemsize * ranks if self.split else itemsize

    def count(self, nbytes: int, itemsize: int, ranks: int) -> int:
        """Elements as the call takes them."""
        return nbytes // self.unit(itemsize, ranks)

    def counts(self, count: int, ranks: int) -> tuple[int, int]:
        """Elements that a rank sends and that it receives."""
        whole = count * ranks
        return (
            count if self.split in {"", "send"} else whole,
            count if self.split in {"", "recv"} else whole,
        )

    def check_size(self, nbytes: int, itemsize: int, ranks: int) -> None:
        """Raise SettingsError for a size that is no whole number of elements on every rank."""
        unit = self.unit(itemsize, ranks)
        if nbytes % unit:
            below = nbytes // unit * unit
            parts = f"{ranks} ranks x {itemsize} bytes" if self.split else f"{itemsize} bytes"
            raise SettingsError(
                f"size {nbytes} of {self.name} is no multiple of {unit} ({parts}); use "
                f"{below or unit} or {below + unit}"
            )


def _around(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice_around(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _once(_ranks: int) -> float:
    return 1.0


_RINGS = frozenset({"Ring"})
_SPLIT = frozenset({"Ring", "CollNetDirect", "NVLS", "PAT"})
_ALL = (
    Collective(
        "all_reduce",
        "ncclAllReduce",
        "AllReduce",
        _twice_around,
        reduces=True,
        algorithms=frozenset({"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"}),
    ),
    Collective(
        "reduce_scatter",
        "ncclReduceScatter",
        "ReduceScatter",
        _around,
        reduces=True,
        split="recv",
        algorithms=_SPLIT,
    ),
    Collective(
        "all_gather", "ncclAllGather", "AllGather", _around, split="send", algorithms=_SPLIT
    ),
    Collective("broadcast", "ncclBroadcast", "Broadcast", _once, rooted=True, algorithms=_RINGS),
    Collective(
        "reduce", "ncclReduce", "Reduce", _once, reduces=True, rooted=True, algorithms=_RINGS
    ),
    Collective("sendrecv", "ncclSend", "SendRecv", _once, in_place=False),
)
COLLECTIVES: Mapping[str, Collective] = MappingProxyType({one.name: one for one in _ALL})
