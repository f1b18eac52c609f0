"""Digests of what was published: of every cell, or of blocks drawn anew for each version.

Sampled, two blocks of each stretch, or about one byte in 1,024 where that is more, are read again on both sides:
a fraction of a millisecond, 1 to 2 % of a broadcast. It finds what is wrong on the whole (another
version, a wrong offset, a stretch that never came) and not every single bit; over many versions each block has
its turn. `always` finds each bit, at about the price of copying once more on both sides.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import xxhash
from torch import Tensor

from meshrl.weights.plan import Cell
from meshrl.weights.wire import Stretch

Digests = Literal["always", "sampled", "off"]

BLOCK_BYTES = 1 << 16
SAMPLED_SHARE = 1024
"""One byte in so many is verified."""
LEAST_BLOCKS = 2
"""Of each stretch, however short."""


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of a cell. Of a cell whose rows are long (stacked experts), rows of one of its rows."""

    cell: int
    """Position in the source rank's cells."""
    outer: tuple[int, ...]
    """Index in the dimensions before that of the rows."""
    first_row: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """This block of a tensor that holds the cell."""
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor[self.outer]
        return rows[self.first_row : self.first_row + self.rows]


def blocks_to_verify(
    cells: Sequence[Cell], stretches: Sequence[Stretch], mode: Digests, version: int
) -> list[Block]:
    """The blocks of a slot whose digests its manifest holds; owner and readers draw the same ones."""
    if mode == "off":
        return []
    if mode == "always":
        return [Block(number, (), 0, (*cell.box.shape, 1)[0]) for number, cell in enumerate(cells)]
    starts = [cell.start for cell in cells]
    draw = random.Random(version)
    blocks = []
    for stretch in stretches:
        count = max(LEAST_BLOCKS, stretch.bytes // (BLOCK_BYTES * SAMPLED_SHARE))
        for number in range(count):
            # One in each of `count` equal parts, so that the blocks are spread.
            position = stretch.start + int(stretch.bytes * (number + draw.random()) / count)
            cell = bisect.bisect_right(starts, position) - 1
            blocks.append(_block(cell, cells[cell], position - starts[cell]))
    return blocks


def digest(tensor: Tensor) -> int:
    """xxh3 of the elements, row by row (64 bits); a NaN of two bytes counts as any other, since a cast to a larger
    dtype and back does not keep which one it was."""
    if tensor.is_floating_point() and tensor.itemsize == 2 and (nan := tensor.isnan()).any():
        tensor = tensor.masked_fill(nan, float("nan"))
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).cpu()
    return xxhash.xxh3_64_intdigest(flat.numpy().data) if flat.numel() else 0


def _block(number: int, cell: Cell, position: int) -> Block:
    """The block at this byte of a cell, which is cut into blocks of at most `BLOCK_BYTES`, always in one way."""
    shape = cell.box.shape or (1,)
    element = min(position, cell.bytes - 1) // cell.dtype.itemsize
    outer: list[int] = []
    for rows, *inner in (shape[depth:] for depth in range(len(shape))):
        row, element = divmod(element, math.prod(inner))
        row_bytes = math.prod(inner) * cell.dtype.itemsize
        if row_bytes <= BLOCK_BYTES:
            rows_each = BLOCK_BYTES // row_bytes
            first = row // rows_each * rows_each
            return Block(number, tuple(outer), first, min(rows_each, rows - first))
        outer.append(row)
    raise AssertionError("an element is smaller than a block")
