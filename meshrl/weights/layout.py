"""Which rank holds which box of which parameter, as plain data: derived from tensors, or built from another layout.

A box is a rectangular piece of a parameter in global coordinates. A rank keeps the boxes that it holds in
tensors: usually one box a tensor, of the parameter's name; an engine that fuses (q, k and v in one tensor)
keeps several in one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshrl.weights.errors import LayoutError

ALIGNMENT = 64
"""Tensors start at multiples of this many bytes in flat memory: a cache line, and enough for every dtype."""


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a parameter, in global coordinates.

    >>> Box(offset=(2, 0), shape=(2, 8)).elements
    16
    """

    offset: tuple[int, ...]
    """First index in each dimension; `()` for a scalar."""
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        return cls((0,) * len(shape), shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The part that both hold; None where there is none.

        >>> Box((0, 0), (4, 4)).intersect(Box((2, 1), (4, 2)))
        Box(offset=(2, 1), shape=(2, 2))
        """
        start = tuple(map(max, self.offset, other.offset))
        end = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(e - s for s, e in zip(start, end, strict=True))
        return None if any(n <= 0 for n in shape) else Box(start, shape)

    def slices(self, inner: Box, at: tuple[int, ...] | None = None) -> tuple[slice, ...]:
        """Where `inner`, which lies within this box, is in a tensor that has this box at index `at` (None: at 0)."""
        at = at or (0,) * len(self.shape)
        return tuple(
            slice(a + i - o, a + i - o + n)
            for a, i, o, n in zip(at, inner.offset, self.offset, inner.shape, strict=True)
        )


@dataclass(frozen=True)
class Parameter:
    """A parameter and where its pieces lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box | None, ...]
    """One for each rank; None: the rank holds nothing of it. Ranks with equal boxes are replicas. Parameters
    that are cut alike had best share this object: a plan works out each only once."""
    tensor: str | None = None
    """Name of the ranks' tensor that holds the box; None: one of its own, of the parameter's name."""
    at: tuple[tuple[int, ...], ...] | None = None
    """For each rank the index in that tensor at which the box starts; None: the tensor is the box."""


@dataclass(frozen=True)
class Part:
    """What fills a tensor of a rank, or some of it."""

    parameter: str
    box: Box
    at: tuple[int, ...]
    """Index in the tensor at which the box starts."""


@dataclass(frozen=True)
class LocalTensor:
    """A tensor that a rank keeps."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Every parameter and the boxes of every rank.

    >>> source = Layout({"w": Parameter((4, 6), torch.float32, (Box((0, 0), (4, 6)),))}, ranks=1)
    >>> source.split({"w": 1}, ranks=2).parameters["w"].boxes[1]
    Box(offset=(0, 3), shape=(4, 3))
    """

    parameters: Mapping[str, Parameter]
    ranks: int

    def whole(self, ranks: int = 1) -> Layout:
        """Every parameter whole on each of so many ranks: what an engine without sharding needs."""
        return self.split({}, ranks)

    def split(self, dimensions: Mapping[str, int], ranks: int) -> Layout:
        """These parameters cut along a dimension, one piece a rank, as tensor parallelism does; the others whole.

        The first pieces are larger where the size is not a multiple of the ranks, as `torch.chunk` cuts; the
        last may be empty.

        Raises:
            LayoutError: no such parameter or dimension.
        """
        cuts: dict[tuple[tuple[int, ...], int | None], tuple[Box | None, ...]] = {}
        for name, dimension in dimensions.items():
            if name not in self.parameters or not 0 <= dimension < len(self.parameters[name].shape):
                known = self.parameters[name].shape if name in self.parameters else "no such parameter"
                raise LayoutError(f"cannot cut {name} along dimension {dimension}: {known}")
        parameters = {}
        for name, held in self.parameters.items():
            key = held.shape, dimensions.get(name)
            if key not in cuts:
                cuts[key] = _cut(*key, ranks)
            parameters[name] = Parameter(held.shape, held.dtype, cuts[key])
        return Layout(parameters, ranks)

    def fused(self, tensor: str, parts: Sequence[str], dimension: int = 0) -> Layout:
        """Keep these parameters one after another in one tensor of each rank: q, k and v, or gate and up.

        Raises:
            LayoutError: they differ in dtype, or in the dimensions other than this one, on some rank.
        """
        known = self.parameters
        if missing := [name for name in parts if name not in known]:
            raise LayoutError(f"cannot put {missing[0]} into {tensor}: no such parameter")
        if len({known[name].dtype for name in parts}) > 1:
            raise LayoutError(f"{', '.join(parts)} differ in dtype: they cannot be one tensor {tensor}")
        starts: dict[str, list[tuple[int, ...]]] = {name: [] for name in parts}
        for rank in range(self.ranks):
            end = 0
            other = set()
            for name in parts:
                box = known[name].boxes[rank]
                if box is None:
                    raise LayoutError(f"rank {rank} holds nothing of {name}, which {tensor} needs")
                at = [0] * len(box.shape)
                at[dimension] = end
                starts[name].append(tuple(at))
                end += box.shape[dimension]
                other.add(box.shape[:dimension] + box.shape[dimension + 1 :])
            if len(other) > 1:
                raise LayoutError(f"{', '.join(parts)} differ in shape on rank {rank}: no tensor {tensor}")
        changed = {
            name: replace(known[name], tensor=tensor, at=tuple(starts[name])) if name in starts else held
            for name, held in known.items()
        }
        return replace(self, parameters=changed)

    def renamed(self, names: Mapping[str, str]) -> Layout:
        """Keep these parameters in tensors of other names: {TorchTitan's name: Hugging Face's}."""
        if missing := [name for name in names if name not in self.parameters]:
            raise LayoutError(f"cannot rename {missing[0]}: no such parameter")
        changed = {
            name: replace(held, tensor=names[name]) if name in names else held
            for name, held in self.parameters.items()
        }
        return replace(self, parameters=changed)

    def cast(self, dtype: torch.dtype) -> Layout:
        """Floating-point parameters in another dtype; the others as they are."""
        changed = {
            name: replace(held, dtype=dtype) if held.dtype.is_floating_point else held
            for name, held in self.parameters.items()
        }
        return replace(self, parameters=changed)

    def of_rank(self, rank: int) -> Layout:
        """This rank's part alone: what a worker that is one rank of an engine answers with."""
        parameters = {
            name: replace(held, boxes=(held.boxes[rank],), at=held.at and (held.at[rank],))
            for name, held in self.parameters.items()
        }
        return Layout(parameters, 1)

    def tensors(self, rank: int) -> dict[str, LocalTensor]:
        """What a rank keeps, by tensor name, in the order of the parameters.

        Raises:
            LayoutError: parts of a tensor differ in dtype, overlap or leave gaps.
        """
        parts: dict[str, list[Part]] = {}
        for name, held in self.parameters.items():
            box = held.boxes[rank]
            if box is not None:
                at = _start(held, rank)
                if len(at) != len(box.shape):
                    raise LayoutError(
                        f"{name} starts at {at} in {held.tensor or name}, its box is {box.shape}"
                    )
                parts.setdefault(held.tensor or name, []).append(Part(name, box, at))
        return {tensor: self._local(tensor, tuple(held)) for tensor, held in parts.items()}

    def _local(self, tensor: str, parts: tuple[Part, ...]) -> LocalTensor:
        dtypes = {self.parameters[part.parameter].dtype for part in parts}
        if len(dtypes) > 1 or len({len(part.at) for part in parts}) > 1:
            raise LayoutError(f"the parts of {tensor} differ in dtype or dimensions: {parts}")
        ends = [tuple(a + n for a, n in zip(part.at, part.box.shape, strict=True)) for part in parts]
        shape = tuple(max(column) for column in zip(*ends, strict=True))
        places = [Box(part.at, part.box.shape) for part in parts]
        overlap = any(a.intersect(b) for a, b in itertools.combinations(places, 2))
        if overlap or sum(place.elements for place in places) != math.prod(shape):
            raise LayoutError(f"the parts of {tensor} {shape} leave a gap or overlap: {parts}")
        return LocalTensor(shape, dtypes.pop(), parts)


def join(layouts: Sequence[Layout]) -> Layout:
    """One layout of the ranks of several, in order. A rank that does not name a parameter holds nothing of it, as
    with pipeline stages.

    Raises:
        LayoutError: they disagree on a parameter's shape, dtype or tensor.
    """
    ranks = [(layout, rank) for layout in layouts for rank in range(layout.ranks)]
    named: dict[str, tuple[int, Parameter]] = {}
    for number, (layout, _) in enumerate(ranks):
        for name, held in layout.parameters.items():
            first_rank, first = named.setdefault(name, (number, held))
            if held is not first and _kept_as(held) != _kept_as(first):
                raise LayoutError(
                    f"{name} is {_described(name, first)} on rank {first_rank} and {_described(name, held)} on rank "
                    f"{number}: all ranks of a mesh must mean the same by a name"
                )
    # Parameters cut alike share one tuple of boxes afterwards, whoever made them.
    shared: dict[tuple[Box | None, ...], tuple[Box | None, ...]] = {}
    parameters = {}
    for name, (_, first) in named.items():
        held = [(layout.parameters.get(name), rank) for layout, rank in ranks]
        boxes = tuple(None if one is None else one.boxes[rank] for one, rank in held)
        at = None
        if any(one is not None and one.at for one, _ in held):
            at = tuple(_start(one or first, rank if one else 0) for one, rank in held)
        parameters[name] = replace(first, boxes=shared.setdefault(boxes, boxes), at=at)
    return Layout(parameters, len(ranks))


def flat_positions(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where stretches of so many bytes start when laid one after another, each aligned; and the end of the last.

    >>> flat_positions([4, 64, 65])
    ([0, 64, 128], 256)
    """
    positions, end = [], 0
    for size in sizes:
        positions.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return positions, end


def allocate(tensors: Mapping[str, LocalTensor], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """These tensors, zero, in one stretch of memory. Filled: fresh pages copy several times slower."""
    positions, end = flat_positions([tensor.bytes for tensor in tensors.values()])
    memory = torch.zeros(end, dtype=torch.uint8, device=device)
    return {
        name: memory[start : start + tensor.bytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), start in zip(tensors.items(), positions, strict=True)
    }


def _cut(shape: tuple[int, ...], dimension: int | None, ranks: int) -> tuple[Box | None, ...]:
    if dimension is None:
        return (Box.whole(shape),) * ranks
    step = -(-shape[dimension] // ranks)
    boxes = []
    for rank in range(ranks):
        start = min(rank * step, shape[dimension])
        offset, size = [0] * len(shape), list(shape)
        offset[dimension], size[dimension] = start, min(step, shape[dimension] - start)
        boxes.append(Box(tuple(offset), tuple(size)))
    return tuple(boxes)


def _start(held: Parameter, rank: int) -> tuple[int, ...]:
    return held.at[rank] if held.at else (0,) * len(held.shape)


def _kept_as(held: Parameter) -> tuple[object, ...]:
    return held.shape, held.dtype, held.tensor


def _described(name: str, held: Parameter) -> str:
    return f"{held.dtype} {held.shape} in {held.tensor or name}"
