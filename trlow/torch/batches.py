"""A batch as the loader gives it, and its equal parts: one for each rank.

What a captured step reads has one shape and dtype for good, so every batch is compared with the
example that the step was compiled for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from trlow.errors import UsageError


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of a batch: where it stands, and its shape and dtype on each rank."""

    where: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]  # of all ranks
    dtype: torch.dtype


class BatchShape:
    """The structure of a batch: nested tuples, lists and dicts of tensors.

    The first dimension of every tensor of a whole batch is cut into ``world_size`` equal parts.
    """

    def __init__(self, example: Any, world_size: int) -> None:
        """Raises ``UsageError`` for a batch without tensors, or one that cannot be cut."""
        found, self._tree = pytree.tree_flatten_with_path(example)
        self.world_size = world_size
        leaves = []
        for path, leaf in found:
            where = f"batch{pytree.keystr(path)}"
            if not isinstance(leaf, torch.Tensor):
                raise UsageError(f"{where} is a {type(leaf).__name__}; a batch holds tensors only")
            if leaf.dim() == 0 or leaf.shape[0] % world_size or not leaf.shape[0]:
                raise UsageError(
                    f"{where} has shape {tuple(leaf.shape)}: its first dimension must be a "
                    f"multiple of the {world_size} ranks"
                )
            rows = leaf.shape[0] // world_size
            shape = (rows, *leaf.shape[1:])
            leaves.append(Leaf(where, shape, tuple(leaf.shape), leaf.dtype))
        if not leaves:
            raise UsageError("the example batch has no tensor")
        self.leaves = tuple(leaves)
        # Most batches are one tuple of tensors, which a look tells; pytree takes 20 us for it.
        plain = type(example) in {tuple, list} and all(
            isinstance(each, torch.Tensor) for each in example
        )
        self._plain = type(example) if plain else None

    def cut(self, batch: Any) -> list[list[torch.Tensor]]:
        """The tensors of each rank, as views of ``batch``."""
        whole = self._flat(batch, whole=True)
        parts = [tensor.chunk(self.world_size) for tensor in whole]
        return [[part[rank] for part in parts] for rank in range(self.world_size)]

    def given(self, shards: Any) -> list[list[torch.Tensor]]:
        """The tensors of each rank, of batches that are cut already."""
        if not isinstance(shards, (list, tuple)) or len(shards) != self.world_size:
            raise UsageError(f"shards must be a list of {self.world_size} batches, one per rank")
        return [self._flat(shard, whole=False) for shard in shards]

    def build(self, leaves: list[torch.Tensor]) -> Any:
        """A batch of these tensors."""
        return pytree.tree_unflatten(leaves, self._tree)

    def _flat(self, batch: Any, *, whole: bool) -> list[torch.Tensor]:
        if (
            type(batch) is self._plain
            and len(batch) == len(self.leaves)
            and all(isinstance(each, torch.Tensor) for each in batch)
        ):
            flat = list(batch)
        else:
            flat = self._flattened(batch)
        for leaf, tensor in zip(self.leaves, flat, strict=True):
            wanted = leaf.whole if whole else leaf.shape
            if not isinstance(tensor, torch.Tensor):
                raise UsageError(f"{leaf.where} is a {type(tensor).__name__}, no tensor")
            if tensor.shape != wanted or tensor.dtype is not leaf.dtype:
                raise UsageError(
                    f"{leaf.where} is {tensor.dtype} {tuple(tensor.shape)}, the step was compiled "
                    f"for {leaf.dtype} {wanted}; pad the batch, drop it, or compile another step"
                )
        return flat

    def _flattened(self, batch: Any) -> list[Any]:
        flat, tree = pytree.tree_flatten(batch)
        if tree != self._tree:
            raise UsageError(
                f"the batch is built like {tree}, the example of compile() like {self._tree}"
            )
        return flat
