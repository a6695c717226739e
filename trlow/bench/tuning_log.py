"""What NCCL really took for each call, read from its log.

With NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=TUNING rank 0 tells every collective that it plans: from
2.23 on in words with its channels, before in numbers. The bytes are those of the count in the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trlow.bench.variant import ALGORITHMS, PROTOCOLS

VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "TUNING"}
_NUMBERED = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_NAMES = {
    name.lower().replace("_", ""): name for name in (*ALGORITHMS, *PROTOCOLS)
}  # the log spells them COLLNET_DIRECT, SIMPLE
_PLANNED = re.compile(
    r"NCCL INFO (?:(?P<function>\w+): )?(?P<nbytes>\d+) Bytes -> Algo (?P<algorithm>\w+) "
    r"proto (?P<protocol>\w+)(?: channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\})?"
)
_SYMMETRIC = re.compile(
    r"NCCL INFO (?P<function>\w+) \[Symmetric\]: (?P<nbytes>\d+) Bytes -> "
    r"Kernel (?P<kernel>\w+) nchannels (?P<channels>\d+)"
)
_COPIED = re.compile(
    r"NCCL INFO (?P<function>\w+) \[Copy Engine\]: (?P<nbytes>\d+) Bytes -> (?P<call>\w+)"
)


@dataclass(frozen=True, slots=True)
class Actual:
    """What one call became; `channels` is None where the log does not say."""

    algorithm: str
    protocol: str
    channels: int | None

    def __str__(self) -> str:
        text = "/".join(filter(None, (self.algorithm, self.protocol)))
        return text if self.channels is None else f"{text} x{self.channels}"

    def agrees(self, algo: str | None, proto: str | None) -> bool:
        """Whether it is what was asked for."""
        return algo in {None, self.algorithm} and proto in {None, self.protocol}


def read(text: str, function: str) -> dict[int, Actual]:
    """By bytes of the count, the last of each size; only those of `function`, or of no name."""
    return {nbytes: found for name, nbytes, found in _entries(text) if name in {None, function}}


def _entries(text: str) -> Iterator[tuple[str | None, int, Actual]]:
    for line in text.splitlines():
        if match := _PLANNED.search(line):
            channels = None
            if match["low"] is not None:
                channels = int(match["high"]) - int(match["low"]) + 1
            names = (_name(match["algorithm"], _NUMBERED), _name(match["protocol"], PROTOCOLS))
            yield match["function"], int(match["nbytes"]), Actual(*names, channels)
        elif match := _SYMMETRIC.search(line):
            found = Actual("Symmetric", match["kernel"], int(match["channels"]))
            yield match["function"], int(match["nbytes"]), found
        elif match := _COPIED.search(line):
            yield match["function"], int(match["nbytes"]), Actual("CopyEngine", "", None)


def _name(text: str, numbered: tuple[str, ...]) -> str:
    if text.isdigit():
        return numbered[int(text)] if int(text) < len(numbered) else text
    return _NAMES.get(text.lower().replace("_", ""), text)
