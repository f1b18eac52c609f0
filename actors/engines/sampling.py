"""Drawing tokens: uniform numbers that depend on seed and position only, and the inverse of the cumulative
distribution.

No generator state exists, so a sample does not depend on what else is in the batch or on how often it was
interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from meshrl.errors import UserError
from meshrl.rollout import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIFORM_BITS = 23
"""So that the largest uniform is one float32 step below 1, and drawing cannot run past the last possible
token."""


def uniforms(seeds: Sequence[int], count: int) -> np.ndarray:
    """The first `count` uniform numbers of each seed, in [0, 1): float32 `[seeds, count]`.

    Number `t` of a seed is a hash of the pair (two rounds of SplitMix64: Steele, Lea, Flood 2014, "Fast
    splittable pseudorandom number generators"). Seeds are taken modulo 2**64.
    """
    streams = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) * _GOLDEN)
    counter = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
    bits = _mix(streams[:, None] + counter[None]) >> np.uint64(64 - _UNIFORM_BITS)
    return bits.astype(np.float32) * np.float32(2.0**-_UNIFORM_BITS)


def _mix(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 finalizer, a bijection of uint64 (arithmetic wraps around)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise UserError for parameters that make no sense."""
    problem = None
    if not 0 <= params.temperature < float("inf"):
        problem = f"temperature is {params.temperature}: use 0 for greedy or a positive number"
    elif not 0 < params.top_p <= 1:
        problem = f"top_p is {params.top_p}: use a number above 0 and up to 1 (1: no cut)"
    elif params.top_k < 0:
        problem = f"top_k is {params.top_k}: use a positive number, or 0 for no cut"
    elif params.max_tokens < 1:
        problem = f"max_tokens is {params.max_tokens}: use at least 1"
    elif any(not 0 <= token < vocab_size for token in params.stop_token_ids):
        problem = f"stop_token_ids is {params.stop_token_ids}: use ids below the vocabulary of {vocab_size}"
    elif not all(params.stop):
        problem = f"stop is {params.stop}: an empty string would stop everything"
    if problem:
        raise UserError(problem)


def draw(logits: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row from softmax(logits).

    Args:
        logits: float32 `[rows, vocabulary]`; -inf rules a token out.
        uniform: float32 `[rows]` in [0, 1 - 2**-23].

    Returns:
        token ids int64 `[rows]` and their log-probabilities float32 `[rows]`. Where logits are NaN the
        logprob is NaN.
    """
    probabilities = torch.softmax(logits, -1)
    cumulative = torch.cumsum(probabilities, -1)
    # The last entry is 1 up to rounding. The first entry above the target belongs to a token of positive
    # probability.
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)
    tokens.clamp_(max=logits.shape[-1] - 1)  # NaN alone can run past the end
    return tokens[:, 0], probabilities.gather(-1, tokens)[:, 0].log_()


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row, each row with parameters of its own.

    Temperature comes first, then top-k, then top-p among what is left; the logprob is that of the
    distribution drawn from. A token is within top-p while the tokens likelier than it hold less than `top_p`,
    so one always is.

    Args:
        logits: float32 `[rows, vocabulary]`.
        uniform: float32 `[rows]`.
        temperature: float32 `[rows]`; 0: the likeliest token, with its logprob at temperature 1 and no cut.
        top_k: int64 `[rows]`; 0: no cut.
        top_p: float32 `[rows]`; 1: no cut.

    Returns:
        token ids int64 `[rows]`, logprobs float32 `[rows]`.
    """
    greedy = temperature == 0
    scaled = logits / temperature.masked_fill(greedy, 1.0)[:, None]
    cut = ((top_k > 0) | (top_p < 1)) & ~greedy
    if cut.any():
        scaled[cut] = _truncate(scaled[cut], top_k[cut], top_p[cut])
    tokens, logprobs = draw(scaled, uniform)
    if greedy.any():
        best, index = torch.log_softmax(logits, -1).max(-1)
        tokens, logprobs = torch.where(greedy, index, tokens), torch.where(greedy, best, logprobs)
    return tokens, logprobs


def _truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Logits with everything outside top-k and top-p at -inf; of equal logits the lower id goes first."""
    ordered, order = torch.sort(logits, stable=True, dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1])
    ordered.masked_fill_((rank >= top_k[:, None]) & (top_k > 0)[:, None], float("-inf"))
    probabilities = torch.softmax(ordered, -1)
    likelier = torch.cumsum(probabilities, -1) - probabilities
    outside = (likelier >= top_p[:, None]) & (top_p < 1)[:, None]
    outside[:, 0] = False
    ordered.masked_fill_(outside, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)
