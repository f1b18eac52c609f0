"""The embedded engine against the learner's own model."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrl.actors.engines.engine import Engine, EngineRequest, FinishedSample
from meshrl.actors.engines.titan import EngineConfig, TitanEngine
from meshrl.actors.models import ModelConfig, build_model, load_tokenizer
from meshrl.errors import UserError
from meshrl.rollout import SamplingParams

MODEL = ModelConfig("tiny-0.4m", max_tokens=128)
TOKENIZER = load_tokenizer("arithmetic")
Weights = dict[str, torch.Tensor]


def make_model(seed: int) -> torch.nn.Module:
    """Weights so large that attention and positions matter, unlike fresh ones."""
    model = build_model(MODEL, TOKENIZER.vocab_size, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.08)
    return model.eval()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return make_model(0)


@pytest.fixture
def weights(model: torch.nn.Module) -> Weights:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.fixture
def engine(weights: Weights) -> TitanEngine:
    return make_engine(weights)


def make_engine(weights: Weights, **config: int) -> TitanEngine:
    engine = TitanEngine(EngineConfig(**config), MODEL, TOKENIZER)
    engine.load_weights(weights, version=1)
    return engine


def request(group_id: int, prompt: Sequence[int], samples: int = 1, **sampling: object) -> EngineRequest:
    seeds = tuple(range(1000 * group_id, 1000 * group_id + samples))
    return EngineRequest(group_id, list(prompt), seeds, SamplingParams(**sampling))  # pyright: ignore[reportArgumentType]


def run(engine: Engine, *requests: EngineRequest) -> dict[tuple[int, int], FinishedSample]:
    for each in requests:
        engine.submit(each)
    finished = [sample for _ in iter(lambda: engine.idle, True) for sample in engine.step()]
    by_name = {(sample.group_id, sample.sample): sample for sample in finished}
    assert len(by_name) == len(finished)
    return by_name


def full_logprobs(model: torch.nn.Module, prompt: Sequence[int], response: torch.Tensor) -> torch.Tensor:
    """Log-softmax at each response position from one forward over everything: `[tokens, vocabulary]`."""
    ids = torch.cat([torch.tensor(prompt), response.long()])
    with torch.no_grad():
        logits = model(ids[None], positions=torch.arange(len(ids))[None])[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def assert_like_the_model(model: torch.nn.Module, prompt: Sequence[int], sample: FinishedSample) -> None:
    full = full_logprobs(model, prompt, sample.token_ids).gather(-1, sample.token_ids.long()[:, None])[:, 0]
    torch.testing.assert_close(sample.logprobs, full, atol=1e-5, rtol=0)


def crowd(groups: int, seed: int = 0) -> list[EngineRequest]:
    """Groups of many sizes, prompt lengths and caps."""
    random = np.random.default_rng(seed)
    return [
        request(
            group,
            random.integers(0, 16, random.integers(1, 30)).tolist(),
            samples=int(random.integers(1, 9)),
            max_tokens=int(random.integers(1, 90)),
        )
        for group in range(groups)
    ]


@pytest.mark.parametrize("span_cost", [None, 0.0], ids=["usual spans", "as many spans as can be"])
def test_logprobs_equal_those_of_the_full_forward(
    model: torch.nn.Module, weights: Weights, span_cost: float | None
) -> None:
    engine = make_engine(weights, slots=16, refill=4)
    if span_cost is not None:
        engine._span_cost = span_cost
    requests = crowd(20)
    finished = run(engine, *requests)
    assert set(finished) == {(r.group_id, i) for r in requests for i in range(len(r.seeds))}
    for (group, _), sample in finished.items():
        assert_like_the_model(model, requests[group].prompt_token_ids, sample)
    assert any(len(sample.token_ids) > 40 for sample in finished.values())


def test_untied_and_half_precision_weights_are_understood() -> None:
    from meshrl.actors import models

    base = models._TINY["tiny-0.4m"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models._TINY, "tiny-0.4m", replace(base, tied=False, n_kv_heads=1, rope_theta=1e6))
        untied = make_model(3)
        with torch.no_grad():
            for parameter in untied.parameters():
                parameter.copy_(parameter.bfloat16())
        engine = make_engine({name: value.bfloat16() for name, value in untied.state_dict().items()})
        prompt = [3, 1, 4]
        finished = run(engine, request(0, prompt, samples=8, max_tokens=60))
    for sample in finished.values():
        assert_like_the_model(untied, prompt, sample)


def test_a_seed_draws_the_same_tokens_whatever_else_is_in_the_batch(weights: Weights) -> None:
    prompt = [1, 2, 3, 11, 4, 5, 12]
    alone = run(make_engine(weights), request(7, prompt, samples=8, max_tokens=40))
    others = [replace(r, group_id=r.group_id + 100) for r in crowd(12)]
    crowded = run(
        make_engine(weights, slots=16), *others[:6], request(7, prompt, 8, max_tokens=40), *others[6:]
    )
    for i in range(8):
        assert torch.equal(alone[7, i].token_ids, crowded[7, i].token_ids)
        torch.testing.assert_close(alone[7, i].logprobs, crowded[7, i].logprobs, atol=1e-5, rtol=0)
    assert len({tuple(sample.token_ids.tolist()) for sample in alone.values()}) > 1


def test_the_prompt_of_a_group_runs_through_the_model_once(engine: TitanEngine) -> None:
    run(engine, request(0, [5] * 20, samples=16, max_tokens=3))
    assert engine.stats.prefilled_tokens == 20
    assert engine.stats.admissions == 1


def test_greedy_takes_the_likeliest_token_at_each_position(
    model: torch.nn.Module, engine: TitanEngine
) -> None:
    prompt = [1, 11, 2, 12]
    sample = run(engine, request(0, prompt, temperature=0.0, max_tokens=50))[0, 0]
    full = full_logprobs(model, prompt, sample.token_ids)
    chosen = full.gather(-1, sample.token_ids.long()[:, None])[:, 0]
    assert (full.max(-1).values - chosen < 1e-5).all()
    assert_like_the_model(model, prompt, sample)


def test_logprobs_belong_to_the_distribution_that_was_sampled(
    model: torch.nn.Module, engine: TitanEngine
) -> None:
    prompt = [4, 2]
    requests = [
        request(0, prompt, 8, temperature=0.5, max_tokens=30),
        request(1, prompt, 8, top_k=3, max_tokens=30),
        request(2, prompt, 8, max_tokens=30),
    ]
    for (group, _), sample in run(engine, *requests).items():
        full = full_logprobs(model, prompt, sample.token_ids)
        if group == 0:
            full = (full / 0.5).log_softmax(-1)
        elif group == 1:
            full = full.masked_fill(full < full.topk(3).values[:, -1:], -torch.inf).log_softmax(-1)
        expected = full.gather(-1, sample.token_ids.long()[:, None])[:, 0]
        torch.testing.assert_close(sample.logprobs, expected, atol=1e-5, rtol=0)


def test_a_response_holds_its_end_token_or_is_cut_at_its_cap(engine: TitanEngine) -> None:
    finished = run(engine, request(0, [1, 2], samples=64, max_tokens=12)).values()
    reasons = {sample.stop_reason for sample in finished}
    assert reasons == {"stop", "length"}
    for sample in finished:
        ids = sample.token_ids.tolist()
        assert sample.token_ids.dtype == torch.int32 and sample.logprobs.dtype == torch.float32
        assert len(ids) == len(sample.logprobs) == len(sample.versions)
        assert TOKENIZER.end_id not in ids[:-1]
        if sample.stop_reason == "stop":
            assert ids[-1] == TOKENIZER.end_id
        else:
            assert len(ids) == 12 and ids[-1] != TOKENIZER.end_id


def test_a_response_ends_where_the_context_does(engine: TitanEngine) -> None:
    finished = run(engine, request(0, [1] * 100, samples=64, max_tokens=500)).values()
    longest = max(finished, key=lambda sample: len(sample.token_ids))
    assert len(longest.token_ids) == 28 and longest.stop_reason == "length"


def test_stop_ids_and_stop_strings_end_a_response_and_stay_in_it(engine: TitanEngine) -> None:
    requests = [
        request(0, [1], 16, max_tokens=60, stop_token_ids=(5, 7)),
        request(1, [1], 16, max_tokens=60, stop=("34", "+")),
        request(2, [1], 16, max_tokens=60),
    ]
    finished = run(engine, *requests)
    for (group, _), sample in finished.items():
        ids = sample.token_ids.tolist()
        text, before = TOKENIZER.decode(ids), TOKENIZER.decode(ids[:-1])
        ends_early = sample.stop_reason == "stop" and ids[-1] != TOKENIZER.end_id
        if group == 0:
            assert not {5, 7} & set(ids[:-1])
            assert not ends_early or ids[-1] in (5, 7)
        elif group == 1:
            assert "34" not in before and "+" not in before
            assert not ends_early or text.endswith(("34", "+"))
        else:
            assert not ends_early
    for group in (0, 1):
        assert any(sample.stop_reason == "stop" for (g, _), sample in finished.items() if g == group)


@settings(max_examples=15, deadline=None)
@given(
    slots=st.integers(1, 9),
    refill=st.integers(1, 12),
    prefill_tokens=st.integers(1, 40),
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.integers(1, 12)), max_size=8),
)
def test_every_sample_comes_back_once_for_any_slots_and_groups(
    slots: int, refill: int, prefill_tokens: int, sizes: list[tuple[int, int, int]]
) -> None:
    engine = make_engine(FRESH, slots=slots, refill=refill, prefill_tokens=prefill_tokens)
    requests = [
        request(group, [1] * prompt, samples, max_tokens=cap)
        for group, (prompt, samples, cap) in enumerate(sizes)
    ]
    finished = run(engine, *requests)
    assert set(finished) == {(r.group_id, i) for r in requests for i in range(len(r.seeds))}
    stats = engine.stats
    assert stats.running_samples == stats.waiting_samples == 0
    assert stats.sampled_tokens == sum(len(sample.token_ids) for sample in finished.values())


FRESH = dict(build_model(MODEL, TOKENIZER.vocab_size, seed=1).state_dict())


def test_an_aborted_group_comes_back_as_far_as_it_got_and_disturbs_no_other(weights: Weights) -> None:
    others = [request(group, [group, 2, 3], 4, max_tokens=60) for group in (1, 2)]
    undisturbed = run(make_engine(weights, slots=12), *others)
    engine = make_engine(weights, slots=12)
    for each in (others[0], request(9, [4, 4], 8, max_tokens=60), others[1]):
        engine.submit(each)
    before = [sample for _ in range(6) for sample in engine.step()]
    aborted = engine.abort(9)
    done = {sample.sample for sample in before if sample.group_id == 9}
    assert {sample.sample for sample in aborted} == set(range(8)) - done
    assert {sample.stop_reason for sample in aborted} == {"abort"}
    # The first eight were admitted together, so these had an admission and five steps.
    assert all(len(sample.token_ids) == 6 for sample in aborted)
    assert engine.abort(9) == []
    after = {(s.group_id, s.sample): s for s in [*before, *run(engine).values()] if s.group_id != 9}
    assert set(after) == set(undisturbed)
    for name, sample in after.items():
        assert torch.equal(sample.token_ids, undisturbed[name].token_ids)
    engine.submit(request(9, [1], max_tokens=1))  # the id is free again


def test_samples_aborted_while_they_wait_are_empty(engine: TitanEngine) -> None:
    engine.submit(request(3, [1, 2], 5))
    aborted = engine.abort(3)
    assert [sample.sample for sample in aborted] == list(range(5))
    assert all(len(sample.token_ids) == 0 for sample in aborted)
    assert engine.idle


def test_tokens_carry_the_version_that_sampled_them_and_the_cache_is_kept(
    model: torch.nn.Module, weights: Weights, engine: TitanEngine
) -> None:
    prompt, other = [1, 2, 3], make_model(5)
    engine.submit(request(0, prompt, 16, max_tokens=40))
    finished = [sample for _ in range(5) for sample in engine.step()]
    engine.load_weights(dict(other.state_dict()), version=2)
    finished += [sample for _ in iter(lambda: engine.idle, True) for sample in engine.step()]
    long = [sample for sample in finished if len(sample.token_ids) > 6]
    assert long
    for sample in long:
        assert sample.versions.tolist() == [1] * 5 + [2] * (len(sample.token_ids) - 5)
        old = full_logprobs(model, prompt, sample.token_ids)
        chosen = old.gather(-1, sample.token_ids.long()[:, None])[:, 0]
        torch.testing.assert_close(sample.logprobs[:5], chosen[:5], atol=1e-5, rtol=0)
        assert (sample.logprobs[5:] - chosen[5:]).abs().max() > 1e-2
    # What starts after the swap is the new model's alone.
    for sample in run(engine, request(1, prompt, 4, max_tokens=20)).values():
        assert set(sample.versions.tolist()) == {2}
        assert_like_the_model(other, prompt, sample)


def test_new_weights_of_equal_value_change_nothing_but_the_version(weights: Weights) -> None:
    plain = run(make_engine(weights), request(0, [1, 2], 8, max_tokens=30))
    engine = make_engine(weights)
    engine.submit(request(0, [1, 2], 8, max_tokens=30))
    engine.step()
    engine.load_weights(weights, version=2)
    for name, sample in run(engine).items():
        assert torch.equal(sample.token_ids, plain[name].token_ids)
        assert torch.equal(sample.logprobs, plain[name].logprobs)


def test_the_engine_owns_its_weights_and_its_answers(model: torch.nn.Module, weights: Weights) -> None:
    engine = make_engine(weights)
    for value in weights.values():
        value.zero_()
    first = run(engine, request(0, [1, 2], max_tokens=30))[0, 0]
    kept = first.token_ids.clone()
    assert_like_the_model(model, [1, 2], first)
    run(engine, *crowd(5))
    assert torch.equal(first.token_ids, kept)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda w: w.pop("layers.1.feed_forward.w2.weight"), "layers.1.feed_forward.w2.weight is missing"),
        (lambda w: w.update({"norm.weight": torch.ones(3)}), r"norm.weight has shape \(3,\)"),
    ],
    ids=["missing", "wrong shape"],
)
def test_weights_that_do_not_fit_are_refused_whole(
    model: torch.nn.Module, weights: Weights, spoil: Callable[[Weights], object], named: str
) -> None:
    engine = make_engine(weights)
    spoil(changed := {name: value * 2 for name, value in weights.items()})
    with pytest.raises(UserError, match=named):
        engine.load_weights(changed, version=2)
    sample = run(engine, request(0, [1, 2], max_tokens=10))[0, 0]
    assert set(sample.versions.tolist()) == {1}
    assert_like_the_model(model, [1, 2], sample)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (request(0, []), "empty"),
        (request(0, [1] * 128), "128 tokens and the context 128"),
        (request(0, [1, 16]), "ids from 1 to 16"),
        (request(0, [-1, 3]), "ids from -1 to 3"),
        (request(0, [1], top_p=0.0), "top_p"),
        (request(5, [1]), "group 5 is in the engine already"),
    ],
    ids=["empty", "too long", "id too large", "negative id", "sampling", "twice"],
)
def test_bad_requests_are_refused_and_the_others_go_on(
    engine: TitanEngine, bad: EngineRequest, named: str
) -> None:
    engine.submit(request(5, [1, 2], 3, max_tokens=8))
    with pytest.raises(UserError, match=named):
        engine.submit(bad)
    assert set(run(engine)) == {(5, 0), (5, 1), (5, 2)}


def test_an_engine_without_weights_says_so() -> None:
    engine = TitanEngine(EngineConfig(), MODEL, TOKENIZER)
    assert engine.step() == [] and engine.idle
    engine.submit(request(0, [1]))
    with pytest.raises(RuntimeError, match="no weights"):
        engine.step()


def test_weights_that_diverged_are_named_by_their_version(weights: Weights) -> None:
    weights["norm.weight"][0] = torch.nan
    engine = make_engine(weights)
    engine.submit(request(0, [1]))
    with pytest.raises(FloatingPointError, match="weight version 1"):
        engine.step()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (EngineConfig(slots=0), "slots is 0"),
        (EngineConfig(context_tokens=129), "context_tokens is 129"),
        (EngineConfig(slots=2**50), "needs .* GiB"),
    ],
)
def test_sizes_that_make_no_sense_are_named(config: EngineConfig, named: str) -> None:
    with pytest.raises(UserError, match=named):
        TitanEngine(config, MODEL, TOKENIZER)
