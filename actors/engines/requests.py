"""What the embedded engine admits: requests checked, and cut into chunks that enter together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshrl.actors.engines.engine import EngineRequest, FinishedSample
from meshrl.actors.engines.sampling import check_sampling
from meshrl.errors import UserError


@dataclass(frozen=True, eq=False)
class Chunk:
    """Samples that are admitted together, after one prefill: a whole group, unless it is large, or one that goes on."""

    request: EngineRequest
    indices: tuple[int, ...]
    prefill_ids: list[int]
    """The prompt, and what the sample had sampled before it was interrupted."""


def chunks(request: EngineRequest, most: int) -> list[Chunk]:
    """A request's samples, those that go on last, each by itself: no two have the same tokens.

    Args:
        most: samples of a chunk. A group waits for as many free slots as it needs; a large one would leave too many
            empty.
    """
    prompt = request.prompt_token_ids
    fresh = [index for index in request.indices if not _sampled(request, index)]
    found = [
        Chunk(request, tuple(fresh[start : start + most]), prompt) for start in range(0, len(fresh), most)
    ]
    for index in request.indices:
        if tokens := _sampled(request, index):
            found.append(Chunk(request, (index,), prompt + tokens))
    return found


def check_request(request: EngineRequest, context: int, vocab_size: int, end_id: int) -> None:
    """See that the engine can do it.

    Raises:
        UserError: it cannot; names what is wrong.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise UserError("the prompt is empty: it needs at least one token to continue from")
    if len(prompt) >= context:
        raise UserError(
            f"the prompt has {len(prompt)} tokens and the context {context}, so there is no room"
            " for a response: shorten the prompt or raise the context"
        )
    _check_ids("the prompt", prompt, vocab_size)
    check_sampling(request.sampling, vocab_size)
    samples = range(len(request.seeds))
    wrong = [i for i in (*request.indices, *request.resumed) if i not in samples]
    if wrong or len(set(request.indices)) < len(request.indices):
        raise UserError(
            f"samples {list(request.indices)} are asked for and {list(request.resumed)} go on, of a group of "
            f"{len(samples)}: each must be one of them, once"
        )
    limit = min(request.sampling.max_tokens, context - len(prompt))
    for index, sample in request.resumed.items():
        _check_resumed(index, sample, limit, vocab_size, (end_id, *request.sampling.stop_token_ids))


def _check_resumed(
    index: int, sample: FinishedSample, limit: int, vocab_size: int, stop_ids: Sequence[int]
) -> None:
    tokens = sample.token_ids.tolist()
    shapes = [len(values) for values in (sample.logprobs, sample.versions)]
    if any(shape != len(tokens) for shape in shapes):
        raise UserError(
            f"sample {index} cannot go on: it has {len(tokens)} tokens, {shapes[0]} logprobs and {shapes[1]} versions"
        )
    problem = None
    if sample.sample != index:
        problem = f"it was sample {sample.sample}, whose seed is another: give it under its own position"
    elif sample.stop_reason != "abort":
        problem = (
            f"it ended by {sample.stop_reason!r}: only what was aborted can, so leave it out of `samples`"
        )
    elif len(tokens) >= limit:
        problem = f"it has {len(tokens)} tokens of at most {limit}: raise max_tokens or the context"
    elif tokens and tokens[-1] in stop_ids:
        problem = f"its last token {tokens[-1]} is its end: leave it out of `samples`"
    if problem:
        raise UserError(f"sample {index} cannot go on: {problem}")
    if tokens:
        _check_ids(f"sample {index}", tokens, vocab_size)


def _check_ids(what: str, ids: Sequence[int], vocab_size: int) -> None:
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UserError(f"{what} has token ids from {min(ids)} to {max(ids)}, the vocabulary {vocab_size}")


def _sampled(request: EngineRequest, index: int) -> list[int]:
    sample = request.resumed.get(index)
    return [] if sample is None else sample.token_ids.tolist()
