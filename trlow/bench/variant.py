"""One way to run a collective, to be compared with others: what is forced, and how.

NCCL reads NCCL_ALGO, NCCL_PROTO and NCCL_GRAPH_MIXING_SUPPORT once in a process, so every variant
has a process of its own. From NCCL 2.31 on an algorithm can be chosen per call instead, by prefixes
of names such as RING_LL128. RING_LL would also match RING_LL128, so LL is always forced by
variables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from trlow.bench.collectives import Collective
from trlow.errors import SettingsError

# As NCCL spells them in NCCL_ALGO, and in algSelection.
ALGORITHMS = {
    "Ring": "RING",
    "Tree": "TREE",
    "NVLS": "NVLS",
    "NVLSTree": "NVLSTREE",
    "CollNetDirect": "COLLNET_DIRECT",
    "CollNetChain": "COLLNET_CHAIN",
    "PAT": "PAT",
}
PROTOCOLS = ("LL", "LL128", "Simple")
SIMPLE_ONLY = ("NVLS", "NVLSTree", "CollNetDirect", "CollNetChain", "PAT")
BUFFERS = ("plain", "registered", "window")
LAUNCHES = ("threads", "group")
SELECTION_SINCE = 23100  # version of NCCL with per-call configurations
NVLS_OFF = "NCCL_NVLS_ENABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What one worker process does differently; None leaves a choice to NCCL."""

    algo: str | None = None
    proto: str | None = None
    buffers: str = "plain"
    launch: str = "threads"
    ctas: tuple[int, int] | None = None  # least and most
    mixing: bool | None = None  # NCCL_GRAPH_MIXING_SUPPORT
    mean: str | None = None  # strategy of trlow's mean over ranks

    @property
    def name(self) -> str:
        """The parts that are not what NCCL and nccl-tests do by default."""
        parts = []
        if self.algo or self.proto:
            parts.append("/".join((self.algo or "any", self.proto or "any")))
        parts += [self.buffers] if self.buffers != "plain" else []
        parts += [self.launch] if self.launch != "threads" else []
        if self.ctas is not None:
            low, high = self.ctas
            parts.append(f"ctas={low}" if low == high else f"ctas={low}-{high}")
        if self.mixing is not None:
            parts.append(f"mixing={'on' if self.mixing else 'off'}")
        parts += [f"mean={self.mean}"] if self.mean else []
        return " ".join(parts) or "default"

    def selection(self, version: int) -> str | None:
        """The algSelection of each call, or None where variables have to force it."""
        if self.algo is None or version < SELECTION_SINCE or self.proto == "LL":
            return None
        # without a protocol the underscore keeps NVLS from matching NVLSTREE
        return f"{ALGORITHMS[self.algo]}_{(self.proto or '').upper()}"

    def environment(self, *, by_call: bool) -> dict[str, str]:
        """Variables that the process needs; with `by_call` the algorithm is chosen per call."""
        found = {}
        if self.algo is not None and not by_call:
            found["NCCL_ALGO"] = self.algo
        if self.proto is not None and not by_call:
            found["NCCL_PROTO"] = self.proto
        if self.mixing is not None:
            found["NCCL_GRAPH_MIXING_SUPPORT"] = str(int(self.mixing))
        return found

    def refused(self, collective: Collective, variables: Mapping[str, str]) -> str | None:
        """Why this pair is not even tried, or None."""
        if self.algo is None:
            return None
        if self.algo.startswith("NVLS") and variables.get(NVLS_OFF) == "0":
            return f"{NVLS_OFF}=0: NVLink multicast is switched off on this machine"
        if self.algo not in collective.algorithms:
            known = ", ".join(name for name in ALGORITHMS if name in collective.algorithms)
            return f"NCCL has no {self.algo} {collective.name}; it has {known or 'none to choose'}"
        if self.algo in SIMPLE_ONLY and self.proto not in {None, "Simple"}:
            return f"NCCL has {self.algo} with protocol Simple only"
        return None


def variants_of(
    algos: Sequence[str | None],
    protos: Sequence[str | None],
    buffers: Sequence[str],
    launches: Sequence[str],
    ctas: Sequence[tuple[int, int] | None],
    mixing: Sequence[bool | None],
    means: Sequence[str | None],
) -> tuple[Variant, ...]:
    """Every combination, algorithms outermost."""
    return tuple(
        Variant(
            algo=algo, proto=proto, buffers=kind, launch=launch, ctas=limit, mixing=mixed, mean=mean
        )
        for algo, proto, kind, launch, limit, mixed, mean in product(
            algos, protos, buffers, launches, ctas, mixing, means
        )
    )


def choose(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The items of a comma-separated list, spelt as in `known`. Raises SettingsError."""
    spelt = {name.lower(): name for name in known}
    found = []
    for item in text.split(","):
        name = spelt.get(item.strip().lower())
        if name is None:
            raise SettingsError(
                f'{option} "{text}": "{item.strip()}" is unknown; choose from {", ".join(known)}'
            )
        if name in found:
            raise SettingsError(f'{option} "{text}" names {name} twice')
        found.append(name)
    return found


def parse_ctas(text: str) -> list[tuple[int, int]]:
    """Limits such as "1,4,8-16": the least and most CTAs of a communicator. SettingsError."""
    found = []
    for item in text.split(","):
        low, dash, high = item.strip().partition("-")
        ends = (low, high if dash else low)
        if not all(end.isascii() and end.isdigit() and 1 <= int(end) <= 64 for end in ends):
            raise SettingsError(
                f'--ctas "{text}": "{item.strip()}" is no number or interval from 1 to 64'
            )
        if int(ends[0]) > int(ends[1]):
            raise SettingsError(f'--ctas "{text}": "{item.strip()}" runs backwards')
        found.append((int(ends[0]), int(ends[1])))
    return found
