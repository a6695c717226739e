"""Measurements of a task's own training step: a trace, and what its communication costs.

Both run the training program on copies of everything persistent, with a learning rate of 0, on the
first batches of an epoch, repeated as long as needed.
"""

from __future__ import annotations

from trlow.task import Task
from trlow.trace import Exposed, Trace, exposed_comm, exposed_comm_us, trace

TRACED_STEPS = 8
TIMED_STEPS = 200
RUN_S = 0.2


def trace_training(task: Task, steps: int = TRACED_STEPS) -> Trace:
    """Every stage of ``steps`` training steps on every rank."""
    batches = task.repeated_batches(steps)
    return trace(task.runtime, task.compiled.programs["train"], steps, batches.fill)


def exposed_training_comm(task: Task) -> Exposed | None:
    """What communication adds to a training step, measured briefly; None for one rank."""
    if task.compiled.world_size == 1:
        return None
    batches = task.repeated_batches(TIMED_STEPS)
    program = task.compiled.programs["train"]
    return exposed_comm(task.runtime, program, TIMED_STEPS, batches.fill, run_s=RUN_S)


def exposed_training_comm_us(task: Task, steps: int = TIMED_STEPS) -> float:
    """µs per training step that communication adds; 0 for one rank, which has none."""
    if task.compiled.world_size == 1:
        return 0.0
    batches = task.repeated_batches(steps)
    return exposed_comm_us(task.runtime, task.compiled.programs["train"], steps, batches.fill)
