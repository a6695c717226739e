"""Which variant is fastest at each size, and from which size on another one is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trlow.bench.result import Row
from trlow.bench.sizes import short


@dataclass(frozen=True, slots=True)
class Crossover:
    """From `size` on `after` is the fastest; the size before it `before` was."""

    size: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"from {short(self.size)}: {self.before} -> {self.after}"


def winners(rows: Sequence[Row], place: str) -> dict[int, Row]:
    """The fastest row of each size in one place."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.measured and row.place == place and not row.wrong:
            known = best.get(row.size)
            if known is None or row.time_us < known.time_us:
                best[row.size] = row
    return dict(sorted(best.items()))


def crossovers(best: dict[int, Row]) -> list[Crossover]:
    """Where the fastest variant changes with the size."""
    found = []
    sizes = list(best)
    for before, size in pairwise(sizes):
        if best[before].variant != best[size].variant:
            found.append(Crossover(size, best[before].variant, best[size].variant))
    return found
