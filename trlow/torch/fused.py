"""Adam, AdamW and SGD with momentum: one kernel for each parameter group, of a bucket or of all.

The formulas are torch's and so is the state, so a state dict stays what it was; sums may round in
another order. What is not covered here (see ``covers``) is left to torch's own kernels.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from trlow.torch.rows import alike, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from trlow.kernel import Kernels
    from trlow.torch.rows import Table

ADAM, MOMENTUM = "adam_rows", "momentum_rows"
KERNELS = (ADAM, MOMENTUM)
# What is read of a parameter's state, in the kernel's order.
STATES = {ADAM: ("exp_avg", "exp_avg_sq"), MOMENTUM: ("momentum_buffer",)}


def kernel_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The kernel that does what this optimizer does; None for one that has none here."""
    kind = type(optimizer)
    if kind is torch.optim.Adam or kind is torch.optim.AdamW:
        return ADAM
    return MOMENTUM if kind is torch.optim.SGD else None


def covers(
    optimizer: torch.optim.Optimizer, gradients: Mapping[torch.Tensor, torch.Tensor]
) -> bool:
    """Whether this is Adam, AdamW, or SGD with momentum, fused, in float32 and plain.

    Plain: no amsgrad, maximize, dampening, no tensors where betas and decay may be such, nothing
    that its ``step`` calls besides, equally many steps so far. ``gradients`` are where each
    parameter's will be.
    """
    kernel = kernel_of(optimizer)
    if kernel is None or _is_hooked(optimizer):
        return False
    for group in optimizer.param_groups:
        odd = ("amsgrad", "maximize", "differentiable", "dampening")
        if not group["fused"] or any(group.get(name) for name in odd):
            return False
        numbers = (*group.get("betas", ()), group["weight_decay"])
        if any(isinstance(number, torch.Tensor) for number in numbers):
            return False
        if kernel == MOMENTUM and not group["momentum"]:
            return False
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            others = [gradients.get(parameter), *(state.get(name) for name in STATES[kernel])]
            known = [each for each in others if each is not None]
            if len(known) < len(others) or not alike((parameter, *known)):
                return False
            if parameter.dtype is not torch.float32:
                return False
    return counts_one_step(optimizer.state.values())


def counts_one_step(states: Iterable[Mapping[str, Any]]) -> bool:
    """Whether all parameters have taken equally many steps: a kernel is told one number."""
    steps = [torch.as_tensor(state["step"]).flatten() for state in states if "step" in state]
    return not steps or len(torch.cat(steps).unique()) == 1


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of it is more than its own: hooks, or another function in its place."""
    torchs = sys.modules[torch.optim.Optimizer.__module__]
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        torchs._global_optimizer_pre_hooks,
        torchs._global_optimizer_post_hooks,
    )
    return any(map(len, hooks)) or "step" in vars(optimizer)


class FusedStep:
    """One rank's optimizer step, of some or all parameters, for a state that stays where it is.

    It has to outlive its launches, whose numbers it holds.
    """

    def __init__(
        self,
        kernels: Kernels,
        optimizer: torch.optim.Optimizer,
        tables: Callable[[Iterator[list[int]]], Table],
        inboxes: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Of an optimizer that is covered, whose kernel is loaded; ``tables`` keeps what it makes.

        Where a parameter has an inbox the step takes the sum of its gradient and that.
        """
        name = kernel_of(optimizer)
        assert name is not None
        self._kernels, self._name, self._tables = kernels, name, tables
        self._optimizer, self._inboxes = optimizer, inboxes or {}
        self._steps: list[torch.Tensor] = []
        self._groups = [self._words(group) for group in optimizer.param_groups]

    def _words(self, group: dict[str, Any]) -> list[torch.Tensor]:
        """What the kernel is told of a group, between the bases and the table."""
        if not group["params"]:
            return []  # torch takes a step of nothing
        decay = group["weight_decay"]
        if self._name == ADAM:
            decoupled = group.get("decoupled_weight_decay", False)
            numbers = [*group["betas"], group["eps"], *((0, decay) if decoupled else (decay, 0))]
            steps = [self._optimizer.state[each]["step"] for each in group["params"]]
            self._steps += steps
            more = steps[:1]  # all are equal
        else:
            numbers, more = [group["momentum"], decay, float(group["nesterov"])], []
        device = group["params"][0].device
        return [group["lr"], *more, torch.tensor(numbers, dtype=torch.float64, device=device)]

    def __call__(
        self,
        gradients: Mapping[torch.Tensor, torch.Tensor],
        stream: int,
        *,
        counts: bool,
        blocks: int | None = None,
    ) -> None:
        """Enqueue the step of some parameters on ``stream``, which is torch's current one.

        One call of a step ``counts`` it for all, before the others. ``blocks`` bounds a launch's.
        """
        if counts and self._steps:
            torch._foreach_add_(self._steps, 1)
        state, keys = self._optimizer.state, STATES[self._name]
        for group, words in zip(self._optimizer.param_groups, self._groups, strict=True):
            mine = [each for each in group["params"] if each in gradients]
            pieces = [
                (p, *(state[p][key] for key in keys), gradients[p], self._inboxes.get(p))
                for p in mine
            ]
            if pieces:
                table = self._tables(rows(pieces, mine[0].element_size()))
                bases = [0] * (3 + len(keys))  # the table holds addresses
                values = [*bases, *(word.data_ptr() for word in words)]
                values += [table.address, table.entries]
                work = min(table.entries, blocks or table.entries)
                self._kernels.launch(self._name, values, work, stream)
