"""Right values of losses and aggregations (numbers: cases 1 to 4, 9 and 11)."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshrl.losses import (
    Aggregation,
    GlobalCounts,
    KLEstimator,
    Loss,
    LossInputs,
    LossOutputs,
    SequenceMean,
    SequenceSum,
    TokenMean,
    cross_entropy,
    kl_per_token,
    policy_loss,
)

AGGREGATIONS = [TokenMean(), SequenceMean(), SequenceSum(7.0)]


def inputs_of(lengths, seed=0, prompt=1) -> LossInputs:
    """A micro-batch of rollouts with these response lengths, each after `prompt` masked tokens."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.tensor(lengths) + prompt
    tokens = int(total.sum())
    mask = torch.cat([torch.arange(int(n)) >= prompt for n in total])
    return LossInputs(
        logprobs=(-torch.rand(tokens, generator=generator) * 2).requires_grad_(),
        mask=mask,
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), total),
        sequences=len(lengths),
        columns={
            "sampler_logprobs": -torch.rand(tokens, generator=generator) * 2,
            "advantages": torch.randn(tokens, generator=generator),
        },
    )


def part_of(whole: LossInputs, members: list[int]) -> tuple[LossInputs, Tensor]:
    """The rollouts `members` as a micro-batch of their own, and where its tokens are in the whole."""
    chosen = torch.cat([torch.where(whole.sequence == m)[0] for m in members])
    return (
        LossInputs(
            logprobs=whole.logprobs.detach()[chosen].requires_grad_(),
            mask=whole.mask[chosen],
            sequence=torch.cat(
                [torch.full_like(chosen[whole.sequence[chosen] == m], i) for i, m in enumerate(members)]
            ),
            sequences=len(members),
            columns={name: values[chosen] for name, values in whole.columns.items()},
        ),
        chosen,
    )


def value_of(loss: Loss, inputs: LossInputs, counts: GlobalCounts) -> Tensor:
    return (loss(inputs).per_token * loss.aggregation.weights(inputs, counts)).sum()


def counts_of(inputs: LossInputs) -> GlobalCounts:
    return GlobalCounts(int(inputs.mask.sum()), inputs.sequences)


@pytest.mark.parametrize("parts", [[[0], [1]], [[1], [0]], [[0, 1]], [[1, 0]]])
def test_a_token_mean_is_the_same_for_any_assignment(parts):
    """Rollout A: 10 tokens of 1, rollout B: 6 tokens of 3 → 28/16."""
    whole = inputs_of([10, 6], prompt=0)
    with torch.no_grad():
        whole.logprobs.copy_(torch.tensor([-1.0] * 10 + [-3.0] * 6))
    total = sum(
        value_of(cross_entropy(), part_of(whole, part)[0], GlobalCounts(16, 2)).item() for part in parts
    )
    assert total == pytest.approx(1.75)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=7),
    ranks=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 999),
    aggregation=st.sampled_from(AGGREGATIONS),
    ratio=st.sampled_from(["token", "sequence"]),
)
def test_loss_and_gradient_do_not_depend_on_the_split(lengths, ranks, seed, aggregation: Aggregation, ratio):
    whole = inputs_of(lengths, seed)
    loss, counts = policy_loss(ratio=ratio, aggregation=aggregation), counts_of(whole)
    expected = value_of(loss, whole, counts)
    expected.backward()
    total, gradient = 0.0, torch.zeros_like(whole.logprobs)
    for rank in range(ranks):
        members = [m for m in range(len(lengths)) if (m * 7 + seed) % ranks == rank]
        if members:
            part, chosen = part_of(whole, members)
            value = value_of(loss, part, counts)
            value.backward()
            total += value.item()
            assert part.logprobs.grad is not None
            gradient[chosen] += part.logprobs.grad
    assert total == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(gradient, whole.logprobs.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "loss", [policy_loss(), policy_loss(ratio="sequence"), cross_entropy(SequenceMean())]
)
def test_an_all_masked_micro_batch_gives_zero_and_keeps_the_graph(loss):
    inputs = inputs_of([0, 0], prompt=3)
    value = value_of(loss, inputs, GlobalCounts(5, 4))
    value.backward()
    assert value.item() == 0
    assert inputs.logprobs.grad is not None and not inputs.logprobs.grad.any()


def test_a_batch_with_nothing_to_train_on_is_zero_not_nan():
    for aggregation in AGGREGATIONS:
        inputs = inputs_of([0], prompt=2)
        assert value_of(cross_entropy(aggregation), inputs, GlobalCounts(0, 0)).item() == 0


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["logprobs", "sampler_logprobs", "advantages"])
@pytest.mark.parametrize("loss", [policy_loss(), policy_loss(ratio="sequence"), cross_entropy()])
def test_masked_tokens_change_nothing_whatever_they_hold(loss, field, poison):
    clean, dirty = inputs_of([3, 4]), inputs_of([3, 4])
    with torch.no_grad():
        (dirty.logprobs if field == "logprobs" else dirty.columns[field])[~dirty.mask] = poison
    values = [value_of(loss, x, counts_of(x)) for x in (clean, dirty)]
    for value in values:
        value.backward()
    assert values[0].item() == values[1].item()
    assert clean.logprobs.grad is not None and dirty.logprobs.grad is not None
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad)
    sums = [loss(x).sums for x in (clean, dirty)]
    assert all(torch.equal(sums[0][name], sums[1][name]) for name in sums[0])


def test_on_policy_the_ratio_is_one_and_the_gradient_is_minus_the_advantage():
    inputs = inputs_of([4, 2])
    inputs.columns["sampler_logprobs"].copy_(inputs.logprobs.detach())
    outputs: LossOutputs = policy_loss()(inputs)
    outputs.per_token.sum().backward()
    torch.testing.assert_close(
        inputs.logprobs.grad, torch.where(inputs.mask, -inputs.columns["advantages"], 0.0)
    )
    assert outputs.sums["ratio_mean"].item() == inputs.mask.sum().item()
    assert outputs.sums["clip_fraction_low"].item() == outputs.sums["clip_fraction_high"].item() == 0


def one_token(log_ratio: float, advantage: float, loss=None) -> tuple[float, float, LossOutputs]:
    inputs = LossInputs(
        logprobs=torch.tensor([log_ratio], requires_grad=True),
        mask=torch.tensor([True]),
        sequence=torch.tensor([0]),
        sequences=1,
        columns={"sampler_logprobs": torch.zeros(1), "advantages": torch.tensor([advantage])},
    )
    outputs = (loss or policy_loss(clip=(0.2, 0.28)))(inputs)
    outputs.per_token.sum().backward()
    assert inputs.logprobs.grad is not None
    return outputs.per_token.item(), inputs.logprobs.grad.item(), outputs


def test_the_clip_holds_back_only_what_the_advantage_pushes_outwards():
    high = math.log(1.5)
    value, gradient, outputs = one_token(high, 2.0)
    assert (value, gradient) == (pytest.approx(-2.56), 0.0)
    assert outputs.sums["clip_fraction_high"].item() == 1
    value, gradient, outputs = one_token(high, -2.0)
    assert (value, gradient) == (pytest.approx(3.0), pytest.approx(3.0))
    assert outputs.sums["clip_fraction_high"].item() == 0
    value, gradient, outputs = one_token(math.log(0.5), -1.0)
    assert (value, gradient) == (pytest.approx(0.8), 0.0)
    assert outputs.sums["clip_fraction_low"].item() == 1


def test_an_enormous_ratio_stays_finite():
    for advantage in (1.0, -1.0):
        value, gradient, _ = one_token(500.0, advantage)
        assert math.isfinite(value) and math.isfinite(gradient)


def test_a_sequence_ratio_is_length_normalised():
    """100 tokens with a log-ratio of 0.01 each: e^0.01, not e^1."""
    inputs = LossInputs(
        logprobs=torch.full((100,), -1.0, requires_grad=True),
        mask=torch.ones(100, dtype=torch.bool),
        sequence=torch.zeros(100, dtype=torch.int64),
        sequences=1,
        columns={"sampler_logprobs": torch.full((100,), -1.01), "advantages": torch.ones(100)},
    )
    loss = policy_loss(clip=(1.0, 9.0), ratio="sequence")
    assert -value_of(loss, inputs, GlobalCounts(100, 1)).item() == pytest.approx(1.01005, abs=1e-5)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k2", 0.031038, 0.122229),
        ("k3", 0.031005, 0.124277),
        ("ratio_k1", 0.031005, 0.122229),
        ("ratio_k3", 0.031005, 0.122229),
        ("k1", 0.031005, 0.0),
    ],
)
def test_kl_estimators_of_a_coin(estimator: KLEstimator, value, gradient):
    theta = torch.tensor(0.3, requires_grad=True)
    logprobs = torch.nn.functional.logsigmoid(torch.stack([theta, -theta]))
    reference = torch.nn.functional.logsigmoid(torch.tensor([-0.2, 0.2]))
    expected = (logprobs.detach().exp() * kl_per_token(logprobs, reference, estimator)).sum()
    expected.backward()
    assert expected.item() == pytest.approx(value, abs=1e-6)
    assert theta.grad is not None and theta.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_k1_is_refused_as_a_loss():
    with pytest.raises(ValueError, match="ratio_k1"):
        kl_per_token(torch.zeros(1), torch.zeros(1), "k1", as_loss=True)


@pytest.mark.parametrize("clip", [(-0.1, 0.2), (1.5, 0.2), (0.2, -0.1), (math.nan, 0.2)])
def test_a_clip_that_makes_no_sense_is_refused(clip):
    with pytest.raises(ValueError, match="clip="):
        policy_loss(clip=clip)


def test_losses_travel_to_other_processes():
    for loss in (policy_loss(ratio="sequence"), cross_entropy(SequenceSum(8.0))):
        assert pickle.loads(pickle.dumps(loss)) == loss
