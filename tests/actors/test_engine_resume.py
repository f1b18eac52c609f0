"""Samples that are interrupted and go on: their prefix is kept, and nothing is lost by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import Weights, assert_like_the_model, full_logprobs, make_engine, make_model, request, run

from meshrl.actors.engines.engine import EngineRequest, FinishedSample
from meshrl.actors.engines.titan import TitanEngine
from meshrl.errors import UserError

PROMPT = [3, 4, 11, 5]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(0)


@pytest.fixture(scope="module")
def weights(model: torch.nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


def interrupt(
    engine: TitanEngine, asked: EngineRequest, steps: int
) -> tuple[list[FinishedSample], EngineRequest]:
    """Run so many steps; what has finished, and a request for the rest."""
    engine.submit(asked)
    finished = [sample for _ in range(steps) for sample in engine.step()]
    aborted = {sample.sample: sample for sample in engine.abort(asked.group_id)}
    assert engine.idle and engine.stats.waiting_samples == engine.stats.running_samples == 0
    return finished, replace(asked, resumed=aborted, samples=tuple(sorted(aborted)))


def assert_same(found: FinishedSample, wanted: FinishedSample) -> None:
    assert torch.equal(found.token_ids, wanted.token_ids)
    assert torch.equal(found.versions, wanted.versions)
    assert found.stop_reason == wanted.stop_reason
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-5, rtol=0)


@settings(max_examples=15, deadline=None)
@given(first=st.integers(0, 45), second=st.integers(0, 20), samples=st.integers(1, 12))
def test_an_interrupted_sample_ends_as_if_nothing_had_been(first: int, second: int, samples: int) -> None:
    """Twice interrupted, wherever; some had finished before, some had not begun."""
    weights = dict(make_model(0).state_dict())
    asked = request(1, PROMPT, samples=samples, max_tokens=40, stop=("12",))
    wanted = run(make_engine(weights, slots=8, refill=1), asked)
    engine = make_engine(weights, slots=8, refill=1)
    found, rest = interrupt(engine, asked, first)
    more, rest = interrupt(engine, rest, second)
    found = {sample.sample: sample for sample in [*found, *more]}
    found |= {number: sample for (_, number), sample in run(engine, rest).items()}
    assert sorted(found) == list(range(samples))
    for (_, number), sample in wanted.items():
        assert_same(found[number], sample)


def test_new_weights_in_between_make_the_rest_as_if_they_had_read_the_prefix(
    model: torch.nn.Module, weights: Weights
) -> None:
    newer = make_model(1)
    engine = make_engine(weights)
    _, rest = interrupt(engine, request(1, PROMPT, samples=2, max_tokens=40), steps=12)
    engine.load_weights(dict(newer.state_dict()), version=2)
    for (_, number), sample in run(engine, rest).items():
        before = rest.resumed[number]
        kept = len(before.token_ids)
        assert 0 < kept < len(sample.token_ids)
        assert torch.equal(sample.token_ids[:kept], before.token_ids)
        assert torch.equal(sample.logprobs[:kept], before.logprobs)
        assert sample.versions.tolist() == [1] * kept + [2] * (len(sample.token_ids) - kept)
        fresh = full_logprobs(newer, PROMPT, sample.token_ids)
        of_token = fresh.gather(-1, sample.token_ids.long()[:, None])[:, 0]
        torch.testing.assert_close(sample.logprobs[kept:], of_token[kept:], atol=1e-5, rtol=0)
        assert_like_the_model(model, PROMPT, before)


def test_the_last_token_before_the_limit_may_still_be_drawn(weights: Weights) -> None:
    asked = request(1, PROMPT, max_tokens=6, stop_token_ids=())
    (wanted,) = run(make_engine(weights), asked).values()
    assert len(wanted.token_ids) == 6
    _, rest = interrupt(make_engine(weights), asked, steps=5)
    assert len(rest.resumed[0].token_ids) == 5
    (found,) = run(make_engine(weights), rest).values()
    assert_same(found, wanted)


@pytest.mark.parametrize("steps", range(0, 14))
def test_a_group_goes_on_from_any_step_with_its_finished_samples_left_out(
    weights: Weights, steps: int
) -> None:
    asked = request(1, PROMPT, samples=16, max_tokens=12, stop=("12", "+"))
    wanted = run(make_engine(weights, slots=16), asked)
    assert {sample.stop_reason for sample in wanted.values()} == {"stop", "length"}
    engine = make_engine(weights, slots=16)
    done, rest = interrupt(engine, asked, steps)
    assert rest.samples is not None and len(done) + len(rest.samples) == 16
    if 0 < steps < 12:
        assert done and all(len(sample.token_ids) == steps for sample in rest.resumed.values())
    found = {sample.sample: sample for sample in done}
    found |= {number: sample for (_, number), sample in run(engine, rest).items()}
    assert sorted(found) == list(range(16))
    for (_, number), sample in wanted.items():
        assert_same(found[number], sample)


def test_cut_distributions_go_on_too(weights: Weights) -> None:
    asked = request(1, PROMPT, samples=6, max_tokens=30, temperature=0.7, top_k=6, top_p=0.9)
    wanted = run(make_engine(weights), asked)
    engine = make_engine(weights)
    done, rest = interrupt(engine, asked, steps=7)
    for number, sample in {s.sample: s for s in [*done, *run(engine, rest).values()]}.items():
        assert_same(sample, wanted[1, number])


def test_each_stretch_of_a_sample_carries_the_version_that_sampled_it(weights: Weights) -> None:
    """Interrupted twice, then new weights while it runs; one interruption had no new weights."""
    engine = make_engine(weights)
    asked = request(1, PROMPT, samples=8, max_tokens=60)
    _, rest = interrupt(engine, asked, steps=3)
    _, rest = interrupt(engine, rest, steps=2)
    engine.load_weights(weights, version=4)
    _, rest = interrupt(engine, rest, steps=4)
    engine.submit(rest)
    _ = [engine.step() for _ in range(2)]
    engine.load_weights(weights, version=7)
    long = [sample for sample in run(engine).values() if len(sample.token_ids) > 12]
    assert long
    for sample in long:
        assert sample.versions.tolist() == [1] * 5 + [4] * 6 + [7] * (len(sample.token_ids) - 11)


def test_stats_count_the_samples_that_go_on_and_only_the_tokens_drawn(weights: Weights) -> None:
    engine = make_engine(weights)
    done, rest = interrupt(engine, request(1, PROMPT, samples=8, max_tokens=20), steps=4)
    going_on = 8 - len(done)
    before = engine.stats
    engine.submit(rest)
    assert (engine.stats.waiting_samples, engine.stats.running_samples) == (going_on, 0)
    ended = engine.step()
    assert (engine.stats.waiting_samples, engine.stats.running_samples) == (0, going_on - len(ended))
    finished = [*ended, *run(engine).values()]
    assert engine.stats.prefilled_tokens - before.prefilled_tokens == going_on * (len(PROMPT) + 4)
    drawn = sum(len(sample.token_ids) - 4 for sample in finished)
    assert engine.stats.sampled_tokens - before.sampled_tokens == drawn
    assert engine.stats.running_samples == 0


def test_a_sample_that_waits_to_go_on_is_aborted_with_all_it_has(weights: Weights) -> None:
    engine = make_engine(weights)
    _, rest = interrupt(engine, request(1, PROMPT, samples=3, max_tokens=40), steps=8)
    engine.submit(replace(rest, group_id=2))
    again = {sample.sample: sample for sample in engine.abort(2)}
    assert {sample.group_id for sample in again.values()} == {2}
    assert {n: s.token_ids.tolist() for n, s in again.items()} == {
        n: s.token_ids.tolist() for n, s in rest.resumed.items()
    }


def test_what_cannot_go_on_is_refused_and_the_engine_is_as_before(weights: Weights) -> None:
    engine = make_engine(weights)
    asked = request(1, PROMPT, samples=2, max_tokens=8)
    _, rest = interrupt(engine, asked, steps=4)
    some = rest.resumed[0]
    end = torch.tensor([0], dtype=torch.int32)
    bad = [
        (replace(rest, resumed={5: some}), "samples .* of a group of 2"),
        (replace(rest, samples=(0, 0)), "each must be one of them, once"),
        (replace(rest, resumed={1: some}), "it was sample 0"),
        (replace(rest, resumed={0: replace(some, stop_reason="length")}), "ended by 'length'"),
        (replace(rest, sampling=replace(rest.sampling, max_tokens=3)), "4 tokens of at most 3"),
        (replace(rest, resumed={0: replace(some, versions=end)}), "4 logprobs and 1 versions"),
        (
            replace(rest, resumed={0: FinishedSample(1, 0, end, torch.zeros(1), end, "abort")}),
            "last token 0 is its end",
        ),
        (replace(rest, resumed={0: replace(some, token_ids=some.token_ids + 99)}), "sample 0 has token ids"),
    ]
    for wrong, message in bad:
        with pytest.raises(UserError, match=message):
            engine.submit(wrong)
        assert engine.idle
    assert len(run(engine, rest)) == 2
