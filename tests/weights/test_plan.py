"""Plans: each element once, no byte too many, shared evenly, packed by reader."""

import doctest
import itertools
import math
import pickle
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import meshrl.weights.explain
import meshrl.weights.layout
import meshrl.weights.leases
import meshrl.weights.plan
import meshrl.weights.transport
import meshrl.weights.wire
from meshrl.weights.errors import LayoutError
from meshrl.weights.layout import ALIGNMENT, Box, Layout, Parameter, allocate, join
from meshrl.weights.plan import Plan, plan

FLOATS = (torch.float32, torch.bfloat16)
Boxes = tuple[Box | None, ...]


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> list[Box]:
    """At most so many boxes that fill a parameter: a grid with cuts anywhere; uneven, and some empty."""
    pieces, cells = [], 1
    for extent in shape:
        most = min(3, ranks // cells) - 1
        cuts = [0, *sorted(draw(st.lists(st.integers(0, extent), max_size=most))), extent]
        pieces.append([(a, b - a) for a, b in itertools.pairwise(cuts)])
        cells *= len(pieces[-1])
    return [Box(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in itertools.product(*pieces)]


@st.composite
def sources(draw: st.DrawFn) -> Layout:
    """Up to four parameters on up to five ranks; each box lies on one or several of them."""
    ranks = draw(st.integers(1, 5))
    parameters = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        dtype = draw(st.sampled_from([*FLOATS, torch.uint8]))
        boxes = draw(tilings(shape, ranks))
        held: list[Box | None] = [
            *boxes,
            *(draw(st.sampled_from([None, *boxes])) for _ in range(ranks - len(boxes))),
        ]
        parameters[f"p{number}"] = Parameter(shape, dtype, tuple(draw(st.permutations(held))))
    return Layout(parameters, ranks)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """A source, and a target that wants any box of some of its parameters on each rank, in any float dtype."""
    source = draw(sources())
    ranks = draw(st.integers(1, 4))
    parameters = {}
    for name, held in source.parameters.items():
        if not draw(st.integers(0, 5)):
            continue
        dtype = draw(st.sampled_from(FLOATS)) if held.dtype in FLOATS else held.dtype
        boxes: list[Box | None] = []
        for _ in range(ranks):
            corners = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in held.shape]
            box = Box(tuple(a for a, _ in corners), tuple(b - a for a, b in corners))
            boxes.append(draw(st.sampled_from([box, Box.whole(held.shape), None])))
        parameters[name] = Parameter(held.shape, dtype, tuple(boxes))
    return source, Layout(parameters, ranks)


def reads(made: Plan, rank: int) -> list[tuple[int, str, Box]]:
    """What a target rank takes: (source rank, parameter, box)."""
    return [
        (source, cell.parameter, cell.box)
        for source in range(made.source.ranks)
        for cell in made.cells(source)
        if rank in cell.readers
    ]


@given(pairs())
def test_every_needed_element_is_taken_exactly_once_from_a_rank_that_holds_it(
    pair: tuple[Layout, Layout],
) -> None:
    source, target = pair
    made = plan(source, target)
    for rank in range(target.ranks):
        counts = {
            name: torch.zeros(box.shape, dtype=torch.int32)
            for name, held in target.parameters.items()
            if (box := held.boxes[rank]) is not None
        }
        for giver, name, box in reads(made, rank):
            held, wanted = source.parameters[name].boxes[giver], target.parameters[name].boxes[rank]
            assert held is not None and held.intersect(box) == box and wanted is not None
            counts[name][wanted.slices(box)] += 1
        assert all((count == 1).all() for count in counts.values())


@given(pairs())
def test_bytes_moved_are_bytes_needed(pair: tuple[Layout, Layout]) -> None:
    made = plan(*pair)
    assert made.traffic.sum() == made.bytes_needed
    for source in range(made.source.ranks):
        for rank in range(made.target.ranks):
            moved = sum(cell.bytes for cell in made.cells(source) if rank in cell.readers)
            assert made.traffic[source, rank] == moved
            assert (moved > 0) == (source in made.sources_of(rank))


@given(pairs())
def test_cells_lie_apart_and_those_of_the_same_readers_together(pair: tuple[Layout, Layout]) -> None:
    made = plan(*pair)
    for source in range(made.source.ranks):
        cells, stretches = made.cells(source), made.stretches(source)
        assert all(cell.start % ALIGNMENT == 0 and cell.bytes > 0 for cell in cells)
        assert all(a.start + a.bytes <= b.start for a, b in itertools.pairwise(cells))
        assert made.slot_bytes(source) >= max((cell.start + cell.bytes for cell in cells), default=0)
        readers = [
            {c.readers for c in cells if stretch.start <= c.start < stretch.start + stretch.bytes}
            for stretch in stretches
        ]
        assert all(len(found) == 1 for found in readers)
        assert all(a != b for a, b in itertools.pairwise(readers))
        assert len({next(iter(found)) for found in readers}) == len(stretches)
        ends = [(stretch.start, stretch.start + stretch.bytes) for stretch in stretches]
        assert all(any(a <= c.start and c.start + c.bytes <= b for a, b in ends) for c in cells)


@given(pairs())
def test_what_is_published_and_read_by_plan_is_what_was_wanted(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    made = plan(source, target)
    whole = values_of(source)
    slots = [published(made, rank, whole) for rank in range(source.ranks)]
    for rank in range(target.ranks):
        for name, tensor in landed(made, rank, slots).items():
            box = target.parameters[name].boxes[rank]
            assert box is not None
            wanted = whole[name].to(made.source.parameters[name].dtype).to(target.parameters[name].dtype)
            assert torch.equal(tensor, wanted[Box.whole(wanted.shape).slices(box)])


@given(pairs())
def test_equal_layouts_make_equal_plans(pair: tuple[Layout, Layout]) -> None:
    first, second = plan(*pair), plan(*pickle.loads(pickle.dumps(pair)))
    assert [first.cells(r) for r in range(first.source.ranks)] == [
        second.cells(r) for r in range(second.source.ranks)
    ]
    assert (first.traffic == second.traffic).all()


@given(sources(), st.integers(1, 5))
def test_holders_of_a_box_serve_in_turn(source: Layout, readers: int) -> None:
    made = plan(source, source.whole(readers))
    for group in made.groups:
        served: dict[Box, list[int]] = {}
        for name in group.names:
            boxes = source.parameters[name].boxes
            for box in set(boxes) - {None}:
                assert box is not None
                if box.elements:
                    holders = [rank for rank, held in enumerate(boxes) if held == box]
                    counts = served.setdefault(box, [0] * len(holders))
                    for number, rank in enumerate(holders):
                        found = (
                            cell for cell in made.cells(rank) if (cell.parameter, cell.box) == (name, box)
                        )
                        counts[number] += sum(len(cell.readers) for cell in found)
        assert all(max(counts) - min(counts) <= 1 for counts in served.values())


def test_replicas_of_a_sharded_learner_share_the_load_evenly() -> None:
    halves: Boxes = tuple(Box((4 * shard, 0), (4, 6)) for _ in range(3) for shard in range(2))
    source = Layout({f"p{i}": Parameter((8, 6), torch.float32, halves) for i in range(12)}, ranks=6)
    made = plan(source, source.whole(4))
    assert made.traffic.sum(axis=1).tolist() == [4 * 12 * 8 * 6 * 4 // 6] * 6


def test_one_rank_to_one_rank_is_a_single_stretch() -> None:
    source = Layout(
        {f"p{i}": Parameter((3, i), torch.float32, (Box.whole((3, i)),)) for i in range(1, 9)}, ranks=1
    )
    assert len(plan(source, source.whole()).stretches(0)) == 1


def test_shards_by_rows_to_columns_are_one_stretch_for_each_pair_and_replicas_share_it() -> None:
    rows: Boxes = (Box((0, 0), (4, 6)), Box((4, 0), (4, 6)))
    source = Layout({f"p{i}": Parameter((8, 6), torch.float32, rows) for i in range(5)}, ranks=2)
    columns = source.split({name: 1 for name in source.parameters}, ranks=2)
    made = plan(source, join([columns, columns]))
    for rank in (0, 1):
        assert [cell.readers for cell in made.cells(rank)] == [(0, 2)] * 5 + [(1, 3)] * 5
        assert len(made.stretches(rank)) == 2
        assert made.slot_bytes(rank) == 10 * ALIGNMENT  # each cell of 4 x 3 floats once, padded


def test_a_cast_to_a_smaller_dtype_halves_what_moves_and_one_to_a_larger_does_not_double_it() -> None:
    def held(dtype: torch.dtype) -> Layout:
        return Layout({"w": Parameter((4, 6), dtype, (Box.whole((4, 6)),))}, ranks=1)

    assert plan(held(torch.float32), held(torch.bfloat16)).traffic.sum() == 4 * 6 * 2
    assert plan(held(torch.bfloat16), held(torch.float32)).traffic.sum() == 4 * 6 * 2


def test_a_fused_tensor_of_each_rank_is_filled_with_its_parts() -> None:
    shapes = {"q": (8, 4), "k": (4, 4), "v": (4, 4)}
    source = Layout({n: Parameter(s, torch.float32, (Box.whole(s),)) for n, s in shapes.items()}, ranks=1)
    target = source.split(dict.fromkeys(shapes, 0), 2).fused("qkv", list(shapes))
    made, whole = plan(source, target), values_of(source)
    slots = [published(made, 0, whole)]
    for rank in (0, 1):
        pieces = [whole[name].chunk(2)[rank] for name in shapes]
        assert torch.equal(landed(made, rank, slots)["qkv"], torch.cat(pieces))


def test_a_trillion_parameters_are_planned_by_the_ways_to_cut_and_not_one_by_one() -> None:
    ways = {}
    for shape in ((4096, 7168), (7168, 2048), (129280, 7168)):
        one = Layout({"w": Parameter(shape, torch.bfloat16, (None,))}, ranks=1)
        rows, columns = (one.split({"w": dim}, ranks=256).parameters["w"].boxes for dim in (0, 1))
        for dim in (0, 1):
            wanted = one.split({"w": dim}, ranks=8).parameters["w"].boxes * 16
            ways[len(ways)] = shape, (rows, columns)[len(ways) % 4 == 3], wanted
    source, target = {}, {}
    for number in range(61 * 1000):
        shape, held, wanted = ways[number % len(ways)]
        source[f"p{number}"] = Parameter(shape, torch.bfloat16, held)
        target[f"p{number}"] = Parameter(shape, torch.bfloat16, wanted)
    made = plan(Layout(source, 256), Layout(target, 128))
    assert sum(math.prod(held.shape) for held in source.values()) > 1e12
    assert len(made.groups) == len(ways) and made.traffic.sum() == made.bytes_needed


@pytest.mark.parametrize(
    "module",
    [
        meshrl.weights.layout,
        meshrl.weights.leases,
        meshrl.weights.plan,
        meshrl.weights.explain,
        meshrl.weights.transport,
        meshrl.weights.wire,
    ],
)
def test_the_examples_in_the_docstrings_hold(module: ModuleType) -> None:
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


HALF, REST = Box((0,), (2,)), Box((2,), (2,))


@pytest.mark.parametrize(
    ("boxes", "words"),
    [
        ((HALF,), "hold 2 of the 4 elements of w"),
        ((HALF, Box((1,), (3,))), "overlap without being equal"),
        ((HALF, Box((2,), (3,))), "lies outside of w"),
        ((None,), "hold 0 of the 4 elements of w"),
    ],
)
def test_a_source_with_gap_overlap_or_excess_is_refused(boxes: Boxes, words: str) -> None:
    source = Layout({"w": Parameter((4,), torch.float32, boxes)}, len(boxes))
    with pytest.raises(LayoutError, match=words):
        plan(source, source.whole())


def test_a_gap_is_found_where_another_parameter_is_held_in_equal_boxes() -> None:
    held = {name: Parameter((size,), torch.float32, (HALF, REST)) for name, size in [("v", 4), ("w", 5)]}
    wanted = {name: Parameter(parameter.shape, torch.float32, (HALF,)) for name, parameter in held.items()}
    with pytest.raises(LayoutError, match="hold 4 of the 5 elements of w"):
        plan(Layout(held, 2), Layout(wanted, 1))


def test_a_plan_does_not_depend_on_which_parameters_share_an_object() -> None:
    def held(boxes: list[Boxes]) -> Layout:
        return Layout({f"p{i}": Parameter((4,), torch.float32, held) for i, held in enumerate(boxes)}, 3)

    replicas: Boxes = (Box.whole((4,)),) * 3
    shared, apart = held([replicas] * 4), held([tuple(list(replicas)) for _ in range(4)])
    one, other = plan(shared, shared.whole(2)), plan(apart, apart.whole(2))
    assert shared == apart and one.cells(0) == other.cells(0)
    assert one.traffic.tolist() == other.traffic.tolist()
    assert sorted(one.traffic.sum(axis=1).tolist()) == [2 * 16, 3 * 16, 3 * 16]


def small(
    dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4,), box: Box | None = None
) -> Layout:
    return Layout({"w": Parameter(shape, dtype, (box or Box.whole(shape),))}, 1)


def test_a_target_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"target wants w of shape \(5,\), source has \(4,\)"):
        plan(small(), small(shape=(5,)))
    with pytest.raises(
        LayoutError, match="target wants w as torch.float32, source has torch.int64: only floats"
    ):
        plan(small(torch.int64), small())
    with pytest.raises(LayoutError, match="wants v, which source does not have; it has w"):
        plan(small(), Layout({"v": small().parameters["w"]}, 1))
    for box in (Box((0,), (-2,)), Box((0, 0), (4, 1)), Box((), ())):
        with pytest.raises(LayoutError, match="rank 0 of the target wants Box.* outside of w"):
            plan(small(), small(box=box))
    with pytest.raises(LayoutError, match="w has 0 boxes in the target, which has 1 ranks"):
        plan(small(), Layout({"w": Parameter((4,), torch.float32, ())}, 1))
    with pytest.raises(LayoutError, match="rank 0 of the target wants Box.* outside of w"):
        plan(small(), small(box=Box((3,), (2,))))


def values_of(layout: Layout) -> dict[str, torch.Tensor]:
    """Whole parameters, each element another value."""
    return {
        name: torch.arange(1, 1 + math.prod(held.shape)).to(held.dtype).reshape(held.shape)
        for name, held in layout.parameters.items()
    }


def published(made: Plan, rank: int, whole: dict[str, torch.Tensor]) -> torch.Tensor:
    """The slot of a source rank that holds these values."""
    slot = torch.full((made.slot_bytes(rank),), 255, dtype=torch.uint8)
    for cell in made.cells(rank):
        value = whole[cell.parameter][Box.whole(whole[cell.parameter].shape).slices(cell.box)].to(cell.dtype)
        slot[cell.start : cell.start + cell.bytes] = value.contiguous().reshape(-1).view(torch.uint8)
    return slot


def landed(made: Plan, rank: int, slots: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A target rank's tensors, filled from the slots."""
    held = made.target.tensors(rank)
    tensors = allocate(held)
    parts = {part.parameter: (tensors[name], part) for name, tensor in held.items() for part in tensor.parts}
    for source, slot in enumerate(slots):
        for cell in made.cells(source):
            if rank in cell.readers:
                tensor, part = parts[cell.parameter]
                value = slot[cell.start : cell.start + cell.bytes].view(cell.dtype).view(cell.box.shape)
                tensor[part.box.slices(cell.box, part.at)] = value.to(tensor.dtype)
    return tensors
