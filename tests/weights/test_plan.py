"""Plans: each element once, no byte too many, shared evenly, merged where it may be."""

import dataclasses
import doctest
import itertools
import math
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshrl.weights.layout
import meshrl.weights.plan
from meshrl.weights.errors import LayoutError
from meshrl.weights.layout import Box, Layout, ParameterInfo, join
from meshrl.weights.plan import plan

DTYPES = (torch.float32, torch.bfloat16, torch.uint8)


@st.composite
def tilings(draw: st.DrawFn, name: str, info: ParameterInfo) -> list[Box]:
    """Boxes that fill a parameter: a grid with cuts anywhere; shards are uneven and some are empty."""
    pieces = []
    for size in info.shape:
        cuts = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=2))), size]
        pieces.append([(a, b - a) for a, b in itertools.pairwise(cuts)])
    return [
        Box(name, tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*pieces)
    ]


@st.composite
def layouts(draw: st.DrawFn, parameters: dict[str, ParameterInfo], *, repeated_boxes: bool) -> Layout:
    """A layout of up to four ranks; each box lies on one or several of them."""
    ranks: list[list[Box]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for name, info in parameters.items():
        for box in draw(tilings(name, info)):
            holders = draw(
                st.sets(st.integers(0, len(ranks) - 1), min_size=1, max_size=3 if repeated_boxes else 1)
            )
            for rank in holders:
                ranks[rank].append(box)
    return Layout(parameters, tuple(map(tuple, ranks)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
    infos = draw(st.lists(st.builds(ParameterInfo, shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4))
    parameters = {f"p{i}": info for i, info in enumerate(infos)}
    both = [draw(layouts(parameters, repeated_boxes=True)) for _ in range(2)]
    return both[0], both[1]


@given(pairs())
def test_every_needed_element_is_copied_exactly_once(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    made = plan(source, target)
    for rank, boxes in enumerate(target.ranks):
        counts = [torch.zeros(box.shape, dtype=torch.int32) for box in boxes]
        for copy in made.copies[rank]:
            counts[copy.target_box][boxes[copy.target_box].slices(copy.region)] += 1
            held = source.ranks[copy.source_rank][copy.source_box]
            assert held.intersect(copy.region) == copy.region
        assert all((count == 1).all() for count in counts)


@given(pairs())
def test_bytes_moved_are_bytes_needed(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    made = plan(source, target)
    for rank, boxes in enumerate(target.ranks):
        assert made.bytes(rank) == sum(target.box_bytes(box) for box in boxes)


@given(pairs())
def test_runs_and_strided_copies_put_every_value_where_it_belongs(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    whole = {
        name: torch.arange(1, 1 + math.prod(info.shape)).to(info.dtype).reshape(info.shape)
        for name, info in source.parameters.items()
    }
    storages = [storage_of(source, rank, whole) for rank in range(len(source.ranks))]
    made = plan(source, target)
    for rank, boxes in enumerate(target.ranks):
        arrived = torch.zeros(target.positions(rank)[1], dtype=torch.uint8)
        views = target.views(rank, arrived)
        runs, strided = made.runs(rank)
        for copy in strided:
            held = source.ranks[copy.source_rank][copy.source_box]
            piece = source.views(copy.source_rank, storages[copy.source_rank])[copy.source_box]
            landing = views[copy.target_box][boxes[copy.target_box].slices(copy.region)]
            landing.copy_(piece[held.slices(copy.region)])
        # In any order: a run that carries padding along must not touch what another brings.
        for run in reversed(runs):
            arrived[run.target_start : run.target_start + run.bytes] = storages[run.source_rank][
                run.source_start : run.source_start + run.bytes
            ]
        for box, view in zip(boxes, views, strict=True):
            assert torch.equal(view, whole[box.parameter][region_of(box)])


@given(pairs())
def test_equal_layouts_make_equal_plans(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    again = [dataclasses.replace(layout, parameters=dict(layout.parameters)) for layout in pair]
    assert plan(source, target).copies == plan(again[0], again[1]).copies


def test_one_rank_to_one_rank_is_a_single_run() -> None:
    parameters = {f"p{i}": ParameterInfo((3, i), torch.float32) for i in range(1, 9)}
    layout = Layout(parameters, ()).whole()
    runs, strided = plan(layout, layout).runs(0)
    assert len(runs) == 1 and not strided


def test_rows_are_runs_and_columns_are_strided() -> None:
    parameters = {"w": ParameterInfo((4, 6), torch.float32)}
    rows = Layout(parameters, ((Box("w", (0, 0), (2, 6)),), (Box("w", (2, 0), (2, 6)),)))
    columns = Layout(parameters, ((Box("w", (0, 0), (4, 3)),), (Box("w", (0, 3), (4, 3)),)))
    whole = rows.whole()
    assert [len(part) for part in plan(rows, whole).runs(0)] == [2, 0]
    assert [len(part) for part in plan(columns, whole).runs(0)] == [0, 2]
    assert [len(part) for part in plan(rows, columns).runs(1)] == [0, 2]


def test_replicas_of_a_box_share_the_load() -> None:
    parameters = {f"p{i}": ParameterInfo((8,), torch.float32) for i in range(12)}
    replicated = Layout(parameters, ()).whole(3)
    made = plan(replicated, replicated.whole(4))
    given_by = [0, 0, 0]
    for copies in made.copies:
        for copy in copies:
            given_by[copy.source_rank] += replicated.box_bytes(copy.region)
    assert given_by == [12 * 4 * 32 // 3] * 3


@pytest.mark.parametrize("module", [meshrl.weights.layout, meshrl.weights.plan])
def test_the_examples_in_the_docstrings_hold(module: ModuleType) -> None:
    names = {"torch": torch, "Layout": Layout, "ParameterInfo": ParameterInfo}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and not result.failed


HALF, REST = Box("w", (0,), (2,)), Box("w", (2,), (2,))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (((HALF,),), "hold 2 of the 4 elements of w"),
        (((HALF, Box("w", (1,), (3,))),), "overlap without being equal"),
        (((HALF, Box("w", (2,), (3,))),), "lies outside of w"),
        ((), "hold 0 of the 4 elements of w"),
    ],
)
def test_a_source_with_gap_overlap_or_excess_is_refused(
    ranks: tuple[tuple[Box, ...], ...], words: str
) -> None:
    source = Layout({"w": ParameterInfo((4,), torch.float32)}, ranks)
    with pytest.raises(LayoutError, match=words):
        plan(source, source.whole())


@pytest.mark.parametrize("other", [ParameterInfo((5,), torch.float32), ParameterInfo((4,), torch.bfloat16)])
def test_a_target_that_wants_another_shape_or_dtype_is_refused(other: ParameterInfo) -> None:
    source = Layout({"w": ParameterInfo((4,), torch.float32)}, ((HALF, REST),))
    target = Layout({"w": other}, ()).whole()
    with pytest.raises(LayoutError, match="target wants w as"):
        plan(source, target)


def test_a_target_with_a_name_the_learner_lacks_is_refused() -> None:
    source = Layout({"w": ParameterInfo((4,), torch.float32)}, ((HALF, REST),))
    with pytest.raises(LayoutError, match="wants v as .* source has None"):
        plan(source, Layout({"v": ParameterInfo((4,), torch.float32)}, ()).whole())


def test_ranks_that_disagree_on_a_parameter_cannot_be_joined() -> None:
    one = Layout({"w": ParameterInfo((4,), torch.float32)}, ((HALF,),))
    other = Layout({"w": ParameterInfo((5,), torch.float32)}, ((REST,),))
    with pytest.raises(LayoutError, match=r"w is .*\(4,\).* on rank 0 and .*\(5,\).* on rank 1"):
        join([one, other])


def storage_of(layout: Layout, rank: int, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    storage = torch.full((layout.positions(rank)[1],), 255, dtype=torch.uint8)
    for box, view in zip(layout.ranks[rank], layout.views(rank, storage), strict=True):
        view.copy_(whole[box.parameter][region_of(box)])
    return storage


def region_of(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
