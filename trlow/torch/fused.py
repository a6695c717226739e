"""Adam, AdamW and SGD with momentum: one kernel for each bucket and parameter group.

The formulas are torch's and so is the state, so a state dict stays what it was; sums may round in
another order. What is not covered here (see ``covers``) is left to torch's own kernels.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from trlow.torch.rows import Table, alike, rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trlow.kernel import Kernels

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
    """One rank's optimizer step by buckets, for gradients and a state that stay where they are.

    It has to outlive its launches, whose tables it holds.
    """

    def __init__(
        self,
        kernels: Kernels,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Mapping[torch.Tensor, torch.Tensor]],
        inboxes: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Of an optimizer that is covered, whose kernel is loaded; parameters to gradients.

        Where a parameter has an inbox the step takes the sum of its gradient and that.
        """
        self._inboxes = inboxes or {}
        name = kernel_of(optimizer)
        assert name is not None
        self._kernels, self._name = kernels, name
        self._steps: list[torch.Tensor] = []
        self._launches: list[list[tuple[list[int], int]]] = []
        self._kept: list[Any] = []  # what the launches hold addresses of
        for gradients in buckets:
            launches = []
            for group in optimizer.param_groups:
                mine = [each for each in group["params"] if each in gradients]
                if mine:
                    launches.append(self._launch(group, mine, gradients, optimizer.state))
            self._launches.append(launches)

    def _launch(
        self,
        group: dict[str, Any],
        parameters: Sequence[torch.Tensor],
        gradients: Mapping[torch.Tensor, torch.Tensor],
        state: Mapping[torch.Tensor, dict[str, Any]],
    ) -> tuple[list[int], int]:
        name, device = self._name, parameters[0].device
        pieces = [
            (*own, gradients[own[0]], self._inboxes.get(own[0]))
            for own in ((each, *(state[each][key] for key in STATES[name])) for each in parameters)
        ]
        table = Table(device, rows(pieces, parameters[0].element_size()))
        table.fill()
        decay = group["weight_decay"]
        if name == ADAM:
            decoupled = group.get("decoupled_weight_decay", False)
            numbers = [*group["betas"], group["eps"], *((0, decay) if decoupled else (decay, 0))]
            steps = [state[each]["step"] for each in parameters]
            self._steps += steps
            more = [steps[0].data_ptr()]  # all are equal
        else:
            numbers, more = [group["momentum"], decay, float(group["nesterov"])], []
        held = torch.tensor(numbers, dtype=torch.float64, device=device)
        bases = [0] * (3 + len(STATES[name]))  # the table holds addresses
        words = [group["lr"].data_ptr(), *more, held.data_ptr(), table.address, table.entries]
        self._kept += [table, held, group["lr"], pieces]
        return [*bases, *words], table.entries

    def __call__(self, bucket: int, stream: int, blocks: int | None = None) -> None:
        """Enqueue the step of one bucket on ``stream``, which is torch's current one.

        Bucket 0 comes first: it counts the step for all of them. ``blocks`` bounds a launch's.
        """
        if bucket == 0 and self._steps:
            torch._foreach_add_(self._steps, 1)
        for values, entries in self._launches[bucket]:
            self._kernels.launch(self._name, values, min(entries, blocks or entries), stream)
