"""Measurements of a task's own training step: a trace, and what its communication costs.

Both run the training program on copies of everything persistent, with a learning rate of 0, on the
first batches of an epoch, repeated as long as needed.
"""

from __future__ import annotations

from trlow.task import Task
from trlow.trace import Trace, exposed_comm_us, trace

TRACED_STEPS = 8
TIMED_STEPS = 200


def trace_training(task: Task, steps: int = TRACED_STEPS) -> Trace:
    """Every stage of ``steps`` training steps on every rank."""
    batches = task.repeated_batches(steps)
    return trace(task.runtime, task.compiled.programs["train"], steps, batches.fill)


def exposed_training_comm_us(task: Task, steps: int = TIMED_STEPS) -> float:
    """µs per training step that communication adds; 0 for one rank, which has none."""
    if task.compiled.world_size == 1:
        return 0.0
    batches = task.repeated_batches(steps)
    return exposed_comm_us(task.runtime, task.compiled.programs["train"], steps, batches.fill)
