"""Explanations: the figures of the plan in words, and a picture that is well formed."""

from pathlib import Path
from xml.etree import ElementTree

import torch

from meshrl.weights.explain import MOST_CUTS_SHOWN, Explanation
from meshrl.weights.layout import Box, Layout, Parameter, join
from meshrl.weights.plan import Plan, plan

DOCUMENTED = Path(__file__).parents[2] / "docs" / "weights-plan.svg"
PATH = "{http://www.w3.org/2000/svg}path"


def one_rank(**shapes: tuple[int, ...]) -> Layout:
    return Layout({n: Parameter(s, torch.float32, (Box.whole(s),)) for n, s in shapes.items()}, ranks=1)


def small_transformer() -> Plan:
    """FSDP2 x TP2 to two replicas of TP2, cast and fused: the picture of the documentation."""
    columns = {"wq": (512, 512), "wk": (256, 512), "wv": (256, 512), "w1": (1536, 512), "w3": (1536, 512)}
    rows = {"wo": (512, 512), "w2": (512, 1536)}
    norms = {"attention_norm": (512,), "ffn_norm": (512,)}
    shapes: dict[str, tuple[int, ...]] = {"embedding": (8192, 512), "norm": (512,)}
    split = {"embedding": 0}
    for layer in range(4):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in (columns | rows | norms).items()}
        split |= {f"layers.{layer}.{name}": 0 for name in columns}
        split |= {f"layers.{layer}.{name}": 1 for name in rows}
    whole = one_rank(**shapes)
    tensor_parallel = whole.split(split, 2)
    parameters = {}
    for name, held in tensor_parallel.parameters.items():
        boxes = []
        for half in range(2):
            for box in held.boxes:
                assert box is not None
                first = box.shape[0] // 2
                offset, shape = (box.offset[0] + half * first, *box.offset[1:]), (first, *box.shape[1:])
                boxes.append(Box(offset, shape))
        parameters[name] = Parameter(held.shape, held.dtype, tuple(boxes))
    wanted = tensor_parallel.cast(torch.bfloat16)
    for layer in range(4):
        name = f"layers.{layer}"
        wanted = wanted.fused(f"{name}.qkv", [f"{name}.wq", f"{name}.wk", f"{name}.wv"])
        wanted = wanted.fused(f"{name}.gate_up", [f"{name}.w1", f"{name}.w3"])
    return plan(Layout(parameters, ranks=4), join([wanted, wanted]))


def test_the_picture_of_the_documentation_is_drawn_by_this_code() -> None:
    assert DOCUMENTED.read_text().strip() == small_transformer().explain().svg()


def test_a_table_says_who_reads_what_from_whom() -> None:
    held = one_rank(w=(1000, 4), v=(500, 4)).split({"w": 0}, 2)
    text = str(Explanation(plan(held, held), "giver", "taker"))
    lines = [line.split() for line in text.splitlines()]
    assert text.startswith(
        "2 parameters, 2 giver ranks to 2 taker ranks\n32.0 kB moved, 32.0 kB needed, ratio 1.000"
    )
    assert lines[3:7] == [
        ["taker[0]", "taker[1]", "given"],
        ["giver[0]", "16.0", "kB", "0", "B", "16.0", "kB"],
        ["giver[1]", "0", "B", "16.0", "kB", "16.0", "kB"],
        ["taken", "16.0", "kB", "16.0", "kB", "32.0", "kB"],
    ]


def test_casts_and_fused_and_renamed_tensors_are_told_apart() -> None:
    source = one_rank(**dict.fromkeys(("q", "k", "norm", "other"), (4, 6)))
    target = source.cast(torch.bfloat16).fused("qk", ["q", "k"]).renamed({"norm": "scale"})
    assert str(plan(source, target).explain()).splitlines()[-3:] == [
        "q [4, 6] and 1 more: 1 box, 1 piece, float32 to bfloat16, fused: in qk",
        "norm [4, 6]: 1 box, 1 piece, float32 to bfloat16, renamed: in scale",
        "other [4, 6]: 1 box, 1 piece, float32 to bfloat16",
    ]


def test_many_ranks_and_many_ways_to_cut_make_a_short_text() -> None:
    whole = one_rank(w=(64, 64))
    text = str(plan(whole.split({"w": 0}, 64), whole.whole(32)).explain())
    assert "1 parameter, 64 learner ranks to 32 generator ranks" in text and len(text.splitlines()) == 7
    assert "takes 16.4 kB (least 16.4 kB, most 16.4 kB), from 64.0 ranks (least 64, most 64)" in text
    many = one_rank(**{f"p{number}": (number,) for number in range(1, MOST_CUTS_SHOWN + 4)})
    assert str(plan(many, many).explain()).endswith("and 3 other ways to cut")


def test_the_picture_has_a_ribbon_for_each_pair_that_shares_something() -> None:
    whole = one_rank(w=(800, 600)).split({"w": 0}, 2)
    explanation = Explanation(plan(whole, whole.split({"w": 1}, 2)), "a<b", "c&d")
    ribbons = list(ElementTree.fromstring(explanation.svg()).iter(PATH))
    assert [ribbon[0].text for ribbon in ribbons] == [
        f"a<b[{source}] to c&d[{target}]: 480,000 bytes" for source in (0, 1) for target in (0, 1)
    ]
    assert "ratio 1.000" in explanation._repr_html_()
    crowd = one_rank(w=(64, 64))
    assert "the first 16 ranks" in plan(crowd.split({"w": 0}, 64), crowd.whole(2)).explain().svg()


def test_nothing_to_move_can_be_explained() -> None:
    empty = one_rank(w=(0, 3))
    explanation = plan(empty, empty).explain()
    assert "0 B moved, 0 B needed, ratio 1.000" in str(explanation)
    ElementTree.fromstring(explanation.svg())
