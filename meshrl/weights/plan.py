"""Which bytes go from which rank to which: the overlap of two layouts, a pure function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.weights.errors import LayoutError
from meshrl.weights.layout import ALIGNMENT, Box, Layout


@dataclass(frozen=True)
class Copy:
    """One rectangular piece that a target rank takes from a source rank."""

    source_rank: int
    source_box: int
    """Position in the source rank's boxes."""
    target_box: int
    """Position in the target rank's boxes."""
    region: Box
    """What is copied, in global coordinates; lies within both boxes."""


@dataclass(frozen=True)
class Run:
    """A stretch of bytes that is contiguous on both sides."""

    source_rank: int
    source_start: int
    """Byte position in the source rank's storage."""
    target_start: int
    """Byte position in the target rank's storage."""
    bytes: int


@dataclass(frozen=True)
class Plan:
    """Every copy of a transfer."""

    source: Layout
    target: Layout
    copies: tuple[tuple[Copy, ...], ...]
    """For each target rank, in the order of its boxes."""

    def bytes(self, rank: int) -> int:
        """Bytes that a target rank takes; equal to the bytes of its boxes."""
        return sum(self.source.box_bytes(copy.region) for copy in self.copies[rank])

    def runs(self, rank: int) -> tuple[list[Run], list[Copy]]:
        """A target rank's copies as contiguous runs, merged where they touch, and those that need strides.

        Two runs touch when nothing lies between them, or on both sides the padding between two boxes.
        """
        source_positions = [self.source.positions(r)[0] for r in range(len(self.source.ranks))]
        target_positions, _ = self.target.positions(rank)
        runs: list[_BoxRun] = []
        strided: list[Copy] = []
        for copy in self.copies[rank]:
            source_box = self.source.ranks[copy.source_rank][copy.source_box]
            target_box = self.target.ranks[rank][copy.target_box]
            taken_from, landing = (
                _contiguous_start(source_box, copy.region),
                _contiguous_start(target_box, copy.region),
            )
            if taken_from is None or landing is None:
                strided.append(copy)
                continue
            size = self.source.parameters[copy.region.parameter].dtype.itemsize
            elements = copy.region.elements
            run = Run(
                copy.source_rank,
                source_positions[copy.source_rank][copy.source_box] + taken_from * size,
                target_positions[copy.target_box] + landing * size,
                elements * size,
            )
            ends_boxes = (
                taken_from + elements == source_box.elements and landing + elements == target_box.elements
            )
            runs.append(_BoxRun(run, ends_boxes))
        runs.sort(key=lambda r: (r.run.source_rank, r.run.source_start))
        return _merge(runs), strided


@dataclass(frozen=True)
class _BoxRun:
    run: Run
    ends_boxes: bool
    """What follows on both sides is padding, then the next box."""


def plan(source: Layout, target: Layout) -> Plan:
    """Give each target rank the copies that fill its boxes, each element once.

    Of the ranks that hold the same box, the one with the fewest bytes to give so far is taken: the same
    layouts make the same plan everywhere. Empty boxes need no copy.

    Raises:
        LayoutError: the layouts disagree on a parameter, source boxes leave a gap or overlap without being
            equal.

    >>> first, second = Box("w", (0,), (2,)), Box("w", (2,), (2,))
    >>> halves = Layout({"w": ParameterInfo((4,), torch.float32)}, ((first,), (second,)))
    >>> [(c.source_rank, c.region.offset) for c in plan(halves, halves.whole()).copies[0]]
    [(0, (0,)), (1, (2,))]
    """
    holders = _holders(source)
    _check_tiling(source, holders)
    _check_target(source, target)
    load = [0] * len(source.ranks)
    everything = []
    for boxes in target.ranks:
        copies = []
        for index, box in enumerate(boxes):
            for held, ranks in holders.get(box.parameter, {}).items():
                region = held.intersect(box)
                if region is None:
                    continue
                source_rank, source_box = min(ranks, key=lambda holder: load[holder[0]])
                load[source_rank] += source.box_bytes(region)
                copies.append(Copy(source_rank, source_box, index, region))
        everything.append(tuple(copies))
    return Plan(source, target, tuple(everything))


def _holders(layout: Layout) -> dict[str, dict[Box, list[tuple[int, int]]]]:
    """For each parameter its distinct boxes that are not empty, with (rank, position) of who holds them."""
    holders: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    for rank, boxes in enumerate(layout.ranks):
        for index, box in enumerate(boxes):
            if box.elements:
                holders.setdefault(box.parameter, {}).setdefault(box, []).append((rank, index))
    return holders


def _check_tiling(layout: Layout, holders: dict[str, dict[Box, list[tuple[int, int]]]]) -> None:
    """Distinct boxes of a parameter must fill it: no gap, no overlap, nothing outside."""
    for name, info in layout.parameters.items():
        boxes = list(holders.get(name, ()))
        for i, box in enumerate(boxes):
            inside = all(
                o >= 0 and o + n <= size for o, n, size in zip(box.offset, box.shape, info.shape, strict=True)
            )
            if not inside:
                raise LayoutError(f"{box} lies outside of {name} {info.shape}")
            for other in boxes[:i]:
                if box.intersect(other) is not None:
                    raise LayoutError(f"{box} and {other} of the source overlap without being equal")
        held, needed = sum(box.elements for box in boxes), math.prod(info.shape)
        if held != needed:
            raise LayoutError(f"source ranks hold {held} of the {needed} elements of {name} {info.shape}")


def _check_target(source: Layout, target: Layout) -> None:
    for name, info in target.parameters.items():
        if source.parameters.get(name) != info:
            raise LayoutError(f"target wants {name} as {info}, source has {source.parameters.get(name)}")


def _contiguous_start(box: Box, region: Box) -> int | None:
    """Element at which `region` starts in the contiguous storage of `box`; None if it is not one stretch of
    it.

    >>> _contiguous_start(Box("w", (0, 0), (4, 8)), Box("w", (1, 0), (2, 8)))
    8
    """
    start, stride, partial = 0, 1, False
    for offset, size, inner_offset, inner_size in reversed(
        list(zip(box.offset, box.shape, region.offset, region.shape, strict=True))
    ):
        # Once a dimension is cut, every dimension outside it must be of size 1 in the region.
        if partial and inner_size > 1:
            return None
        start += (inner_offset - offset) * stride
        stride *= size
        partial |= inner_size < size
    return start


def _merge(runs: Sequence[_BoxRun]) -> list[Run]:
    """Join runs that follow each other on both sides, directly or with the padding between two boxes."""
    merged: list[Run] = []
    padding_follows = False
    for box_run in runs:
        run = box_run.run
        if merged and merged[-1].source_rank == run.source_rank:
            last = merged[-1]
            source_end, target_end = last.source_start + last.bytes, last.target_start + last.bytes
            gap = run.source_start - source_end
            same_gap = run.target_start - target_end == gap
            is_padding = padding_follows and gap == -source_end % ALIGNMENT == -target_end % ALIGNMENT
            if same_gap and (gap == 0 or is_padding):
                run = Run(run.source_rank, last.source_start, last.target_start, last.bytes + gap + run.bytes)
                merged.pop()
        merged.append(run)
        padding_follows = box_run.ends_boxes
    return merged
