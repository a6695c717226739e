"""What is said when ranks stop: where each one was, what NCCL knows, what the threads were doing.

Gathered on the waiting thread before anything is aborted, from memory alone but for NCCL's
asynchronous errors, which it answers without waiting.
"""

from __future__ import annotations

import faulthandler
import re
import tempfile
from typing import TYPE_CHECKING

from trlow.errors import CudaError, RankError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trlow.communicator import Communicators
    from trlow.enqueue import Rank
    from trlow.ranks import Ranks

STACK_LINES = 4  # of each thread


def rank_error(
    ranks: Ranks, member: Rank, error: BaseException, communicators: Communicators | None
) -> RankError:
    """The error of one rank's function, with the step and stage that it was at."""
    located = ranks.locate(error, member.index)
    said = communicators.last_error if communicators is not None else ""
    detail = f"; NCCL's last error: {said}" if said and isinstance(error, CudaError) else ""
    return RankError(
        f"{type(error).__name__}: {located}{detail}",
        rank=member.index,
        step=member.status.step,
        stage=member.status.stage,
        peers=ranks.describe(but=member.index),
    )


def report(ranks: Ranks, members: Sequence[Rank], communicators: Communicators | None) -> str:
    """A table of ranks, their last marks and NCCL's errors, then the stacks of their threads."""
    errors = communicators.async_errors() if communicators is not None else {}
    rows = [("rank", "device", "the host is at", "the device passed", "NCCL")]
    rows += [
        (
            str(member.index),
            str(member.device),
            str(member.status),
            member.watch.last if member.watch is not None else "not watched",
            errors.get(member.index, "-"),
        )
        for member in members
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    found = stacks()
    for name, ident in ranks.threads:
        if ident in found:
            lines += [f"{name}:", *found[ident][:STACK_LINES]]
    return "\n".join(lines)


def stacks() -> dict[int, list[str]]:
    """The stack of every thread by its ident, the most recent call first.

    Written by one call in C. Frames that Python code walks while their thread goes on can end under
    its hands (seen in 3.11: an int in place of the next frame, or a segmentation fault).
    """
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    found: dict[int, list[str]] = {}
    for line in text.splitlines():
        head = re.match(r"(?:Current thread|Thread) 0x([0-9a-f]+)", line)
        if head:
            mine = found[int(head[1], 16)] = []
        elif line.startswith("  File "):
            mine.append(line)
    return found
