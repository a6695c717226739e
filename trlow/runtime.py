"""A plan on a team of ranks: programs warmed, captured, replayed, or run eagerly.

This is the top of the foreign tower and the owner of every graph. ``close`` releases in the order
graphs, communicators, events and streams, arenas. A runtime that is collected without it is a
``ResourceWarning``; at interpreter exit the process gives everything back by itself.
"""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from trlow import capture as capturing
from trlow import warmup
from trlow.arena import check_memory, check_ranges, check_window
from trlow.device import Platform
from trlow.eager import run_eagerly
from trlow.enqueue import groups_of
from trlow.errors import TrlowError, UsageError
from trlow.interop import Lent
from trlow.launching import RUN_AHEAD, prepare_rank
from trlow.program import Stream
from trlow.range_op import FeedCopy
from trlow.replay import Replay, check_steps
from trlow.team import Team

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trlow.arena import Arena
    from trlow.enqueue import Rank
    from trlow.feed import FeedSlot
    from trlow.launching import Fill
    from trlow.plan import MemoryPlan
    from trlow.program import Program
    from trlow.ranks import Worker
    from trlow.settings import Settings

MODES = ("fused", "staged")
T = TypeVar("T")


class Runtime:
    """One plan on all ranks of one process. A context manager.

    ``arenas[rank]`` holds that rank's memory, ``capture`` turns a program into a ``Replay``.
    """

    def __init__(
        self,
        settings: Settings,
        plan: MemoryPlan,
        *,
        platform: Platform | None = None,
        communicators: Sequence[int] | None = None,
        streams: Mapping[Stream, Sequence[object]] | None = None,
    ) -> None:
        """Make threads, communicators, streams and arenas.

        ``communicators`` lends one ncclComm_t for each rank, of the same copy of NCCL, ``streams``
        one stream for each rank in place of one of its own: a cudaStream_t or an object with
        ``__cuda_stream__``, non-blocking. They stay the caller's, who uses them only while no call
        of the runtime runs, and destroys them after ``close``. But if a rank fails, only an abort
        brings the others back: after such a ``RankError``, which says so, the communicators are
        gone, and ``capture`` and ``eager`` raise ``UsageError``.

        Raises ``SettingsError`` or ``PlanError`` before anything is allocated, later ``CudaError``,
        ``NcclError`` or ``RankError`` with nothing left behind.
        """
        self.settings, self.plan = settings, plan
        self.platform = platform or Platform.open(settings)
        devices = settings.devices(self.platform.device_count())
        lent = Lent.checked(communicators, streams, len(devices), tuple(Stream))
        check_window(settings, self.platform, len(devices))
        check_memory(self.platform, plan, devices)
        self.captured: Counter[str] = Counter()  # graphs captured per rank, by stage or program
        self._fused: list[list[capturing.Graphs]] = []  # per capture, one per rank
        self._staged = [capturing.Graphs() for _ in devices]
        self._replays: list[Replay] = []
        self._warmed: set[tuple[int, Program]] = set()
        given = self.platform, plan, devices, settings
        self._team = Team(*given, self._destroy_graphs, lent=lent)
        workers = (*self._team.ranks.workers, self._team.ranks.coordinator)
        self._forgotten = weakref.finalize(self, _warn_forgotten, workers)
        self._forgotten.atexit = False  # at exit the process itself gives everything back
        try:
            self._team.open()
        except BaseException:
            self.close()
            raise

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self._team.ranks)

    @property
    def devices(self) -> tuple[int, ...]:
        """The device ordinal of each rank."""
        return self._team.ranks.devices

    @property
    def dead(self) -> bool:
        """Whether recovery from a failure failed; nothing but the end of the process helps."""
        return self._team.dead

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Each rank's memory."""
        return tuple(member.arena for member in self._team.members)

    # -- capture

    def capture(
        self, program: Program, mode: str = "fused", *, variant: str | None = None
    ) -> Replay:
        """Warm up and capture ``program`` on all ranks; every graph is uploaded on return.

        Warming leaves persistent regions as they were; ranges that collectives write elsewhere
        (gradients) hold the sums of the warm-up afterwards, so fill them after this call.

        ``mode`` is "fused" (one graph a step) or "staged" (one graph a stage; equal stages of all
        programs share theirs). ``variant`` chooses the shapes of the inputs. Raises
        ``CaptureError`` or ``RankError`` with nothing left behind.
        """
        if mode not in MODES:
            message = f"mode must be one of {', '.join(MODES)}, got {mode!r}"
            raise UsageError(message)
        self._prepare(program, keep_all=False)
        slots = self._slots(program, variant)
        sections = capturing.sections_of(program, mode)
        if mode == "staged":
            known = self._staged[0].execs
            sections = [section for section in sections if section.key not in known]
        fresh = self._capture(sections)
        if mode == "staged":
            for shared, new in zip(self._staged, fresh, strict=True):
                shared.take(new)
        graphs = self._staged if mode == "staged" else fresh
        for section in sections:
            name = section.stages[0].name if mode == "staged" else program.name
            self.captured[name] += 1
        prepared = self._team.together(
            lambda rank: prepare_rank(rank, graphs[rank.index], program, mode, slots[rank.index])
        )
        replay = Replay(program, mode, prepared, self._team.together)
        self._replays.append(replay)
        return replay

    def _capture(self, sections: Sequence[capturing.Section]) -> list[capturing.Graphs]:
        """All ranks capture, then all instantiate; or everything begun is undone."""
        team = self._team
        fresh = [capturing.Graphs() for _ in team.members]
        self._fused.append(fresh)  # owned before there is anything, so that nothing is ever lost
        groups = capturing.groups_in(sections, self.world_size)
        rendezvous = team.rendezvous(groups, capturing=True)
        try:
            team.together(
                lambda rank: capturing.capture_rank(rank, sections, rendezvous, fresh[rank.index]),
                rendezvous=rendezvous,
                abort=False,
            )
            capturing.check_graphs(sections, fresh)
            team.together(
                lambda rank: capturing.instantiate_rank(rank, fresh[rank.index]), abort=False
            )
        except BaseException:
            if not team.dead:
                team.together(partial(capturing.close_of, fresh), abort=False)
            raise
        return fresh

    def _prepare(self, program: Program, *, keep_all: bool) -> None:
        """Communicators there, external graphs adopted, and the program warm.

        Raises ``PlanError`` for a range that lies outside of this runtime's plan.
        """
        team = self._team
        team.check_usable()
        check_ranges(self.plan, program)
        self._forget_closed()
        team.connect()
        if (team.generation, program) in self._warmed:
            return
        team.together(lambda rank: capturing.adopt_children(rank, program), abort=False)
        team.together(lambda rank: warmup.warm_compute(rank, program, keep_all=keep_all))
        stages = warmup.collective_stages(program)
        if self.world_size > 1 and stages:
            rendezvous = team.rendezvous(groups_of(stages, self.world_size))
            team.together(
                lambda rank: warmup.warm_collectives(rank, stages, rendezvous, keep_all=keep_all),
                rendezvous=rendezvous,
            )
        self._warmed.add((team.generation, program))

    def _forget_closed(self) -> None:
        """Let go of what a recovery has closed."""
        self._replays = [replay for replay in self._replays if not replay.closed]
        self._fused = [graphs for graphs in self._fused if any(each.graphs for each in graphs)]
        current = self._team.generation
        self._warmed = {warm for warm in self._warmed if warm[0] == current}

    def _slots(self, program: Program, variant: str | None) -> list[tuple[FeedSlot, ...]]:
        """Per rank the pinned slots by parity of the step; empty without inputs.

        The phase of step k copies the slot of step k + 1.
        """
        copies = [
            [action for stage in stages for action in stage.actions if isinstance(action, FeedCopy)]
            for stages in program.phases
        ]
        if not any(copies):
            return [() for _ in self._team.members]
        if any(len(found) != 1 for found in copies):
            message = f"every phase of {program.name!r} must copy exactly one slot"
            raise UsageError(message)
        if len({found[0].slot for found in copies}) < max(len(copies), RUN_AHEAD):
            message = (
                f"{program.name!r} must alternate between slots A and B: with one slot the host "
                "would write the next inputs over those of a step that has not run yet"
            )
            raise UsageError(message)
        ordered = [copies[-1][0], *(found[0] for found in copies[:-1])]
        return self._team.together(
            lambda rank: tuple(
                rank.feed.prepare(copy.slot, copy.range, variant) for copy in ordered
            )
        )

    # -- eager

    def eager(
        self,
        program: Program,
        steps: int = 1,
        fill: Fill | None = None,
        *,
        variant: str | None = None,
    ) -> None:
        """Run ``program`` without graphs, one drained step after another.

        The reference that a replay is compared with; nothing but the steps shows in the arenas.
        Raises ``RankError``; after it every replay of the runtime is closed.
        """
        check_steps(steps)
        self._prepare(program, keep_all=True)
        slots = self._slots(program, variant)
        if fill is not None and not slots[0]:
            message = f"{program.name!r} has no input to fill; it copies from no slot"
            raise UsageError(message)
        run_eagerly(self._team, program, steps, slots, fill)

    # -- for what is built on a runtime

    def together(self, function: Callable[[Rank], T]) -> list[T]:
        """``function(rank)`` on every rank's thread, with the results in rank order.

        For work of one's own on the ranks' devices, outside of any capture and without collectives.
        Raises ``RankError`` for what a rank raises.
        """
        return self._team.together(function, abort=False)

    def release(self, replay: Replay) -> None:
        """Close a replay. The graphs of a fused one are destroyed; staged ones are shared.

        A second call does nothing.
        """
        if replay not in self._replays:
            return
        self._replays.remove(replay)
        replay.detach()
        for graphs in [each for each in self._fused if each[0] is replay.first_graphs]:
            if not self.dead:
                self.together(partial(capturing.close_of, graphs))
            self._fused.remove(graphs)

    # -- end

    def _destroy_graphs(self, rank: Rank) -> None:
        """Every graph of one rank, on its thread, also child graphs: nothing is warm any more."""
        self._warmed.clear()
        for replay in self._replays:
            replay.detach()
        for graphs in (*(made[rank.index] for made in self._fused), self._staged[rank.index]):
            graphs.close(rank)
        capturing.release_children(rank)

    def close(self) -> None:
        """Give everything back, in order. A second call does nothing; a first error is raised."""
        self._forgotten.detach()
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except TrlowError:
            if error is None:
                raise  # the body's own error wins over one from closing


def _warn_forgotten(workers: Sequence[Worker]) -> None:
    """A runtime was collected without close(): let its threads end, and say so."""
    for worker in workers:
        worker.stop(0.0)
    warnings.warn("a trlow Runtime was not closed", ResourceWarning, stacklevel=2)
