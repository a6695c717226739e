"""Two results side by side: the ratio of times per size, and whether it is more than noise."""

from __future__ import annotations

from dataclasses import dataclass

from trlow.bench.figures import Ratio, ratio
from trlow.bench.result import Result, Row
from trlow.errors import SettingsError

Key = tuple[int, str, str]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same size in two results; `ratio` is B's time over A's."""

    first: Row
    second: Row
    ratio: Ratio

    def slower_by(self, percent: float) -> bool:
        """Whether B is slower by more than that, and beyond noise where noise is known."""
        return self.ratio.value > 1 + percent / 100 and self.ratio.beyond_noise is not False


def pair(first: Result, second: Result) -> list[Pair]:
    """Rows of equal size, place and variant. Raises SettingsError where there is none.

    Where each result has one variant, the two belong together whatever their names, so that
    nccl-tests can be compared with trlow, and one setting with another.
    """
    for name in ("collective", "dtype", "op"):
        a, b = first.request.get(name), second.request.get(name)
        if a is not None and b is not None and a != b:
            raise SettingsError(f"the results differ in {name}: {a} and {b}; nothing to compare")
    sides = [_by_key(result) for result in (first, second)]
    found = [
        Pair(row, sides[1][key], ratio(row.rounds_us, sides[1][key].rounds_us))
        for key, row in sides[0].items()
        if key in sides[1]
    ]
    if not found:
        raise SettingsError(
            "the two results have no size, place and variant in common; nothing to compare"
        )
    return found


def _by_key(result: Result) -> dict[Key, Row]:
    alone = len({row.variant for row in result.measured}) == 1
    return {(row.size, row.place, "" if alone else row.variant): row for row in result.measured}
