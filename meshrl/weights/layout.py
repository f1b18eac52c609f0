"""Which rank holds which box of which parameter: plain data, derived from tensors or written by hand.

A box is a rectangular piece of a parameter in global coordinates. A rank stores its boxes one after another
in flat memory (`positions`); both sides of a transfer compute the same byte positions from the layout alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshrl.weights.errors import LayoutError

ALIGNMENT = 64
"""Boxes start at multiples of this many bytes: a cache line, and enough for every dtype."""


@dataclass(frozen=True)
class ParameterInfo:
    """The whole parameter, wherever its pieces lie."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Box:
    """A rectangular piece of a parameter, in global coordinates.

    >>> Box("weight", offset=(2, 0), shape=(2, 8)).elements
    16
    """

    parameter: str
    offset: tuple[int, ...]
    """First index in each dimension; `()` for a scalar."""
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The part that both hold; None where there is none.

        >>> Box("w", (0, 0), (4, 4)).intersect(Box("w", (2, 1), (4, 2)))
        Box(parameter='w', offset=(2, 1), shape=(2, 2))
        """
        if self.parameter != other.parameter:
            return None
        start = tuple(map(max, self.offset, other.offset))
        end = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        shape = tuple(e - s for s, e in zip(start, end, strict=True))
        return None if any(n <= 0 for n in shape) else Box(self.parameter, start, shape)

    def slices(self, inner: Box) -> tuple[slice, ...]:
        """Where `inner`, which lies within this box, is in a tensor of this box's shape."""
        return tuple(
            slice(i - o, i - o + n) for i, o, n in zip(inner.offset, self.offset, inner.shape, strict=True)
        )


@dataclass(frozen=True)
class Layout:
    """The boxes of every rank.

    Ranks that hold the same box are replicas of it. Two boxes that overlap otherwise are an error, found by
    `meshrl.weights.plan.plan`.
    """

    parameters: Mapping[str, ParameterInfo]
    ranks: tuple[tuple[Box, ...], ...]

    def whole(self, ranks: int = 1) -> Layout:
        """Every parameter whole on each of so many ranks: what an engine without sharding needs."""
        boxes = tuple(Box(name, (0,) * len(info.shape), info.shape) for name, info in self.parameters.items())
        return Layout(self.parameters, (boxes,) * ranks)

    def box_bytes(self, box: Box) -> int:
        return box.elements * self.parameters[box.parameter].dtype.itemsize

    def positions(self, rank: int) -> tuple[list[int], int]:
        """Byte position of each of the rank's boxes in its flat storage, and the bytes of that storage."""
        positions, end = [], 0
        for box in self.ranks[rank]:
            positions.append(end)
            end += -(-self.box_bytes(box) // ALIGNMENT) * ALIGNMENT
        return positions, end

    def views(self, rank: int, storage: Tensor) -> list[Tensor]:
        """Each of the rank's boxes as a tensor of its shape and dtype, in this storage (uint8, `[bytes]`)."""
        positions, _ = self.positions(rank)
        return [
            storage[position : position + self.box_bytes(box)]
            .view(self.parameters[box.parameter].dtype)
            .view(box.shape)
            for box, position in zip(self.ranks[rank], positions, strict=True)
        ]

    def fingerprint(self, rank: int) -> int:
        """A number that ranks share only if they store the same boxes in the same way (63 bits)."""
        rows = [
            (box.parameter, box.offset, box.shape, str(self.parameters[box.parameter].dtype))
            for box in self.ranks[rank]
        ]
        return xxhash.xxh3_64_intdigest(repr(rows).encode()) >> 1


def layout_of(named: Mapping[str, Tensor]) -> Layout:
    """The layout of one rank's tensors; one box a name, of which a sharded rank may hold an empty one.

    Args:
        named: parameters by name, whole tensors or DTensors. Names that share memory (tied) stay two
            parameters.

    Raises:
        LayoutError: a DTensor is a partial sum, or its shard is not one box.
    """
    parameters, boxes = {}, []
    for name, tensor in named.items():
        shape = tuple(tensor.shape)
        parameters[name] = ParameterInfo(shape, tensor.dtype)
        boxes.append(
            _box_of_shard(name, tensor)
            if isinstance(tensor, DTensor)
            else Box(name, (0,) * len(shape), shape)
        )
    return Layout(parameters, (tuple(boxes),))


def signature(named: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    """What decides the layout of these tensors on this rank, found much faster than the layout itself."""
    return [
        (
            name,
            tensor.shape,
            tensor.dtype,
            local(tensor).shape,
            tensor.placements if isinstance(tensor, DTensor) else (),
        )
        for name, tensor in named.items()
    ]


def join(layouts: Sequence[Layout]) -> Layout:
    """One layout of the ranks of several, in order.

    Raises:
        LayoutError: they disagree on a parameter's name, shape or dtype.
    """
    first = layouts[0]
    for rank, layout in enumerate(layouts):
        if dict(layout.parameters) == dict(first.parameters):
            continue
        names = sorted(set(layout.parameters) | set(first.parameters))
        name = next(n for n in names if layout.parameters.get(n) != first.parameters.get(n))
        raise LayoutError(
            f"{name} is {first.parameters.get(name)} on rank 0 and {layout.parameters.get(name)} "
            f"on rank {rank}: all ranks of a learner must name the same global parameters"
        )
    return Layout(first.parameters, tuple(boxes for layout in layouts for boxes in layout.ranks))


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without its history."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _box_of_shard(name: str, tensor: DTensor) -> Box:
    """Box of this rank's shard, after checking that the placement says what the shard is."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise LayoutError(
            f"{name} is a partial sum ({tensor.placements}): only sharded or replicated weights travel"
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    held = tuple(tensor.to_local().shape)
    if tuple(shape) != held:
        raise LayoutError(f"{name} should be a shard {tuple(shape)} by {tensor.placements} but holds {held}")
    return Box(name, tuple(int(o) for o in offset), held)
