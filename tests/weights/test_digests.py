"""Digests: both sides draw the same blocks, each block has its turn, and what is wrong is found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshrl.weights.digests import BLOCK_BYTES, SAMPLED_SHARE, blocks_to_verify, digest
from meshrl.weights.layout import Box, Layout, Parameter
from meshrl.weights.plan import Cell, Plan, plan


def plan_of(*shapes: tuple[int, ...]) -> Plan:
    source = Layout(
        {f"p{i}": Parameter(s, torch.float32, (Box.whole(s),)) for i, s in enumerate(shapes)}, ranks=1
    )
    return plan(source, source.whole())


def elements(cell: Cell) -> torch.Tensor:
    """A tensor of the cell's shape whose elements are numbered."""
    return torch.arange(cell.box.elements).reshape(cell.box.shape)


@given(
    st.lists(st.lists(st.integers(1, 300), max_size=3).map(tuple), min_size=1, max_size=5),
    st.integers(0, 10**9),
)
def test_blocks_lie_within_cells_and_both_sides_draw_the_same(
    shapes: list[tuple[int, ...]], version: int
) -> None:
    cells, stretches = plan_of(*shapes).cells(0), plan_of(*shapes).stretches(0)
    blocks = blocks_to_verify(cells, stretches, "sampled", version)
    assert blocks == blocks_to_verify(cells, stretches, "sampled", version) and blocks
    for block in blocks:
        found = block.of(elements(cells[block.cell])).reshape(-1)
        assert 0 < found.numel() * cells[block.cell].dtype.itemsize <= BLOCK_BYTES
        assert torch.equal(found, torch.arange(int(found[0]), int(found[0]) + found.numel()))


def test_always_means_every_row_of_every_cell_and_off_none() -> None:
    made = plan_of((5, 3), (), (7,), (2, 3, 4))
    cells, stretches = made.cells(0), made.stretches(0)
    blocks = blocks_to_verify(cells, stretches, "always", 1)
    assert [block.cell for block in blocks] == list(range(4))
    assert all(
        torch.equal(block.of(elements(cell)).reshape(-1), elements(cell).reshape(-1))
        for block, cell in zip(blocks, cells, strict=True)
    )
    assert blocks_to_verify(cells, stretches, "off", 1) == []


@pytest.mark.parametrize("shape", [(40, 3000), (100_000,), (3, 200, 500), (2, 20_000)])
def test_over_the_versions_every_element_has_its_turn(shape: tuple[int, ...]) -> None:
    made = plan_of(shape)
    cells, stretches = made.cells(0), made.stretches(0)
    seen = torch.zeros(shape, dtype=torch.bool)
    for version in range(400):
        for block in blocks_to_verify(cells, stretches, "sampled", version):
            block.of(seen).fill_(True)
    assert seen.all()


def test_a_small_share_of_a_large_slot_is_sampled() -> None:
    made = plan_of((20000, 2048), (8192, 8192))
    cells, stretches = made.cells(0), made.stretches(0)
    blocks = blocks_to_verify(cells, stretches, "sampled", 5)
    tensors = [torch.empty(cell.box.shape, device="meta") for cell in cells]
    sampled = sum(block.of(tensors[block.cell]).nbytes for block in blocks)
    assert 0.5 <= sampled * SAMPLED_SHARE / sum(cell.bytes for cell in cells) <= 1.0
    assert len(blocks) == sum(stretch.bytes for stretch in stretches) // (BLOCK_BYTES * SAMPLED_SHARE)


@pytest.mark.parametrize("bit", [0, 13, 31])
def test_a_digest_tells_any_bit_and_nothing_else(bit: int) -> None:
    values = torch.randn(6, 8)
    strided = torch.zeros(12, 16)[::2, ::2]
    strided.copy_(values)
    assert digest(values) == digest(strided) == digest(values.clone())
    flipped = values.clone()
    flipped.view(torch.int32)[3, 4] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digest(flipped) != digest(values)
    assert digest(torch.zeros(0)) == 0 and digest(torch.tensor(1.0)) != digest(torch.tensor(-1.0))
