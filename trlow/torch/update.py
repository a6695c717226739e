"""One rank's optimizer step, with nothing in it that changes from step to step but device memory.

A learning rate is a tensor, so a graph can read a new one. The loss scale of float16 is one too:
it grows and shrinks on the device, and a step with a gradient that is not finite changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from trlow.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trlow.torch.work import Work

# The defaults of torch.amp.GradScaler.
FIRST_SCALE, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000


class State(dict[str, Any]):
    """An optimizer's state of one parameter, and what each value of it was when it was made."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}
        for key, value in (values or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        """What an optimizer does at its first step, and later only with numbers."""
        if key not in self.first:
            self.first[key] = _brief(value)
        super().__setitem__(key, value)

    def put(self, values: dict[str, Any]) -> None:
        """Copy into the tensors that are there: a graph knows their addresses."""
        for key, value in values.items():
            mine = self.get(key)
            if not isinstance(mine, torch.Tensor):
                self[key] = value
            elif isinstance(value, torch.Tensor):
                mine.copy_(value)
            else:
                mine.fill_(value)


def _brief(value: Any) -> Any:
    """A copy; one number for a tensor that holds only that, as nearly all begin."""
    if not isinstance(value, torch.Tensor) or not value.numel():
        return value
    number = value.flatten()[0]
    return number.item() if bool((value == number).all()) else value.detach().clone()


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with tensors of its own."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in values.items()
    }


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
        made = {parameter: State(values) for parameter, values in self.optimizer.state.items()}
        self.optimizer.state = defaultdict(State, made)

    def _check(self) -> None:
        name = type(self.optimizer).__name__
        for group in self.optimizer.param_groups:
            still = group.get("capturable", group.get("fused"))
            if self._device.type == "cuda" and not still:
                raise UsageError(
                    f"{name} reads its numbers on the host, which a graph cannot; make it with "
                    "capturable=True, or fused=True where it has no such option (SGD)"
                )
            if group.get("momentum") and group.get("dampening"):
                raise UsageError(
                    f"{name} with dampening={group['dampening']} treats its first step in another "
                    "way, and a graph has no first step; leave dampening at 0"
                )
        if self._scaled and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            raise UsageError(
                f"float16 skips a step whose gradients are not finite, on the device; {name} can "
                "do that with fused=True only"
            )

    def _states(self) -> list[State]:
        """By parameter, in the order of the groups."""
        state = self.optimizer.state
        return [state[p] for group in self.optimizer.param_groups for p in group["params"]]

    def history(self) -> list[dict[str, Any]]:
        """Copies of the state of each parameter, and last of the loss scale."""
        scale = {"scale": self.scale, "growth": self._growth}
        return [copied(state) for state in (*self._states(), scale)]

    def step(self, grads: Sequence[torch.Tensor], take: Callable[[], None] | None = None) -> None:
        """Unscale, clip, take the step; ``grads`` are those of all parameters.

        ``take`` stands for the optimizer's own step, which alone can leave out one on the device.
        """
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
        if take is None or self._scaled:
            self.optimizer.step()
        else:
            take()
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

    def restart(self, history: Sequence[dict[str, Any]]) -> None:
        """As it was, in the tensors that are there; where there was no state, as it began."""
        with torch.no_grad():
            for state, old in zip(self._states(), history, strict=False):
                state.put(state.first)
                # SGD has no momentum before its first step, and takes the gradient for it. A graph
                # has no first step; momentum of 0 comes to the same.
                if isinstance(self.optimizer, torch.optim.SGD):
                    state.put({key: 0.0 for key in state if key == "momentum_buffer"})
                state.put(old)
            self.scale.copy_(history[-1]["scale"])
            self.seed.copy_(self.scale * self._share)
            self._growth.copy_(history[-1]["growth"])

    def forget(self) -> None:
        """Drop what a float16 step left on the optimizer."""
        for name in ("grad_scale", "found_inf"):
            if hasattr(self.optimizer, name):
                delattr(self.optimizer, name)

    def state(self, rates: Sequence[float]) -> dict[str, Any]:
        """The optimizer's state dict, copied, with these learning rates."""
        state = self.optimizer.state_dict()
        mine = {index: copied(values) for index, values in state["state"].items()}
        pairs = zip(state["param_groups"], rates, strict=True)
        return {"state": mine, "param_groups": [group | {"lr": rate} for group, rate in pairs]}

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
                self.optimizer.state[parameter].put(saved.get(index, {}))
