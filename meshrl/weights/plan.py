"""Which bytes go from which rank to which: the overlap of two layouts, a pure function.

Parameters that are cut alike, on both sides, make one group whose overlap is worked out once; so a plan costs
as much as there are different ways to cut, not as there are parameters. Lists of copies are made only for the
rank that asks.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from meshrl.weights.errors import LayoutError
from meshrl.weights.layout import Box, Layout, Parameter, flat_positions
from meshrl.weights.wire import Stretch

if TYPE_CHECKING:
    from meshrl.weights.explain import Explanation

Boxes = tuple[Box | None, ...]


@dataclass(frozen=True)
class Cell:
    """A box that a source rank publishes: what one or several target ranks take from it, packed."""

    parameter: str
    box: Box
    """In global coordinates; lies within the source rank's box and within each reader's."""
    dtype: torch.dtype
    readers: tuple[int, ...]
    """Target ranks that take it."""
    start: int
    """Byte in the source rank's slot."""

    @property
    def bytes(self) -> int:
        return self.box.elements * self.dtype.itemsize


@dataclass(frozen=True)
class _Overlap:
    """How one way to cut meets another: a row for each piece that a target rank takes."""

    holders: tuple[tuple[int, ...], ...]
    """Ranks that hold each distinct box of the source."""
    boxes: tuple[Box, ...]
    """The distinct boxes of the source."""
    box: np.ndarray
    """int32 `[reads]`: which distinct box a piece is of."""
    target: np.ndarray
    """int32 `[reads]`: target rank that takes it."""
    elements: np.ndarray
    """int64 `[reads]`: of the piece."""
    turn: np.ndarray
    """int32 `[reads]`: how many earlier rows take of the same box."""
    readers: np.ndarray
    """int32 `[distinct boxes]`: rows that take of it."""

    @property
    def cycle(self) -> int:
        """After so many parameters the same holders are chosen again."""
        return math.lcm(*(len(holders) for holders in self.holders))

    def sources(self, position: int) -> np.ndarray:
        """int32 `[reads]`: the rank that each piece is taken from, for the group's parameter at this position.

        The holders of a box take turns, so that over a group's parameters and all target ranks each of them
        serves as many pieces as the others, or one more.
        """
        chosen = np.empty(len(self.box), dtype=np.int32)
        for number, holders in enumerate(self.holders):
            rows = self.box == number
            if len(holders) == 1:
                chosen[rows] = holders[0]
            else:
                turns = self.turn[rows] + position * self.readers[number]
                chosen[rows] = np.asarray(holders, dtype=np.int32)[turns % len(holders)]
        return chosen


@dataclass(frozen=True)
class _Group:
    """Parameters cut alike on both sides."""

    names: tuple[str, ...]
    itemsize: int
    overlap: _Overlap


@dataclass(frozen=True)
class Plan:
    """Every copy of a transfer; made by `plan`.

    Bytes moved are bytes needed: each element that a target rank needs comes from one source rank, once.
    """

    source: Layout
    """As the source holds it, in the dtypes that travel."""
    held_as: Mapping[str, torch.dtype]
    """Dtype of each parameter on the source ranks, before any cast."""
    target: Layout
    groups: tuple[_Group, ...]

    def cells(self, rank: int) -> tuple[Cell, ...]:
        """What a source rank publishes, in the order of its slot: what the same readers take lies together."""
        if rank not in self._cells:
            self._cells[rank] = self._make_cells(rank)
        return self._cells[rank]

    def stretches(self, rank: int) -> list[Stretch]:
        """A source rank's slot cut where the readers change."""
        stretches: list[Stretch] = []
        readers = None
        for cell in self.cells(rank):
            if cell.readers == readers:
                start = stretches.pop().start
            else:
                start, readers = cell.start, cell.readers
            stretches.append(Stretch(start, cell.start + cell.bytes - start))
        return stretches

    def slot_bytes(self, rank: int) -> int:
        """Bytes that a source rank needs for one version."""
        cells = self.cells(rank)
        return flat_positions([cell.bytes for cell in cells])[1]

    def sources_of(self, rank: int) -> list[int]:
        """Source ranks that a target rank takes something from."""
        return np.flatnonzero(self.traffic[:, rank]).tolist()

    @cached_property
    def traffic(self) -> np.ndarray:
        """int64 `[source ranks, target ranks]`: bytes that each takes from each."""
        traffic = np.zeros((self.source.ranks, self.target.ranks), dtype=np.int64)
        for group in self.groups:
            cycle, count = group.overlap.cycle, len(group.names)
            for position in range(min(cycle, count)):
                times = -(-(count - position) // cycle)
                moved = group.overlap.elements * (group.itemsize * times)
                np.add.at(traffic, (group.overlap.sources(position), group.overlap.target), moved)
        return traffic

    @cached_property
    def bytes_needed(self) -> int:
        """Bytes of everything that the target ranks keep, in the dtypes that travel."""
        needed = 0
        for name, held in self.target.parameters.items():
            size = self.source.parameters[name].dtype.itemsize
            needed += size * sum(box.elements for box in held.boxes if box is not None)
        return needed

    def explain(self) -> Explanation:
        """Who reads what from whom, and how much: prints as text, draws itself in a notebook."""
        from meshrl.weights.explain import Explanation

        return Explanation(self)

    @cached_property
    def _cells(self) -> dict[int, tuple[Cell, ...]]:
        """Of the source ranks that were asked for."""
        return {}

    def _make_cells(self, rank: int) -> tuple[Cell, ...]:
        readers: dict[tuple[str, Box], list[int]] = {}
        for group in self.groups:
            overlap = group.overlap
            for position in range(min(overlap.cycle, len(group.names))):
                rows = np.flatnonzero(overlap.sources(position) == rank)
                pieces = [(overlap.boxes[overlap.box[row]], int(overlap.target[row])) for row in rows]
                for name in group.names[position :: overlap.cycle]:
                    boxes = self.target.parameters[name].boxes
                    for held, target in pieces:
                        wanted = boxes[target]
                        region = held.intersect(wanted) if wanted is not None else None
                        assert region is not None  # it is what made the row
                        readers.setdefault((name, region), []).append(target)
        order = {name: number for number, name in enumerate(self.source.parameters)}
        listed = sorted(readers, key=lambda cell: (readers[cell], order[cell[0]], cell[1].offset))
        cells = [
            Cell(name, box, self.source.parameters[name].dtype, tuple(readers[name, box]), 0)
            for name, box in listed
        ]
        starts, _ = flat_positions([cell.bytes for cell in cells])
        return tuple(replace(cell, start=start) for cell, start in zip(cells, starts, strict=True))


def plan(source: Layout, target: Layout) -> Plan:
    """What each target rank takes from which source rank. Equal layouts make equal plans.

    What is held by several ranks is taken from each in turn. A target of a smaller dtype is cast by the
    source before anything moves, one of a larger dtype on arrival.

    Raises:
        LayoutError: the source's boxes leave a gap, overlap without being equal or stick out; or the target
            wants a parameter that the source lacks, or has in another shape.

    >>> held = {"w": Parameter((4, 2), torch.float32, (Box((0, 0), (2, 2)), Box((2, 0), (2, 2))))}
    >>> made = plan(Layout(held, ranks=2), Layout(held, ranks=2).split({"w": 1}, ranks=2))
    >>> made.traffic.tolist()
    [[8, 8], [8, 8]]
    """
    alike: dict[tuple[tuple[int, ...], int, int, int], list[str]] = {}
    travelling: dict[str, Parameter] = {}
    cuts = _Cuts()
    for name, wanted in target.parameters.items():
        held = source.parameters.get(name)
        if held is None:
            like = difflib.get_close_matches(name, source.parameters, n=1) or list(source.parameters)[:1]
            raise LayoutError(f"target wants {name}, which source does not have; it has {' '.join(like)}, …")
        if held.shape != wanted.shape:
            raise LayoutError(f"target wants {name} of shape {wanted.shape}, source has {held.shape}")
        for side, layout, parameter in (("source", source, held), ("target", target, wanted)):
            if len(parameter.boxes) != layout.ranks:
                raise LayoutError(
                    f"{name} has {len(parameter.boxes)} boxes in the {side}, which has {layout.ranks} ranks"
                )
        travelling[name] = replace(held, dtype=_travelling_dtype(name, held.dtype, wanted.dtype))
        key = held.shape, cuts.number(held.boxes), cuts.number(wanted.boxes), travelling[name].dtype.itemsize
        alike.setdefault(key, []).append(name)
    overlaps: dict[tuple[tuple[int, ...], int, int], _Overlap] = {}
    groups = []
    for (shape, held_cut, wanted_cut, itemsize), names in alike.items():
        cut = shape, held_cut, wanted_cut
        if cut not in overlaps:
            held, wanted = source.parameters[names[0]], target.parameters[names[0]]
            overlaps[cut] = _overlap(names[0], shape, held.boxes, wanted.boxes)
        groups.append(_Group(tuple(names), itemsize, overlaps[cut]))
    held_as = {name: source.parameters[name].dtype for name in travelling}
    return Plan(replace(source, parameters=travelling), held_as, target, tuple(groups))


class _Cuts:
    """Numbers for the different ways to cut: equal ones share theirs, whether they are one object or not."""

    def __init__(self) -> None:
        self._by_object: dict[int, int] = {}
        self._by_value: dict[Boxes, int] = {}

    def number(self, boxes: Boxes) -> int:
        """Of boxes that live at least as long as this object. Each object is compared once."""
        if id(boxes) not in self._by_object:
            self._by_object[id(boxes)] = self._by_value.setdefault(boxes, len(self._by_value))
        return self._by_object[id(boxes)]


def _travelling_dtype(name: str, held: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    if held == wanted:
        return held
    if not (held.is_floating_point and wanted.is_floating_point):
        raise LayoutError(f"target wants {name} as {wanted}, source has {held}: only floats are cast")
    return wanted if wanted.itemsize <= held.itemsize else held


def _overlap(name: str, shape: tuple[int, ...], source: Boxes, target: Boxes) -> _Overlap:
    holders: dict[Box, list[int]] = {}
    for rank, box in enumerate(source):
        if box is not None and not _inside(box, shape):
            raise LayoutError(f"rank {rank} of the source holds {box}, which lies outside of {name} {shape}")
        if box is not None and box.elements:
            holders.setdefault(box, []).append(rank)
    boxes = tuple(holders)
    _check_tiling(name, shape, boxes)
    for rank, box in enumerate(target):
        if box is not None and not _inside(box, shape):
            raise LayoutError(f"rank {rank} of the target wants {box}, which lies outside of {name} {shape}")
    wanted = [(rank, box) for rank, box in enumerate(target) if box is not None and box.elements]
    held_from, held_to = _corners(boxes, len(shape))
    from_, to = _corners([box for _, box in wanted], len(shape))
    sizes = np.minimum(held_to[:, None], to) - np.maximum(held_from[:, None], from_)
    meets = (sizes > 0).all(axis=-1)
    # By target rank, then source box: the order of rows decides who takes turns with whom.
    column, row = np.nonzero(meets.T)
    ranks = np.array([rank for rank, _ in wanted], dtype=np.int32)
    readers = np.bincount(row, minlength=len(boxes))
    turn = np.cumsum(meets, axis=1)[row, column] - 1
    return _Overlap(
        tuple(map(tuple, holders.values())),
        boxes,
        row.astype(np.int32),
        ranks[column],
        sizes[row, column].prod(axis=-1, dtype=np.int64),
        turn.astype(np.int32),
        readers.astype(np.int32),
    )


def _corners(boxes: tuple[Box, ...] | list[Box], dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """First and past-last index of each box: int64 `[boxes, dimensions]`."""
    start = np.array([box.offset for box in boxes], dtype=np.int64).reshape(len(boxes), dimensions)
    size = np.array([box.shape for box in boxes], dtype=np.int64).reshape(len(boxes), dimensions)
    return start, start + size


def _check_tiling(name: str, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> None:
    """Distinct boxes, which lie inside, must fill the parameter: no gap, no overlap."""
    start, end = _corners(boxes, len(shape))
    shared = np.all(np.minimum(end[:, None], end) > np.maximum(start[:, None], start), axis=-1)
    np.fill_diagonal(shared, False)
    if shared.any():
        one, other = np.argwhere(shared)[0]
        raise LayoutError(f"{boxes[one]} and {boxes[other]} of {name} overlap without being equal")
    held, needed = sum(box.elements for box in boxes), math.prod(shape)
    if held != needed:
        raise LayoutError(f"source ranks hold {held} of the {needed} elements of {name} {shape}")


def _inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.offset) == len(box.shape) == len(shape) or min(box.shape, default=0) < 0:
        return False
    return all(o >= 0 and o + n <= size for o, n, size in zip(box.offset, box.shape, shape, strict=True))
