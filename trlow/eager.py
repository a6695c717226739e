"""Steps without graphs, drained one after another: the reference that a replay is compared with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trlow.enqueue import enqueue_phase, groups_of
from trlow.launching import load_slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.enqueue import Rank, Rendezvous
    from trlow.feed import FeedSlot
    from trlow.launching import Fill
    from trlow.program import Program
    from trlow.team import Team


def run_eagerly(
    team: Team,
    program: Program,
    steps: int,
    slots: Sequence[tuple[FeedSlot, ...]],
    fill: Fill | None,
) -> None:
    """``steps`` steps of a warm program; ``slots`` are each rank's by parity of the step."""
    for step in range(steps):
        if fill is not None:
            team.together(partial(_fill, slots, fill, step, steps))
        stages = program.phases[step % len(program.phases)]
        rendezvous = team.rendezvous(groups_of(stages, len(team.ranks)))
        team.together(partial(_step, program, step, rendezvous), rendezvous=rendezvous)


def _fill(
    slots: Sequence[tuple[FeedSlot, ...]], fill: Fill, step: int, steps: int, rank: Rank
) -> None:
    """As the loop does: before the first step its own inputs, before each the following ones."""
    mine = slots[rank.index]
    rank.status.step, rank.status.stage = step, "fill of the next step"
    if step == 0:
        load_slot(rank, mine[0], fill, 0)
    if step + 1 < steps:
        fill(rank.index, step + 1, mine[(step + 1) % len(mine)])


def _step(program: Program, step: int, rendezvous: Rendezvous | None, rank: Rank) -> None:
    rank.status.step = step
    enqueue_phase(rank, program, step % len(program.phases), rendezvous)
    rank.drain()
