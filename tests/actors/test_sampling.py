"""Drawing tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.actors.engines.sampling import check_sampling, draw, sample, uniforms
from meshrl.errors import UserError
from meshrl.rollout import SamplingParams

LARGEST_UNIFORM = 1 - 2.0**-23


@given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 40))
def test_a_uniform_number_depends_on_its_seed_and_position_alone(
    seeds: list[int], count: int, more: int
) -> None:
    together = uniforms(seeds, count + more)
    for row, seed in zip(together, seeds, strict=True):
        np.testing.assert_array_equal(uniforms([seed], count)[0], row[:count])


def test_uniform_numbers_fill_the_unit_interval_evenly_within_and_across_seeds() -> None:
    values = uniforms(range(256), 256)
    assert values.dtype == np.float32 and values.min() >= 0 and values.max() <= LARGEST_UNIFORM
    for stream in (values.ravel(), values[:, 0], values[0]):
        counts = np.histogram(stream, bins=8, range=(0, 1))[0]
        expected = len(stream) / 8
        # chi-square with 7 degrees of freedom: 30 is beyond the 0.9999 quantile
        assert ((counts - expected) ** 2 / expected).sum() < 30
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(values[:, 0])) > 250


def test_tokens_are_drawn_in_proportion_to_their_probability() -> None:
    torch.manual_seed(0)
    logits = torch.randn(7) * 2
    grid = (torch.arange(100_000) + 0.5) / 100_000
    tokens, logprobs = draw(logits.expand(len(grid), -1), grid)
    frequencies = torch.bincount(tokens, minlength=7) / len(grid)
    torch.testing.assert_close(frequencies, logits.softmax(-1), atol=2e-5, rtol=0)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[tokens])


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-50, 50, width=32)), min_size=1, max_size=30),
    st.sampled_from([0.0, 0.5, LARGEST_UNIFORM]),
)
def test_an_excluded_token_is_never_drawn(logits: list[float], uniform: float) -> None:
    if all(value == -math.inf for value in logits):
        logits[0] = 0.0
    tokens, logprobs = draw(torch.tensor([logits]), torch.tensor([uniform]))
    assert logits[int(tokens[0])] > -math.inf
    assert math.isfinite(float(logprobs[0]))


def test_logits_that_are_not_numbers_give_logprobs_that_are_not_numbers() -> None:
    tokens, logprobs = draw(torch.full((1, 5), math.nan), torch.tensor([0.3]))
    assert 0 <= int(tokens[0]) < 5 and math.isnan(float(logprobs[0]))


def reference_distribution(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> dict[int, float]:
    """The slow and plain definition: id -> probability."""
    scaled = torch.tensor(logits, dtype=torch.float64) / temperature
    order = sorted(range(len(logits)), key=lambda i: (-float(scaled[i]), i))
    kept = order[:top_k] if top_k else order
    probability = dict(zip(kept, scaled[kept].softmax(-1).tolist(), strict=True))
    if top_p < 1:
        before, nucleus = 0.0, []
        for token in kept:
            if nucleus and before >= top_p:
                break
            nucleus.append(token)
            before += probability[token]
        kept = nucleus
    total = sum(probability[token] for token in kept)
    return {token: probability[token] / total for token in kept}


@settings(max_examples=60)
@given(st.data())
def test_rows_with_parameters_of_their_own_follow_the_definition(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(rows, 9) * 2
    temperature = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.3, 1.0, 2.0]), min_size=rows, max_size=rows))
    )
    top_k = torch.tensor(data.draw(st.lists(st.sampled_from([0, 1, 3, 50]), min_size=rows, max_size=rows)))
    top_p = torch.tensor(
        data.draw(st.lists(st.sampled_from([1.0, 0.01, 0.5, 0.9]), min_size=rows, max_size=rows))
    )
    seen: list[dict[int, float]] = [{} for _ in range(rows)]
    for step in range(300):
        uniform = torch.full((rows,), (step + 0.5) / 300)
        for row, (token, logprob) in enumerate(
            zip(*(x.tolist() for x in sample(logits, uniform, temperature, top_k, top_p)), strict=True)
        ):
            seen[row][token] = logprob
    for row in range(rows):
        expected = reference_distribution(
            logits[row].tolist(), float(temperature[row]), int(top_k[row]), float(top_p[row])
        )
        assert set(seen[row]) <= set(expected)
        assert all(token in seen[row] for token, p in expected.items() if p > 1 / 100)
        for token, logprob in seen[row].items():
            assert logprob == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_temperature_zero_takes_the_likeliest_token_with_its_plain_logprob() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    tokens, logprobs = sample(
        logits,
        torch.tensor([0.999, 0.0]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([1, 0]),
        torch.tensor([0.1, 1.0]),
    )
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (SamplingParams(temperature=-1.0), "temperature is -1.0"),
        (SamplingParams(temperature=math.nan), "temperature is nan"),
        (SamplingParams(top_p=0.0), "top_p is 0.0"),
        (SamplingParams(top_p=1.5), "top_p is 1.5"),
        (SamplingParams(top_k=-1), "top_k is -1"),
        (SamplingParams(max_tokens=0), "max_tokens is 0"),
        (SamplingParams(stop_token_ids=(16,)), "stop_token_ids"),
        (SamplingParams(stop=("",)), "stop is"),
    ],
)
def test_parameters_that_make_no_sense_are_named(params: SamplingParams, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_sampling(params, vocab_size=16)
