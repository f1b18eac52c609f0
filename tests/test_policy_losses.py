"""Every policy loss and correction against plain float64 loops over rollouts and tokens: values and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_losses import counts_of, inputs_of, part_of, value_of

from meshrl.losses import (
    Loss,
    LossInputs,
    cispo_loss,
    corrected,
    dppo_loss,
    gmpo_loss,
    icepop,
    masked,
    policy_loss,
    reinforce_loss,
    sapo_loss,
    truncated,
    with_kl,
)

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=5)
Scalar = torch.Tensor
Own = Callable[[list[Scalar], list[float], list[float]], list[Scalar]]
"""Loss of each trained token of one rollout, from log-probabilities (with gradient), the sampler's, and advantages."""


def weigh(own: Own, weights: Callable[[list[float]], list[float]]) -> Own:
    """`own`, times weights that are made of a rollout's log-ratios."""

    def weighed(policy: list[Scalar], sampler: list[float], advantages: list[float]) -> list[Scalar]:
        ratios = [p.item() - s for p, s in zip(policy, sampler, strict=True)]
        losses = own(policy, sampler, advantages)
        return [w * loss for w, loss in zip(weights(ratios), losses, strict=True)]

    return weighed


def token_by_token(own: Callable[[Scalar, float, float], Scalar]) -> Own:
    return lambda policy, sampler, advantages: [
        own(p, s, a) for p, s, a in zip(policy, sampler, advantages, strict=True)
    ]


def clipped(p: Scalar, s: float, a: float, low: float = 0.2, high: float = 0.28) -> Scalar:
    ratio = (p - s).exp()
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def dual_clipped(p: Scalar, s: float, a: float) -> Scalar:
    loss = clipped(p, s, a)
    return torch.minimum(loss, torch.tensor(-3.0 * a, dtype=torch.float64)) if a < 0 else loss


def by_sequence(policy: list[Scalar], sampler: list[float], advantages: list[float]) -> list[Scalar]:
    mean = sum((p - s for p, s in zip(policy, sampler, strict=True)), torch.tensor(0.0)) / max(len(policy), 1)
    ratio = mean.exp()
    return [-torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) for a in advantages]


def geometric_mean(policy: list[Scalar], sampler: list[float], advantages: list[float]) -> list[Scalar]:
    product = torch.tensor(1.0, dtype=torch.float64)
    for p, s, a in zip(policy, sampler, advantages, strict=True):
        ratio = (p - s).exp()
        high, low = math.exp(0.4), math.exp(-0.4)
        product = product * (ratio.clamp(max=high) if a >= 0 else ratio.clamp(min=low))
    return [-(product ** (1 / len(policy))) * a for a in advantages]


def soft_gate(p: Scalar, s: float, a: float) -> Scalar:
    tau = 1.0 if a > 0 else 1.05
    return -a * 4 / tau / (1 + (-tau * ((p - s).exp() - 1)).exp())


def divergence_masked(p: Scalar, s: float, a: float, kind: str = "tv") -> Scalar:
    ratio, policy, sampler = (p - s).exp(), math.exp(p.item()), math.exp(s)
    if kind == "tv":
        far = abs(policy - sampler) > 0.2
    else:
        kl = sampler * math.log(sampler / policy) + (1 - sampler) * math.log((1 - sampler) / (1 - policy))
        far = kl > 0.05
    leaving = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
    return -ratio * a * (0.0 if far and leaving else 1.0)


def in_bounds(w: float, low: float, high: float) -> float:
    return w if low <= w <= high else 0.0


REINFORCE = token_by_token(lambda p, s, a: -a * p)
CASES: dict[str, tuple[Loss, Own]] = {
    "reinforce": (reinforce_loss(), REINFORCE),
    "clip": (policy_loss(), token_by_token(clipped)),
    "dual clip": (policy_loss(dual_clip=3.0), token_by_token(dual_clipped)),
    "sequence ratio": (policy_loss(ratio="sequence"), by_sequence),
    "cispo": (
        cispo_loss(),
        token_by_token(lambda p, s, a: -min(math.exp(p.item() - s), 1.28) * a * p),
    ),
    "gmpo": (gmpo_loss(), geometric_mean),
    "sapo": (sapo_loss(), token_by_token(soft_gate)),
    "dppo": (dppo_loss(), token_by_token(divergence_masked)),
    "dppo by kl": (
        dppo_loss(0.05, "kl"),
        token_by_token(lambda p, s, a: divergence_masked(p, s, a, "kl")),
    ),
    "truncated": (
        corrected(reinforce_loss(), truncated(1.5)),
        weigh(REINFORCE, lambda ratios: [min(math.exp(r), 1.5) for r in ratios]),
    ),
    "truncated by sequence": (
        corrected(policy_loss(), truncated(1.5, "sequence")),
        weigh(token_by_token(clipped), lambda ratios: [min(math.exp(sum(ratios)), 1.5)] * len(ratios)),
    ),
    "masked by sequence": (
        corrected(reinforce_loss(), masked(0.5, 2.0, "sequence")),
        weigh(REINFORCE, lambda ratios: [in_bounds(math.exp(sum(ratios)), 0.5, 2.0)] * len(ratios)),
    ),
    "icepop": (
        corrected(reinforce_loss(), icepop()),
        weigh(REINFORCE, lambda ratios: [in_bounds(math.exp(r), 0.5, 5.0) for r in ratios]),
    ),
}


def one_advantage_each(inputs: LossInputs) -> LossInputs:
    """Advantages of whole rollouts, as group-relative ones are."""
    first = [int((inputs.sequence == i).nonzero()[0]) for i in range(inputs.sequences)]
    inputs.columns["advantages"].copy_(inputs.columns["advantages"][first][inputs.sequence])
    return inputs


def reference(own: Own, inputs: LossInputs, loss: Loss) -> tuple[float, torch.Tensor]:
    """Value and gradient by loops in float64, aggregated as the loss's name for it says."""
    logprobs = inputs.logprobs.detach().double().requires_grad_()
    total = torch.tensor(0.0, dtype=torch.float64)
    kind, trained = type(loss.aggregation).__name__, int(inputs.mask.sum())
    for sequence in range(inputs.sequences):
        places = [i for i in range(len(inputs.mask)) if inputs.mask[i] and inputs.sequence[i] == sequence]
        if not places:
            continue
        sampler = [inputs.columns["sampler_logprobs"].double()[i].item() for i in places]
        advantages = [inputs.columns["advantages"].double()[i].item() for i in places]
        losses = own([logprobs[i] for i in places], sampler, advantages)
        share = 1 / max(trained, 1) if kind == "TokenMean" else 1 / len(places) / inputs.sequences
        for each in losses:
            total = total + each * share
    if total.requires_grad:
        total.backward()
    gradient = torch.zeros_like(logprobs) if logprobs.grad is None else logprobs.grad
    return total.item(), gradient


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=40)
@given(lengths=LENGTHS, seed=st.integers(0, 10_000))
def test_value_and_gradient_are_those_of_plain_loops(name: str, lengths: list[int], seed: int) -> None:
    loss, own = CASES[name]
    inputs = one_advantage_each(inputs_of(lengths, seed))
    wanted, wanted_gradient = reference(own, inputs, loss)
    value = value_of(loss, inputs, counts_of(inputs))
    value.backward()
    assert value.item() == pytest.approx(wanted, rel=2e-5, abs=1e-6)
    assert inputs.logprobs.grad is not None
    torch.testing.assert_close(inputs.logprobs.grad.double(), wanted_gradient, atol=2e-6, rtol=2e-4)


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=4, max_size=6),
    seed=st.integers(0, 1000),
    ranks=st.sampled_from([2, 4]),
)
def test_ranks_and_the_order_of_rollouts_change_nothing(
    name: str, lengths: list[int], seed: int, ranks: int
) -> None:
    loss, _ = CASES[name]
    whole = one_advantage_each(inputs_of(lengths, seed))
    counts = counts_of(whole)
    value = value_of(loss, whole, counts)
    value.backward()
    gradient = torch.zeros_like(whole.logprobs)
    total = 0.0
    members = list(reversed(range(len(lengths))))
    for rank in range(ranks):
        if not members[rank::ranks]:
            continue
        part, chosen = part_of(whole, members[rank::ranks])
        share = value_of(loss, part, counts)
        share.backward()
        assert part.logprobs.grad is not None
        gradient[chosen] = part.logprobs.grad
        total += share.item()
    assert total == pytest.approx(value.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient, whole.logprobs.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", CASES)
def test_masked_tokens_change_nothing_whatever_they_hold(name: str, poison: float) -> None:
    loss, _ = CASES[name]
    clean, dirty = (one_advantage_each(inputs_of([3, 4])) for _ in range(2))
    with torch.no_grad():
        for values in (dirty.logprobs, *dirty.columns.values()):
            values[~dirty.mask] = poison
    for inputs in (clean, dirty):
        value_of(loss, inputs, counts_of(inputs)).backward()
    assert clean.logprobs.grad is not None and dirty.logprobs.grad is not None
    assert torch.equal(clean.logprobs.grad, dirty.logprobs.grad)
    assert all(torch.equal(loss(clean).sums[n], loss(dirty).sums[n]) for n in loss(clean).sums)


@pytest.mark.parametrize("name", CASES)
def test_on_policy_all_have_the_gradient_of_reinforce(name: str) -> None:
    loss, _ = CASES[name]
    inputs = one_advantage_each(inputs_of([4, 2]))
    inputs.columns["sampler_logprobs"].copy_(inputs.logprobs.detach())
    loss(inputs).per_token.sum().backward()
    wanted = torch.where(inputs.mask, -inputs.columns["advantages"], 0.0)
    torch.testing.assert_close(inputs.logprobs.grad, wanted)


def test_the_weights_that_are_reported_are_those_before_the_cut() -> None:
    inputs = inputs_of([2], prompt=0)
    inputs.columns["sampler_logprobs"].copy_(inputs.logprobs.detach() - torch.tensor([0.0, math.log(4)]))
    sums = corrected(reinforce_loss(), truncated(2.0))(inputs).sums
    assert sums["importance_weight_mean"].item() == pytest.approx(5)
    assert sums["importance_weight_square_mean"].item() == pytest.approx(17)
    assert sums["importance_weight_cut"].item() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cispo_loss((1.5, 0.2)), "clip=.1.5, 0.2.: wanted"),
        (lambda: policy_loss(dual_clip=1.0), "dual_clip=1.0: must be above 1"),
        (lambda: gmpo_loss((-0.1, 0.4)), "both >= 0"),
        (lambda: sapo_loss((0.0, 1.0)), "both must be above 0"),
        (lambda: dppo_loss(-1.0), "threshold=-1.0"),
        (lambda: truncated(0.5), "cap=0.5"),
        (lambda: masked(1.1, 2.0), "bounds .1.1, 2.0."),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_kl_penalty_adds_its_gradient_and_pulls_towards_the_reference() -> None:
    inputs = inputs_of([3, 2])
    reference = torch.where(inputs.mask, inputs.logprobs.detach() - 0.5, math.nan)
    inputs = replace(inputs, columns={**inputs.columns, "reference_logprobs": reference})
    plain, penalised = reinforce_loss(), with_kl(reinforce_loss(), 0.1)
    assert penalised.columns == ("advantages", "reference_logprobs")
    difference = penalised(inputs).per_token.sum() - plain(inputs).per_token.sum()
    difference.backward()
    torch.testing.assert_close(inputs.logprobs.grad, torch.where(inputs.mask, 0.1 * 0.5, 0.0))
    assert penalised(inputs).sums["reference_kl_mean"].item() == pytest.approx(5 * 0.5**2 / 2)
    for bad in (lambda: with_kl(plain, -1.0), lambda: with_kl(plain, 0.1, "k1")):
        with pytest.raises(ValueError):
            bad()
