"""What one step of each rank tells: the order of gradients, and when weights may change."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from trlow.errors import UsageError
from trlow.torch.blame import blamed
from trlow.torch.draws import generator_state, undrawn
from trlow.torch.rows import alike

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trlow.torch.batches import BatchShape
    from trlow.torch.member import Member


def readiness(
    members: list[Member], shape: BatchShape, shards: list[list[torch.Tensor]]
) -> tuple[tuple[str, ...], int]:
    """Names of parameters in the order in which their gradients become ready, on every rank.

    Also how many of them become ready together at the end: all of them in a compiled module.

    One rank after another on the calling thread, with no collective anywhere, so whatever is
    compiled or searched for the first time can take its time. The optimizers make their state here,
    outside of the graphs' memory. Module and optimizer change; the caller puts them back. Raises
    ``UsageError`` where ranks differ.
    """
    together = []
    for member, shard in zip(members, shards, strict=True):
        with _aside(member):
            inputs = [leaf.to(member.device) for leaf in shard]
            drawn = generator_state(member.device)
            try:
                loss = member.run_forward(shape, inputs)
                sources = _sources(loss)
                member.run_backward(loss)
                member.draws = not torch.equal(drawn, generator_state(member.device))
                together.append(_together(member, sources))
                member.steady = _steady(member)
                member.update.optimizer.step()
            except Exception as error:
                blamed(error, member.module)
                error.add_note(f"on rank {member.rank}")
                raise
            for parameter in member.trainable.values():
                parameter.grad = None
            del inputs, loss, sources
    for member in members[1:]:
        if member.order != members[0].order:
            pairs = zip(members[0].order, member.order, strict=True)
            first, other = next((a, b) for a, b in pairs if a != b)
            raise UsageError(
                f"gradients become ready in another order on rank {member.rank} ({other}) than on "
                f"rank 0 ({first}): a module's graph may not depend on its data or its rank"
            )
    return tuple(members[0].order), min(together)


@contextmanager
def _aside(member: Member) -> Iterator[None]:
    """On the stream of later captures, behind the current one; complete at the end.

    What a module keeps of this body's graph then fits those. Nothing on it waits for another rank.
    """
    side = member.side
    if side is None:
        yield
        return
    side.wait_stream(torch.cuda.current_stream(member.device))
    with torch.cuda.stream(side):
        try:
            yield
        finally:
            side.synchronize()


def _sources(loss: torch.Tensor) -> dict[int, set[Any]]:
    """By ``id`` of a parameter, the nodes of autograd's graph that its gradient comes from."""
    found: dict[int, set[Any]] = defaultdict(set)
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for other, _ in node.next_functions:
            leaf = getattr(other, "variable", None)  # of a node that accumulates
            if leaf is not None:
                found[id(leaf)].add(node)
            waiting.append(other)
    return found


def _together(member: Member, sources: dict[int, set[Any]]) -> int:
    """How many of the last gradients come from the node that the very last one comes from.

    At least that one, whose node is not in the graph where a module calls autograd itself.
    """
    known = [sources[id(member.trainable[name])] for name in reversed(member.order)]
    return max(1, len(list(takewhile(lambda nodes: nodes & known[0], known))))


def _steady(member: Member) -> frozenset[str]:
    pairs = {name: (weight, weight.grad) for name, weight in member.trainable.items()}
    return frozenset(n for n, (w, grad) in pairs.items() if grad is not None and alike((w, grad)))


def may_update_early(member: Member, shape: BatchShape, shard: list[torch.Tensor]) -> bool:
    """Whether no weight is read any more once its gradient is ready, by trying it.

    A weight that is also used detached, say, may be needed later. So after a step as it should be,
    one in which each weight becomes NaN when its gradient is ready: where autograd has kept a
    tensor that was written to meanwhile it raises, and what reads one in another way makes other
    gradients. The weights are put back. Where it cannot be told the answer is no, which costs only
    speed.
    """
    with _aside(member):
        kept: dict[str, torch.Tensor] = {}
        try:
            kept = {name: weight.detach().clone() for name, weight in member.trainable.items()}
            inputs = [leaf.to(member.device) for leaf in shard]
            with undrawn([member.device]):
                right = _gradients(member, shape, inputs)
            member.probing = True
            return _are_close(right, _gradients(member, shape, inputs))
        except RuntimeError:  # torch.OutOfMemoryError, too
            return False
        finally:
            member.probing = False
            with torch.no_grad():
                for name, weight in kept.items():
                    member.trainable[name].grad = None
                    member.trainable[name].copy_(weight)


def _gradients(
    member: Member, shape: BatchShape, inputs: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    member.forward_backward(shape, inputs)
    return [weight.grad for weight in member.trainable.values()]


def _are_close(right: list[torch.Tensor | None], others: list[torch.Tensor | None]) -> bool:
    """Each to a hundredth, beside noise: what is 0 in theory need not be the same twice."""
    pairs = [
        (one.float(), other.float())
        for one, other in zip(right, others, strict=True)
        if one is not None and other is not None
    ]
    norms = torch.stack([one.norm() for one, _ in pairs])
    apart = torch.stack([(one - other).norm() for one, other in pairs])
    return bool((apart <= 1e-2 * norms + 1e-5 * norms.norm()).all())
