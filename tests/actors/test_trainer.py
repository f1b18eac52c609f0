"""One learner process: log-probabilities at the right places, batches that hold nothing, NaN where nobody looks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from meshrl.actors.attention import Documents, PackedAttention
from meshrl.actors.models import ModelConfig, build_model
from meshrl.actors.trainer import Trainer
from meshrl.actors.training import LearnerConfig, OptimizerConfig
from meshrl.handoff.dock import DockedBatch, empty_columns
from meshrl.losses import LossInputs, LossOutputs, TokenMean, policy_loss

MODEL = ModelConfig("tiny-0.4m", max_tokens=64)
VOCABULARY = 16
LENGTHS = [9, 1 + 2, 40, 17, 5]
"""Ragged, in several buckets of the packed attention."""
PROMPTS = [4, 1, 11, 16, 2]
"""Tokens of each prompt; the fourth response is its end token alone."""


def make_trainer() -> Trainer:
    torch.manual_seed(0)
    config = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0))
    return Trainer(MODEL, config, VOCABULARY, seed=1)


def make_batch(
    lengths: Sequence[int] = LENGTHS, prompts: Sequence[int] = PROMPTS, each: int = 99
) -> DockedBatch:
    """`each`: most rollouts of a micro-batch."""
    generator = torch.Generator().manual_seed(5)
    columns = empty_columns(sum(lengths))
    columns["token_ids"].random_(0, VOCABULARY, generator=generator)
    first = 0
    for length, prompt in zip(lengths, prompts, strict=True):
        columns["response_mask"][first + prompt : first + length] = True
        first += length
    columns["sampler_logprobs"].fill_(-2.5)
    count = len(lengths)
    return DockedBatch(
        rollout_ids=list(range(count)),
        lengths=list(lengths),
        columns=columns,
        rollout_columns={"advantages": torch.randn(count, generator=generator)},
        microbatches=[list(range(first, min(first + each, count))) for first in range(0, count, each)],
        global_tokens=sum(lengths) - sum(prompts),
        global_rollouts=count,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weight_tensors().items()}


def test_a_packed_token_has_the_logprob_that_its_own_sequence_gives_it() -> None:
    trainer, batch = make_trainer(), make_batch()
    model = build_model(MODEL, VOCABULARY, seed=1)
    found = trainer.logprobs(batch)
    first = 0
    for rollout, (length, prompt) in enumerate(zip(LENGTHS, PROMPTS, strict=True)):
        ids = batch.columns["token_ids"][first : first + length].long()
        with torch.no_grad():
            logits = model(ids[None], positions=torch.arange(length)[None])[0]
        # The token at t is predicted by the logits at t - 1, the first of the response by the prompt's last.
        expected = functional.log_softmax(logits, -1)[prompt - 1 : -1].gather(-1, ids[prompt:, None])[:, 0]
        assert len(expected) == length - prompt
        torch.testing.assert_close(found[rollout], expected, atol=1e-5, rtol=0)
        first += length


def test_no_gradient_flows_between_documents() -> None:
    attention = PackedAttention(PackedAttention.Config())
    q, k, v = (torch.randn(1, 12, heads, 32, requires_grad=True) for heads in (4, 2, 2))
    out = attention(q, k, v, attention_masks=Documents.of([5, 4, 3]), enable_gqa=True)
    out[:, 5:9].sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad[:, :5].abs().max() == 0 and tensor.grad[:, 9:].abs().max() == 0
        assert tensor.grad[:, 5:9].abs().max() > 0 or tensor is k
    assert torch.equal(out[:, 5:9], attention(q[:, 5:9], k[:, 5:9], v[:, 5:9], enable_gqa=True))


@pytest.mark.parametrize("each", [1, 2, 5])
def test_loss_and_step_do_not_depend_on_microbatches(each: int) -> None:
    whole, split = make_trainer(), make_trainer()
    expected = whole.step(make_batch(), policy_loss())
    got = split.step(make_batch(each=each), policy_loss())
    assert got.advantages == expected.advantages
    for name, value in expected.metrics.items():
        assert got.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_nan_where_nothing_is_trained_changes_nothing() -> None:
    clean, dirty = make_trainer(), make_trainer()
    batch = make_batch()
    columns = dict(batch.columns)
    columns["sampler_logprobs"] = torch.where(columns["response_mask"], columns["sampler_logprobs"], math.nan)
    expected = clean.step(batch, policy_loss()).metrics
    assert dirty.step(replace(batch, columns=columns), policy_loss()).metrics == expected
    for name, tensor in weights(clean).items():
        assert torch.equal(dirty.weight_tensors()[name], tensor), name


def test_an_empty_microbatch_and_one_without_responses_contribute_nothing() -> None:
    plain, padded = make_trainer(), make_trainer()
    expected = plain.step(make_batch(), policy_loss()).metrics
    batch = make_batch([*LENGTHS, 6], [*PROMPTS, 6])
    everything = list(range(len(LENGTHS)))
    batch = replace(batch, microbatches=[everything, [], [len(LENGTHS)]], global_rollouts=len(LENGTHS))
    # The same tokens and advantages as in the plain batch, then the rollout that has only a prompt.
    reference = make_batch()
    for name, column in reference.columns.items():
        batch.columns[name][: len(column)] = column
    batch.rollout_columns["advantages"][: len(LENGTHS)] = reference.rollout_columns["advantages"]
    got = padded.step(batch, policy_loss()).metrics
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_nothing_to_train_on_is_a_reported_skip() -> None:
    trainer = make_trainer()
    before = weights(trainer)
    batch = replace(make_batch([4], [4]), global_tokens=0)
    assert trainer.step(batch, policy_loss()).metrics["skipped"] == 1
    assert all(torch.equal(trainer.weight_tensors()[name], tensor) for name, tensor in before.items())


def test_a_gradient_that_is_not_finite_leaves_the_weights_as_they_were() -> None:
    trainer = make_trainer()
    before = weights(trainer)
    batch = make_batch()
    batch.rollout_columns["advantages"][0] = math.inf
    with pytest.raises(FloatingPointError, match="weights are"):
        trainer.step(batch, policy_loss())
    assert all(torch.equal(trainer.weight_tensors()[name], tensor) for name, tensor in before.items())
    assert math.isfinite(trainer.step(make_batch(), policy_loss()).metrics["gradient_norm"])


def test_temperature_divides_the_logits() -> None:
    trainer, batch = make_trainer(), make_batch()
    hot, cold = trainer.logprobs(batch, temperature=100.0), trainer.logprobs(batch, temperature=0.1)
    assert torch.allclose(hot[2], torch.full_like(hot[2], -math.log(VOCABULARY)), atol=0.05)
    assert cold[2].std() > 5 * hot[2].std()


def test_a_loss_that_is_no_value_per_token_is_refused_and_changes_nothing() -> None:
    trainer = make_trainer()
    before = weights(trainer)

    class Summed:
        aggregation = TokenMean()
        columns = ("advantages",)

        def __call__(self, inputs: LossInputs) -> LossOutputs:
            return LossOutputs(inputs.logprobs.sum(), {})

    with pytest.raises(ValueError, match="per_token of shape .*: wanted one value per token"):
        trainer.step(make_batch(), Summed())
    after = weights(trainer)
    assert all(torch.equal(after[name], value) for name, value in before.items())
