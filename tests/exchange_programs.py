"""A sum by copies on the ranges of the fixture ``small``, for host/ and gpu/."""

from __future__ import annotations

import trlow
from trlow.exchange import add, admit, receive, send


def parts(small):
    """Halves of one range: what is sent, and where it arrives."""
    half = small.early.nbytes // 2
    places = ((0, "mine"), (half, "inbox"))
    return [trlow.Range(small.early.offset + at, half, trlow.F32, n, n) for at, n in places]


def copying(small):
    """Each rank sends the first half to the second half of the next one's, and adds what came."""
    mine, inbox = parts(small)
    token = small.plan.range("one")
    stages = (
        trlow.Stage("ADMIT", trlow.Stream.UPDATE, (admit(token, inbox),)),
        trlow.Stage("SEND", trlow.Stream.TRANS, (send(inbox, mine),)),
        trlow.Stage("RECEIVE", trlow.Stream.UPDATE, (receive(token, inbox),)),
        trlow.Stage("ADD", trlow.Stream.COMP_1, (add(mine, inbox),)),
    )
    return trlow.Program.single("copies", stages)
