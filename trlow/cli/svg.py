"""The arena as a picture: every region to scale, and the buckets' part once more, enlarged.

One strip holds the whole arena. Gradients are a small part of it, so a second strip enlarges the
bytes that the buckets span; thin lines join the two. Widths are exact: a region too thin to see is
named under its strip, not drawn wider than it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from trlow.cli.units import binary
from trlow.plan import Bucket, MemoryPlan, Range
from trlow.region import Region

WIDTH = 1200
MARGIN = 24
INNER = WIDTH - 2 * MARGIN
STRIP = 44
LABEL_PITCH = 20  # pixels between two slanted labels
GLYPH = 6.7  # pixels per character of the 11-pixel type
FEWEST_LABELLED = 0.004  # share of a strip from which a region is named under it

# Kind letter of a region's name: fill, and what the kind holds.
KINDS: dict[str, tuple[str, str]] = {
    "B": ("#b7c9e2", "batch-norm statistics"),
    "W": ("#4c78a8", "weights"),
    "E": ("#86bcb6", "averaged weights"),
    "A": ("#9ecae9", "low-precision weights"),
    "G": ("#e45756", "gradients"),
    "R": ("#f2a541", "results"),
    "M": ("#72b36b", "first moments"),
    "V": ("#a8d08d", "second moments"),
    "N": ("#d6ccc2", "LARS norms"),
    "I": ("#b279a2", "input"),
    "F": ("#c9c3b0", "features"),
    "S": ("#f7d488", "scalars"),
    "T": ("#9d9a90", "scratch"),
}
OTHER = ("#dddddd", "other")
BUCKET_FILLS = ("#7f2704", "#08519c", "#00441b", "#54278f")


@dataclass(frozen=True, slots=True)
class Piece:
    """A region that holds bytes."""

    region: Region
    start: int  # bytes from the arena's start
    nbytes: int

    @property
    def colour(self) -> str:
        """The fill of its kind."""
        return KINDS.get(self.region.kind, OTHER)[0]


def draw(plan: MemoryPlan, buckets: Sequence[Bucket], title: str) -> str:
    """Return an SVG document of `plan`, `WIDTH` pixels wide."""
    pieces = [
        Piece(region, place.offset, place.nbytes)
        for region in plan.table.regions
        if (place := plan.region_range(region.name)).nbytes
    ]
    canvas = Canvas()
    canvas.text(MARGIN, 30, title, size=17, font_weight="bold")
    facts = f"{binary(plan.arena_nbytes)} per rank, fingerprint {plan.fingerprint()[:16]}"
    canvas.text(MARGIN, 50, facts)
    y = _strip(canvas, 84, pieces, 0, plan.arena_nbytes, "the whole arena")
    if buckets:
        first = min(bucket.range.offset for bucket in buckets)
        last = max(bucket.range.end for bucket in buckets)
        inside = [piece for piece in pieces if first <= piece.start < last]
        y += 40
        _zoom_lines(canvas, 84 + STRIP, y + 22 * len(buckets), plan.arena_nbytes, (first, last))
        y = _brackets(canvas, y, buckets, (first, last))
        y = _strip(canvas, y, inside, first, last, "what the buckets span, enlarged")
    y = _legend(canvas, y + 24, pieces, plan.arena_nbytes)
    return canvas.document(y + MARGIN)


class Canvas:
    """SVG elements in drawing order."""

    def __init__(self) -> None:
        """Start empty."""
        self._elements: list[str] = []

    def text(
        self, x: float, y: float, content: str, *, size: int = 11, **attributes: str | float
    ) -> None:
        """Write `content` with its baseline at `y`."""
        self._add("text", escape(content), x=x, y=y, font_size=size, **attributes)

    def rectangle(
        self, x: float, y: float, width: float, height: float, tip: str = "", **attributes: str
    ) -> None:
        """Draw a rectangle; `tip` shows when the pointer rests on it."""
        body = f"<title>{escape(tip)}</title>" if tip else ""
        self._add("rect", body, x=x, y=y, width=width, height=height, **attributes)

    def line(self, points: Iterable[tuple[float, float]], **attributes: str) -> None:
        """Draw an open line through `points`."""
        text = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._add("polyline", "", points=text, fill="none", **attributes)

    def document(self, height: float) -> str:
        """Return everything drawn, as a file."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:.0f}" '
            f'viewBox="0 0 {WIDTH} {height:.0f}" font-family="DejaVu Sans, sans-serif">\n'
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>\n'
            + "\n".join(self._elements)
            + "\n</svg>\n"
        )

    def _add(self, tag: str, body: str, **attributes: str | float) -> None:
        written = " ".join(
            f'{name.replace("_", "-")}="{value:.2f}"'
            if isinstance(value, float)
            else f'{name.replace("_", "-")}="{value}"'
            for name, value in attributes.items()
        )
        self._elements.append(f"<{tag} {written}>{body}</{tag}>")


def _place(offset: int, first: int, last: int) -> float:
    """Pixels from the left of byte `offset` on a strip that shows [first, last)."""
    return MARGIN + INNER * (offset - first) / (last - first)


def _strip(
    canvas: Canvas, y: float, pieces: Sequence[Piece], first: int, last: int, caption: str
) -> float:
    """Draw the regions of [first, last) to scale; return the y below everything."""
    canvas.text(MARGIN, y - 8, caption, font_style="italic")
    canvas.text(MARGIN + INNER, y - 8, binary(last - first), text_anchor="end")
    canvas.rectangle(MARGIN, y, INNER, STRIP, fill="#f4f4f4", stroke="#777")
    unnamed: list[tuple[float, Piece]] = []
    for piece in pieces:
        left = _place(piece.start, first, last)
        width = INNER * piece.nbytes / (last - first)
        tip = f"{piece.region.name}: {piece.nbytes} bytes at {piece.start}"
        canvas.rectangle(left, y, width, STRIP, tip, fill=piece.colour)
        canvas.line([(left, y), (left, y + STRIP)], stroke="white", stroke_width="0.5")
        if width > GLYPH * len(piece.region.name) + 6:
            canvas.text(
                left + width / 2, y + STRIP / 2 + 4, piece.region.name, text_anchor="middle"
            )
        elif piece.nbytes >= FEWEST_LABELLED * (last - first) or len(pieces) < 24:
            unnamed.append((left + width / 2, piece))
    return _slanted(canvas, y + STRIP, unnamed) if unnamed else y + STRIP


def _slanted(canvas: Canvas, y: float, labels: Sequence[tuple[float, Piece]]) -> float:
    """Name thin regions below the strip, kept apart and inside the picture; return the y below."""
    spots: list[float] = []
    for x, _ in labels:
        spots.append(max(x, spots[-1] + LABEL_PITCH) if spots else x)
    longest = max(len(piece.region.name) for _, piece in labels)
    reach = GLYPH * longest * 0.75  # how far a label slanted by 45 degrees goes, right and down
    limit = MARGIN + INNER - reach
    for index in range(len(spots) - 1, -1, -1):
        spots[index] = min(spots[index], limit)
        limit = spots[index] - LABEL_PITCH
    for spot, (x, piece) in zip(spots, labels, strict=True):
        canvas.line([(x, y), (x, y + 5), (spot, y + 18)], stroke="#999", stroke_width="0.7")
        turn = f"rotate(45 {spot:.2f} {y + 26:.2f})"
        canvas.text(spot, y + 26, piece.region.name, transform=turn)
    return y + 30 + reach


def _zoom_lines(
    canvas: Canvas, above: float, below: float, arena_nbytes: int, span: tuple[int, int]
) -> None:
    """Join the part of the upper strip to the ends of the lower one."""
    for offset, end in zip(span, (MARGIN, MARGIN + INNER), strict=True):
        x = _place(offset, 0, arena_nbytes)
        canvas.line(
            [(x, above), (end, below)], stroke="#bbb", stroke_width="0.8", stroke_dasharray="4 3"
        )


def _brackets(canvas: Canvas, y: float, buckets: Sequence[Bucket], span: tuple[int, int]) -> float:
    """Draw a bar per bucket above the strip, with name, ends and bytes; return the strip's y."""
    for index, bucket in enumerate(buckets):
        row = y + 22 * index
        place: Range = bucket.range
        left, right = _place(place.offset, *span), _place(place.end, *span)
        fill = BUCKET_FILLS[index % len(BUCKET_FILLS)]
        canvas.rectangle(left, row + 12, right - left, 5, fill=fill)
        name = f"{bucket.stage}: {place.first} … {place.last}, {binary(place.nbytes)}"
        at_left = left + GLYPH * len(name) < MARGIN + INNER
        canvas.text(
            left if at_left else right,
            row + 8,
            name,
            fill=fill,
            text_anchor="start" if at_left else "end",
        )
    return y + 22 * len(buckets) + 26


def _legend(canvas: Canvas, y: float, pieces: Sequence[Piece], arena_nbytes: int) -> float:
    """List the kinds with their bytes; return the y below."""
    totals: dict[str, int] = {}
    for piece in pieces:
        totals[piece.region.kind] = totals.get(piece.region.kind, 0) + piece.nbytes
    for index, (kind, nbytes) in enumerate(totals.items()):
        x = MARGIN + (index % 3) * INNER / 3
        row = y + (index // 3) * 20
        fill, meaning = KINDS.get(kind, OTHER)
        canvas.rectangle(x, row, 14, 14, fill=fill)
        share = 100 * nbytes / arena_nbytes
        canvas.text(x + 22, row + 11, f"{kind}  {meaning}: {binary(nbytes)}, {share:.1f} %")
    return y + 20 * ((len(totals) + 2) // 3)
