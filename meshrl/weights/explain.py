"""A plan for people: who reads what from whom and how much, as text and as a picture."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from meshrl.weights.plan import Plan

MOST_RANKS_SHOWN = 16
"""A side; of more the text gives least, mean and most, and the picture leaves the rest out."""
MOST_CUTS_SHOWN = 40
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_BOX_WIDTH, _FLOW_WIDTH, _MARGIN, _GAP, _HEIGHT, _LEAST_BOX = 150, 320, 12, 14, 320, 18


@dataclass(frozen=True)
class Explanation:
    """`print` it, or let a notebook draw it; nothing moves."""

    plan: Plan
    source_name: str = "learner"
    target_name: str = "generator"

    def __str__(self) -> str:
        plan, moved = self.plan, int(self.plan.traffic.sum())
        ratio = moved / plan.bytes_needed if plan.bytes_needed else 1.0
        return "\n".join(
            [
                f"{_count(len(plan.target.parameters), 'parameter')}, "
                f"{_count(plan.source.ranks, f'{self.source_name} rank')} to "
                f"{_count(plan.target.ranks, f'{self.target_name} rank')}",
                f"{size(moved)} moved, {size(plan.bytes_needed)} needed, ratio {ratio:.3f}",
                "",
                *(self._table() if max(plan.traffic.shape) <= MOST_RANKS_SHOWN else self._summary()),
                "",
                *self._cuts(),
            ]
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{self.svg()}<pre>{html.escape(str(self))}</pre>"

    def svg(self) -> str:
        """The picture: a ribbon from each source rank to each target rank, as wide as the bytes that go that way."""
        traffic = self.plan.traffic[:MOST_RANKS_SHOWN, :MOST_RANKS_SHOWN].astype(float)
        total = max(traffic.sum(), 1.0)
        ranks = max(traffic.shape)
        height = max(_HEIGHT, ranks * (_LEAST_BOX + _GAP))
        scale = (height - ranks * (_LEAST_BOX + _GAP)) / total
        left = _stack(traffic.sum(axis=1) * scale, height)
        right = _stack(traffic.sum(axis=0) * scale, height)
        x_right = _MARGIN + _BOX_WIDTH + _FLOW_WIDTH
        width, full_height = x_right + _BOX_WIDTH + _MARGIN, height + 2 * _MARGIN
        shapes = [*self._ribbons(traffic, scale, left, right, _MARGIN + _BOX_WIDTH, x_right)]
        for x, name, places, sums in (
            (_MARGIN, self.source_name, left, self.plan.traffic.sum(axis=1)),
            (x_right, self.target_name, right, self.plan.traffic.sum(axis=0)),
        ):
            for rank, (top, tall) in enumerate(places):
                shapes.append(_box(x, top, tall, f"{name}[{rank}]  {size(int(sums[rank]))}"))
        left_out = max(self.plan.traffic.shape) - MOST_RANKS_SHOWN
        if left_out > 0:
            shapes.append(
                f'<text x="{width / 2}" y="{full_height - 2}" text-anchor="middle">the first {MOST_RANKS_SHOWN} '
                "ranks of each side</text>"
            )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {full_height}" width="{width}" '
            f'height="{full_height}" font-family="sans-serif" font-size="12" fill="currentColor" color="#777">'
            f"{''.join(shapes)}</svg>"
        )

    def _table(self) -> Iterator[str]:
        """Rows: who gives; columns: who takes."""
        traffic = self.plan.traffic
        head = ["", *(f"{self.target_name}[{rank}]" for rank in range(traffic.shape[1])), "given"]
        rows = [
            [f"{self.source_name}[{rank}]", *map(size, row.tolist()), size(int(row.sum()))]
            for rank, row in enumerate(traffic)
        ]
        rows.append(["taken", *map(size, traffic.sum(axis=0).tolist()), size(int(traffic.sum()))])
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        for row in (head, *rows):
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
            yield "  ".join(cells)

    def _summary(self) -> Iterator[str]:
        traffic = self.plan.traffic
        for name, word, preposition, bytes_, peers in (
            (self.source_name, "gives", "to", traffic.sum(axis=1), (traffic > 0).sum(axis=1)),
            (self.target_name, "takes", "from", traffic.sum(axis=0), (traffic > 0).sum(axis=0)),
        ):
            least, mean, most = int(bytes_.min()), int(bytes_.mean()), int(bytes_.max())
            yield (
                f"a {name} rank {word} {size(mean)} (least {size(least)}, most {size(most)}), "
                f"{preposition} {peers.mean():.1f} ranks (least {peers.min()}, most {peers.max()})"
            )

    def _cuts(self) -> Iterator[str]:
        """One line for each way in which parameters are cut, cast and kept."""
        plan = self.plan
        alike: dict[tuple[object, ...], list[str]] = {}
        fused = Counter(held.tensor for held in plan.target.parameters.values() if held.tensor)
        for number, group in enumerate(plan.groups):
            for name in group.names:
                tensor = plan.target.parameters[name].tensor
                kept = "" if tensor in (None, name) else "fused" if fused[tensor] > 1 else "renamed"
                dtypes = plan.held_as[name], plan.target.parameters[name].dtype
                alike.setdefault((number, kept, *dtypes), []).append(name)
        for (number, kept, held_as, wanted_as), names in list(alike.items())[:MOST_CUTS_SHOWN]:
            overlap, parameter = plan.groups[int(str(number))].overlap, plan.target.parameters[names[0]]
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            cast = "" if held_as == wanted_as else f" to {wanted_as}"
            home = f", {kept}: in {parameter.tensor}" if kept else ""
            yield (
                f"{names[0]} {list(parameter.shape)}{more}: {_count(len(overlap.boxes), 'box', 'boxes')}, "
                f"{_count(len(overlap.box), 'piece')}, {held_as}{cast}{home}".replace("torch.", "")
            )
        if len(alike) > MOST_CUTS_SHOWN:
            yield f"and {len(alike) - MOST_CUTS_SHOWN:,} other ways to cut"

    def _ribbons(
        self,
        traffic: np.ndarray,
        scale: float,
        left: Sequence[tuple[float, float]],
        right: Sequence[tuple[float, float]],
        x_left: int,
        x_right: int,
    ) -> Iterator[str]:
        from_left = [
            top + (tall - sum(row) * scale) / 2 for (top, tall), row in zip(left, traffic, strict=True)
        ]
        to_right = [
            top + (tall - sum(column) * scale) / 2
            for (top, tall), column in zip(right, traffic.T, strict=True)
        ]
        middle = (x_left + x_right) / 2
        for source, row in enumerate(traffic):
            for target, amount in enumerate(row):
                if not amount:
                    continue
                wide = max(amount * scale, 0.5)
                a, b = from_left[source], to_right[target]
                from_left[source] += amount * scale
                to_right[target] += amount * scale
                yield (
                    f'<path d="M{x_left},{a:.1f} C{middle},{a:.1f} {middle},{b:.1f} {x_right},{b:.1f} l0,{wide:.1f} '
                    f'C{middle},{b + wide:.1f} {middle},{a + wide:.1f} {x_left},{a + wide:.1f} Z" '
                    f'fill="hsl({source * 137 % 360},55%,55%)" fill-opacity="0.55"><title>'
                    f"{html.escape(f'{self.source_name}[{source}] to {self.target_name}[{target}]')}: "
                    f"{int(amount):,} bytes</title></path>"
                )


def _count(number: int, one: str, several: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def size(bytes_: int) -> str:
    """
    >>> size(0), size(999), size(1_500_000), size(2_000_000_000_000)
    ('0 B', '999 B', '1.5 MB', '2.0 TB')
    """
    value, unit = float(bytes_), 0
    while value >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{bytes_} B"


def _stack(heights: Sequence[float], height: float) -> list[tuple[float, float]]:
    """Top and height of boxes laid below one another, in the middle of the picture."""
    boxes = [_LEAST_BOX + tall for tall in heights]
    free = height - sum(boxes) - _GAP * (len(boxes) - 1)
    tops = accumulate(boxes[:-1], lambda top, tall: top + tall + _GAP, initial=_MARGIN + max(free, 0) / 2)
    return list(zip(tops, boxes, strict=True))


def _box(x: float, top: float, tall: float, label: str) -> str:
    middle = top + tall / 2
    return (
        f'<rect x="{x}" y="{top:.1f}" width="{_BOX_WIDTH}" height="{tall:.1f}" rx="3" fill="none" '
        f'stroke="currentColor"/><text x="{x + _BOX_WIDTH / 2}" y="{middle:.1f}" text-anchor="middle" '
        f'dominant-baseline="central">{html.escape(label)}</text>'
    )
