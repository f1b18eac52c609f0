"""Which prompt comes next, and the seed of each sample."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshrl.actors.rollouts import _prompt_index, sample_seed


def test_no_two_samples_share_a_seed() -> None:
    paths = [
        (split, prompt, occasion, sample)
        for split in ("train", "heldout")
        for prompt in range(20)
        for occasion in (0, 1, "evaluation")
        for sample in range(8)
    ]
    seeds = {sample_seed(seed, *path) for seed in (0, 1) for path in paths}
    assert len(seeds) == 2 * len(paths)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(3, "train", 5, 0, 1) == sample_seed(3, "train", 5, 0, 1)


@given(size=st.integers(1, 50), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own(size: int, seed: int, epoch: int) -> None:
    order = [_prompt_index(position, size, seed) for position in range(epoch * size, (epoch + 1) * size)]
    assert sorted(order) == list(range(size))
    assert order == [
        _prompt_index(position, size, seed) for position in range(epoch * size, (epoch + 1) * size)
    ]


def test_an_endless_task_goes_on_and_on() -> None:
    assert [_prompt_index(position, None, 7) for position in (0, 1, 10**9)] == [0, 1, 10**9]
