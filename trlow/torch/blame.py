"""Which module an exception came from, and what a capture cannot hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

HINTS = {
    "generator": (
        "the step draws random numbers from a generator that is not its device's own, or that the "
        "measured step did not draw, which a captured step cannot"
    ),
    "capturing": (
        "the step waits for the device or copies to the host (item(), print, nonzero, .cpu()), "
        "which a captured step cannot"
    ),
}


def blamed(error: BaseException, module: torch.nn.Module) -> None:
    """Add notes to ``error``: the innermost module in whose code it arose, and what to look for."""
    names = {id(part): name for name, part in module.named_modules()}
    kinds = {type(part) for part in module.modules()}
    found = None
    text: list[str] = []
    for cause in _causes(error):
        if any(note.startswith("in module ") for note in getattr(cause, "__notes__", ())):
            return
        text.append(str(cause))
        for owner in _owners(cause.__traceback__):
            if id(owner) in names or type(owner) in kinds:
                found = owner
        if found is not None:
            break
    if found is not None:
        name = names.get(id(found), "")
        error.add_note(f"in module {name or '(the whole)'} ({type(found).__name__})")
    for word, hint in HINTS.items():
        if any(word in line for line in text):
            error.add_note(hint)
            break


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _owners(trace: TracebackType | None) -> Iterator[torch.nn.Module]:
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, torch.nn.Module):
            yield owner
        trace = trace.tb_next
