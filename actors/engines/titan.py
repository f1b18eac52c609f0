"""The embedded engine: continuous batching over `FlatDecoder`, in the generator's own process.

Samples enter at any step, in batches, and leave when they are done; a group's prompt runs through the model
once. Each sample draws from uniform numbers of its own seed, so what else is in the batch changes a sample
only where the rounding of a product of another size does: by about 1e-6 in a probability, hence a different
token once in some 100,000.

On new weights running samples keep the keys and values that older weights made; their later tokens carry the
new version. The weights arrive under TorchTitan's names and are folded into the decoder's buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from meshrl.actors.engines.decoder import FlatDecoder, Span
from meshrl.actors.engines.engine import EngineRequest, EngineStats, FinishedSample
from meshrl.actors.engines.lanes import arrange
from meshrl.actors.engines.requests import Chunk, check_request, chunks
from meshrl.actors.engines.sampling import draw, sample, uniforms
from meshrl.actors.models import ModelConfig, architecture
from meshrl.actors.tokenizer import Tokenizer
from meshrl.errors import UserError
from meshrl.rollout import StopReason

_ROUNDING = 16
"""Attended lengths are multiples of it: the vector units like it and buffers of few sizes are reused."""
_REARRANGE_STEPS = 16
_SPAN_COST = 45_000
"""Overhead of a span in cached floats read; measured."""


@dataclass(frozen=True)
class EngineConfig:
    """The embedded engine."""

    slots: int = 64
    """Most samples that run at once. Each takes cache memory only as far as it has grown."""
    context_tokens: int | None = None
    """Longest prompt and response together; None: the context of the model. Cache memory is at most slots x
    context_tokens x layers x kv_heads x head_dim x 8 bytes: 64 MiB for 64 slots of tiny-0.8m at 512."""
    refill: int = 8
    """Free slots to wait for before more samples are admitted, so that prefill runs in batches. 1: at
    once."""
    prefill_tokens: int = 4096
    """Most prompt tokens, padding included, in one admission; a longer prompt is admitted alone."""


@dataclass(eq=False)
class _Sample:
    """A sample that holds a slot."""

    request: EngineRequest
    index: int
    version_starts: list[tuple[int, int]] = field(default_factory=list)
    """(first response token, weight version), ascending."""


class TitanEngine:
    """Implements `Engine`.

    A *slot* holds what is known of a sample; a *lane* is its row of the key/value cache. Running samples
    occupy lanes 0 … running - 1 so that products run over plain slices; lanes are copied when a gap closes,
    slots never.

    Raises:
        UserError: sizes that make no sense, or a cache larger than memory.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer) -> None:
        for name in ("slots", "refill", "prefill_tokens"):
            if getattr(config, name) < 1:
                raise UserError(f"engine {name} is {getattr(config, name)}: use at least 1")
        self.config = config
        self._tokenizer = tokenizer
        self._context = context = _context(config, model, tokenizer.vocab_size)
        self._decoder = FlatDecoder(model, tokenizer.vocab_size, config.slots, context)
        shape = self._decoder.shape
        self._span_cost = _SPAN_COST / (shape.n_kv_heads * shape.head_dim)
        self._version: int | None = None

        slots = config.slots
        self._samples: list[_Sample | None] = [None] * slots
        self._free = list(range(slots))
        self._token_ids = np.zeros((slots, context), dtype=np.int32)
        self._logprobs = np.zeros((slots, context), dtype=np.float32)
        self._uniforms = np.zeros((slots, context), dtype=np.float32)
        self._last = np.zeros(slots, dtype=np.int64)
        self._position = np.zeros(slots, dtype=np.int64)
        """Where the last sampled token stands: everything before it is cached."""
        self._count = np.zeros(slots, dtype=np.int64)
        self._limit = np.zeros(slots, dtype=np.int64)
        self._temperature = np.ones(slots, dtype=np.float32)
        self._top_k = np.zeros(slots, dtype=np.int64)
        self._top_p = np.ones(slots, dtype=np.float32)
        self._plain = np.ones(slots, dtype=bool)
        """Temperature 1 and no cut: most of training."""
        self._stop_ids = np.full((slots, 1), tokenizer.end_id, dtype=np.int64)
        """The end token, then stop ids of the sample's own; the end token again fills the row."""
        self._stop_strings = np.zeros(slots, dtype=bool)
        """Has stop strings."""

        self._slot_of_lane = np.zeros(slots, dtype=np.int64)
        self._running = 0
        self._cuts: tuple[int, ...] = (0, 0)
        self._cuts_age = _REARRANGE_STEPS
        self._waiting: deque[Chunk] = deque()
        self._waiting_samples = 0
        self._groups: dict[int, int] = {}
        """Unfinished samples of each group."""
        self._sampled = self._prefilled = self._steps = self._admissions = 0

    @property
    def idle(self) -> bool:
        return not self._running and not self._waiting

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            running_samples=self._running,
            waiting_samples=self._waiting_samples,
            sampled_tokens=self._sampled,
            prefilled_tokens=self._prefilled,
            decode_steps=self._steps,
            admissions=self._admissions,
            weight_version=self._version,
            cache_bytes=self._decoder.cache_bytes,
        )

    def load_weights(self, named: Mapping[str, torch.Tensor], version: int) -> None:
        """See `Engine.load_weights`."""
        self._decoder.load(named)
        self._version = version
        for slot in self._slot_of_lane[: self._running].tolist():
            self._sample_in(slot).version_starts.append((int(self._count[slot]), version))

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`."""
        if request.group_id in self._groups:
            raise UserError(f"group {request.group_id} is in the engine already: give each group its own id")
        vocab_size, end_id = self._decoder.shape.vocab_size, self._tokenizer.end_id
        check_request(request, self._context, vocab_size, end_id)
        most = min(max(self.config.refill, self.config.slots // 4), self.config.slots)
        self._waiting.extend(chunks(request, most))
        samples = len(request.indices)
        self._waiting_samples += samples
        if samples:
            self._groups[request.group_id] = samples

    def abort(self, group_id: int) -> list[FinishedSample]:
        """See `Engine.abort`."""
        if group_id not in self._groups:
            return []
        finished = []
        kept: deque[Chunk] = deque()
        for chunk in self._waiting:
            if chunk.request.group_id != group_id:
                kept.append(chunk)
                continue
            self._waiting_samples -= len(chunk.indices)
            finished += [_not_admitted(chunk.request, index) for index in chunk.indices]
        self._waiting = kept
        slots = self._slot_of_lane[: self._running].tolist()
        lanes = [lane for lane, s in enumerate(slots) if self._sample_in(s).request.group_id == group_id]
        finished += [self._finish(slots[lane], "abort") for lane in lanes]
        self._remove(lanes)
        del self._groups[group_id]
        return finished

    def step(self) -> list[FinishedSample]:
        """See `Engine.step`."""
        if self.idle:
            return []
        if self._version is None:
            raise RuntimeError("the engine has no weights: call load_weights before step")
        return self._admit() if self._may_admit() else self._decode()

    def _may_admit(self) -> bool:
        free = len(self._free)
        return (
            bool(self._waiting)
            and len(self._waiting[0].indices) <= free
            and (self._running == 0 or free >= min(self.config.refill, self._waiting_samples))
        )

    def _admit(self) -> list[FinishedSample]:
        """Prefill waiting groups, as many as fit, and sample their first tokens."""
        prompts: list[list[int]] = []
        prompt_of_lane: list[int] = []
        slots: list[int] = []
        previous: list[int] | None = None
        while self._waiting and len(self._waiting[0].indices) <= len(self._free):
            chunk = self._waiting[0]
            if chunk.prefill_ids is not previous:
                longest = max(map(len, [*prompts, chunk.prefill_ids]))
                if prompts and longest * (len(prompts) + 1) > self.config.prefill_tokens:
                    break
                prompts.append(chunk.prefill_ids)
                previous = chunk.prefill_ids
            self._waiting.popleft()
            slots += self._occupy(chunk)
            prompt_of_lane += [len(prompts) - 1] * len(chunk.indices)
        self._waiting_samples -= len(slots)
        logits = self._decoder.prefill(prompts, prompt_of_lane, self._running)
        lanes = np.arange(self._running, self._running + len(slots))
        self._slot_of_lane[lanes] = slots
        self._running += len(slots)
        self._cuts_age = _REARRANGE_STEPS
        self._admissions += 1
        self._prefilled += sum(map(len, prompts))
        return self._emit(lanes, logits[torch.tensor(prompt_of_lane)])

    def _occupy(self, chunk: Chunk) -> list[int]:
        """Give the chunk's samples slots; one that goes on has in it what it had."""
        request, sampling = chunk.request, chunk.request.sampling
        slots = [self._free.pop() for _ in chunk.indices]
        prompt_tokens = len(request.prompt_token_ids)
        limit = min(sampling.max_tokens, self._context - prompt_tokens)
        assert self._version is not None
        for slot, index in zip(slots, chunk.indices, strict=True):
            self._samples[slot] = _Sample(request, index, [(0, self._version)])
        seeds = [request.seeds[index] for index in chunk.indices]
        self._uniforms[slots, :limit] = uniforms(seeds, limit)
        self._position[slots] = len(chunk.prefill_ids) - 1
        self._count[slots] = count = len(chunk.prefill_ids) - prompt_tokens
        if count:
            (slot,), before = slots, request.resumed[chunk.indices[0]]
            self._token_ids[slot, :count] = before.token_ids.numpy()
            self._logprobs[slot, :count] = before.logprobs.numpy()
            versions = [None, *before.versions.tolist(), self._version]
            changes = [i for i in range(count + 1) if versions[i + 1] != versions[i]]
            self._sample_in(slot).version_starts[:] = [(i, versions[i + 1]) for i in changes]
        self._limit[slots] = limit
        self._temperature[slots] = sampling.temperature
        self._top_k[slots] = sampling.top_k
        self._top_p[slots] = sampling.top_p
        self._plain[slots] = sampling.temperature == 1 and sampling.top_k == 0 and sampling.top_p == 1
        self._stop_strings[slots] = bool(sampling.stop)
        missing = 1 + len(sampling.stop_token_ids) - self._stop_ids.shape[1]
        if missing > 0:
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), mode="edge")
        self._stop_ids[slots] = self._tokenizer.end_id
        self._stop_ids[slots, 1 : 1 + len(sampling.stop_token_ids)] = sampling.stop_token_ids
        return slots

    def _decode(self) -> list[FinishedSample]:
        """One more token for every running sample."""
        slots = self._slot_of_lane[: self._running]
        if self._cuts_age >= _REARRANGE_STEPS:
            self._arrange(slots)
        self._cuts_age += 1
        positions = self._position[slots]
        spans = []
        for start, stop in zip(self._cuts[:-1], self._cuts[1:], strict=True):
            stop = min(stop, self._running)  # samples may have left since the cuts were made
            if start < stop:
                longest = int(positions[start:stop].max()) + 1
                spans.append(Span(start, stop, min(-(-longest // _ROUNDING) * _ROUNDING, self._context)))
        logits = self._decoder.decode(torch.from_numpy(self._last[slots]), torch.from_numpy(positions), spans)
        self._steps += 1
        return self._emit(np.arange(self._running), logits)

    def _arrange(self, slots: np.ndarray) -> None:
        """Bring lanes of like length together where that pays. Changes `slots`, a view of `_slot_of_lane`."""
        lengths = self._position[slots] + 1
        plan = arrange(lengths, self._span_cost)
        if plan.sources:
            sources, targets = list(plan.sources), list(plan.targets)
            self._decoder.move(sources, targets, int(lengths[sources].max()))
            slots[targets] = slots[sources]
        self._cuts, self._cuts_age = plan.cuts, 0

    def _emit(self, lanes: np.ndarray, logits: torch.Tensor) -> list[FinishedSample]:
        """Draw a token for each of these lanes and let go of the samples that it ends.

        Args:
            logits: float32 `[lanes, vocabulary]`.
        """
        slots = self._slot_of_lane[lanes]
        count = self._count[slots]
        token_ids, logprobs = self._draw(slots, logits, torch.from_numpy(self._uniforms[slots, count]))
        if not np.isfinite(logprobs).all():
            raise FloatingPointError(
                f"weight version {self._version} gives logits that are not finite: training diverged, or"
                " wrong weights were loaded. The engine's cache is spoilt; make a new engine"
            )
        self._token_ids[slots, count] = token_ids
        self._logprobs[slots, count] = logprobs
        self._last[slots] = token_ids
        self._position[slots] += 1
        self._count[slots] = count + 1
        self._sampled += len(slots)
        stopped = (token_ids[:, None] == self._stop_ids[slots]).any(-1)
        for i in np.flatnonzero(self._stop_strings[slots] & ~stopped).tolist():
            stopped[i] = self._at_stop_string(int(slots[i]))
        ended = stopped | (count + 1 >= self._limit[slots])
        if not ended.any():
            return []
        which = np.flatnonzero(ended).tolist()
        finished = [self._finish(int(slots[i]), "stop" if stopped[i] else "length") for i in which]
        self._remove(lanes[which].tolist())
        return finished

    def _draw(
        self, slots: np.ndarray, logits: torch.Tensor, uniform: torch.Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        if self._plain[slots].all():
            token_ids, logprobs = draw(logits, uniform)
        else:
            parameters = (self._temperature, self._top_k, self._top_p)
            token_ids, logprobs = sample(logits, uniform, *(torch.from_numpy(p[slots]) for p in parameters))
        return token_ids.numpy(), logprobs.numpy()

    def _at_stop_string(self, slot: int) -> bool:
        """Whether the newest token completes one of the sample's stop strings."""
        sampling = self._sample_in(slot).request.sampling
        count = int(self._count[slot])
        # Each token is a byte at least, special tokens apart: what a stop string can end with is in this
        # tail.
        tail = max(len(stop.encode()) for stop in sampling.stop) + 4
        ids = self._token_ids[slot, max(count - tail, 0) : count].tolist()
        text, before = self._tokenizer.decode(ids), self._tokenizer.decode(ids[:-1])
        return any(text.count(stop) > before.count(stop) for stop in sampling.stop)

    def _finish(self, slot: int, reason: StopReason) -> FinishedSample:
        """Take the sample out of its slot; its lane is still there to be removed."""
        sample = self._sample_in(slot)
        count = int(self._count[slot])
        versions = np.empty(count, dtype=np.int32)
        for start, version in sample.version_starts:
            versions[start:] = version
        group_id = sample.request.group_id
        self._samples[slot] = None
        self._free.append(slot)
        self._groups[group_id] -= 1
        if reason != "abort" and not self._groups[group_id]:
            del self._groups[group_id]
        return FinishedSample(
            group_id,
            sample.index,
            torch.from_numpy(self._token_ids[slot, :count].copy()),
            torch.from_numpy(self._logprobs[slot, :count].copy()),
            torch.from_numpy(versions),
            reason,
        )

    def _remove(self, lanes: Sequence[int]) -> None:
        """Close the gaps that these lanes leave with the last lanes."""
        running = self._running - len(lanes)
        gone = set(lanes)
        holes = [lane for lane in lanes if lane < running]
        movers = [lane for lane in range(running, self._running) if lane not in gone]
        if holes:
            longest = int(self._position[self._slot_of_lane[movers]].max())
            self._decoder.move(movers, holes, longest)
            self._slot_of_lane[holes] = self._slot_of_lane[movers]
        self._running = running

    def _sample_in(self, slot: int) -> _Sample:
        sample = self._samples[slot]
        assert sample is not None
        return sample


def _not_admitted(request: EngineRequest, index: int) -> FinishedSample:
    """What an aborted sample has that never held a slot: what it had when it was submitted."""
    if index in request.resumed:
        return replace(request.resumed[index], group_id=request.group_id)
    none = torch.empty(0, dtype=torch.int32)
    return FinishedSample(request.group_id, index, none, torch.empty(0), none, "abort")


def _context(config: EngineConfig, model: ModelConfig, vocab_size: int) -> int:
    """Positions of a lane."""
    most = architecture(model, vocab_size).max_tokens
    if config.context_tokens is None:
        return most
    if not 2 <= config.context_tokens <= most:
        raise UserError(
            f"engine context_tokens is {config.context_tokens}: use 2 to {most}, the context of {model.name}"
        )
    return config.context_tokens
