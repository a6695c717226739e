"""Names of the sides of bench/torch_ddp.py, and what each name means. Nothing here needs torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

BASES = ("alone", "ddp", "trlow")
MODELS = ("mlp", "resnet50_32", "resnet50_256", "vgg16_bn", "transformer")
PLAIN = ("alone", "ddp", "ddp_graph", "trlow", "trlow_nocomm")
WHOLE = ("alone_compile", "ddp_compile", "ddp_graph_compile", "ddp_graph_regional")
COMPILED = (*WHOLE, "alone_regional", "trlow_regional", "trlow_nocomm_regional")
SIDES = {  # what a model is measured with if --sides says nothing; the first is the reference
    "mlp": (*PLAIN, "alone_compile", "ddp_graph_compile", "trlow_compile"),
    "resnet50_32": PLAIN,
    "resnet50_256": COMPILED,
    "vgg16_bn": PLAIN,
    "transformer": (*PLAIN, *COMPILED),
}
GIB = {"resnet50_256": 18, "vgg16_bn": 18, "resnet50_32": 6, "transformer": 8}  # of a side, roughly
WORDS = """words behind a side's name, each with an underscore before it:
  graph      DDP's whole step captured in a CUDA graph (alone and trlow always are, on GPUs)
  compile    torch.compile of the whole module (of DDP: around DDP, with DDPOptimizer)
  regional   torch.compile of each region: a ResNet's layers, a Transformer's layers
  awake      alone, and each step sends 4 KiB to the other GPU, so that the links stay awake
  nocomm     trlow with one rank in each of two processes
  bf16       gradients are reduced in bfloat16
  ctaN       NCCL takes at most N CTAs (NCCL_MAX_CTAS)
  bucketsN   trlow with N buckets of equal size
  mibN       buckets of at most N MiB
  nobuffers  DDP without its broadcast of batch-norm statistics
  window     trlow's arena is a symmetric NCCL window
  nccl       trlow sums gradients by NCCL's all-reduce, not by copies
  nop2p      NCCL_P2P_DISABLE=1: nothing crosses the links, trlow copies through host memory"""


@dataclass(frozen=True, slots=True)
class Variant:
    """One side of the comparison, as its name says."""

    name: str
    base: str
    graph: bool = False
    compiled: str = ""  # "whole" or "regional"
    awake: bool = False
    nocomm: bool = False
    wire: str = ""
    cta: int = 0  # 0: NCCL's own choice, as below
    buckets: int = 0
    mib: int = 0
    nobuffers: bool = False
    window: bool = False
    nccl: bool = False
    nop2p: bool = False

    @property
    def processes(self) -> int:
        """Of two GPUs."""
        return 1 if self.base == "trlow" and not self.nocomm else 2

    @property
    def needs_cuda(self) -> bool:
        """Whether there is no such side on a machine without a GPU."""
        bf16_hook = self.base == "ddp" and bool(self.wire)
        return bool(
            self.graph or self.compiled or self.cta or self.window or self.awake or bf16_hook
        )


def variant_of(name: str) -> Variant:
    """Read a name. Raises ValueError for one that says nothing, or something contradictory."""
    base, *words = name.split("_")
    if base not in BASES:
        raise ValueError(f"{name}: a side begins with one of {', '.join(BASES)}")
    found = Variant(name, base)
    trlows = dict.fromkeys(("nocomm", "window", "nccl"), "trlow")
    flags = {"graph": "ddp", "nobuffers": "ddp", "awake": "alone", **trlows}
    for word in words:
        number = re.fullmatch(r"(cta|buckets|mib)([1-9]\d*)", word)
        if base == flags.get(word) and not getattr(found, word):
            found = replace(found, **{word: True})
        elif word in {"compile", "regional"} and not found.compiled:
            found = replace(found, compiled="whole" if word == "compile" else word)
        elif word == "nop2p" and base != "alone":
            found = replace(found, nop2p=True)
        elif word == "bf16" and base != "alone":
            found = replace(found, wire=word)
        elif number and base != "alone" and (number[1] != "buckets" or base == "trlow"):
            found = replace(found, **{number[1]: int(number[2])})
        else:
            raise ValueError(f"{name}: {word!r} says nothing here\n{WORDS}")
    return found
