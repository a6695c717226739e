"""One rank's optimizer step, with nothing in it that changes from step to step but device memory.

A learning rate is a tensor, so a graph can read a new one. The loss scale of float16 is one too:
it grows and shrinks on the device, and a step with a gradient that is not finite changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trlow.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.torch.member import Work

# The defaults of torch.amp.GradScaler.
FIRST_SCALE, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


class Update:
    """The optimizer of one rank, and the gradient that its backward starts from."""

    def __init__(
        self, work: Work, parameters: list[torch.nn.Parameter], device: torch.device
    ) -> None:
        """Make the optimizer. Raises ``UsageError`` for one that a graph cannot hold."""
        if not parameters:
            raise UsageError("the module has no parameter that requires a gradient")
        self.optimizer = work.optimizer(parameters)
        self._device = device
        self._clip_norm = work.clip_norm
        self._share = 1.0 / (work.world_size * work.accumulate)
        self._scaled = work.autocast is torch.float16
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._check()
        if device.type == "cuda":
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = torch.tensor(rate, device=device)
        self.scale = torch.tensor(FIRST_SCALE if self._scaled else 1.0, device=device)
        self.seed = self.scale * self._share
        self._found = torch.zeros((), device=device)
        self._growth = torch.zeros((), device=device, dtype=torch.int32)
        self._made: dict[int, torch.Tensor] = {}  # state that the constructor made, as it was
        for _, tensor in self._state():
            self._made[id(tensor)] = tensor.clone()

    def _check(self) -> None:
        name = type(self.optimizer).__name__
        for group in self.optimizer.param_groups:
            still = group.get("fused") or group.get("capturable")
            if self._device.type == "cuda" and not still:
                raise UsageError(
                    f"{name} reads its numbers on the host, which a graph cannot; make it with "
                    "fused=True or capturable=True"
                )
        if self._scaled and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            raise UsageError(
                f"float16 skips a step whose gradients are not finite, on the device; {name} can "
                "do that with fused=True only"
            )

    def _state(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (key, value)
            for state in self.optimizer.state.values()
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        ]

    def step(self, grads: Sequence[torch.Tensor]) -> None:
        """Unscale, clip, take the step; ``grads`` are those of all parameters."""
        with torch.no_grad():
            if self._scaled:
                self._found.zero_()
                torch._amp_foreach_non_finite_check_and_unscale_(
                    list(grads), self._found, self.scale.reciprocal()
                )
                self.optimizer.grad_scale = None  # type: ignore[attr-defined]
                self.optimizer.found_inf = self._found  # type: ignore[attr-defined]
            if self._clip_norm is not None:
                self._clip(grads)
        self.optimizer.step()
        if self._scaled:
            with torch.no_grad():
                torch._amp_update_scale_(
                    self.scale, self._growth, self._found, GROWTH, BACKOFF, INTERVAL
                )
                self.seed.copy_(self.scale * self._share)

    def _clip(self, grads: Sequence[torch.Tensor]) -> None:
        """Scale to a global norm of at most ``clip_norm``, as clip_grad_norm_ does."""
        norms = torch._foreach_norm(list(grads), 2.0)
        norm = torch.linalg.vector_norm(torch.stack([each.float() for each in norms]))
        factor = torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(list(grads), factor)

    def set_rates(self, rates: Sequence[float]) -> None:
        """Take other learning rates, one for each group, in the order of the device's work."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def restart(self) -> None:
        """As before the first step: what a step made is zero, what was there is put back."""
        with torch.no_grad():
            for _, tensor in self._state():
                made = self._made.get(id(tensor))
                if made is None:
                    tensor.zero_()
                else:
                    tensor.copy_(made)
            self.scale.fill_(FIRST_SCALE if self._scaled else 1.0)
            self.seed.copy_(self.scale * self._share)
            self._growth.zero_()

    def forget(self) -> None:
        """Drop what a float16 step left on the optimizer."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self.optimizer, name):
                delattr(self.optimizer, name)

    def put(self, state: dict[str, Any]) -> None:
        """Copy the state of an optimizer state dict into the tensors that are there.

        Raises ``UsageError`` for one of other parameters.
        """
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        saved = state["state"]
        if saved and sorted(saved) != list(range(len(parameters))):
            raise UsageError("the optimizer's state dict is of other parameters")
        with torch.no_grad():
            for index, parameter in enumerate(parameters):
                for key, value in saved.get(index, {}).items():
                    mine = self.optimizer.state[parameter].get(key)
                    if isinstance(mine, torch.Tensor):
                        mine.copy_(value)
