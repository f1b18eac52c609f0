"""Tokens per second of the embedded engine: `python -m benchmarks.generate`.

Reference: Hugging Face `generate` on the same weights and prompts, in the same run. Both get prompts with
several samples each, in batches of as many samples as the engine has slots; a batch of Hugging Face's ends
with its longest response, the engine refills its slots. Lengths are fixed, or geometric: a few tokens end a
response, so that each step does so with probability 1/64. Only tokens up to the end of each response count.

Seconds are CPU seconds of this process, so that other work on the machine matters little; on an idle machine
and one thread they are wall seconds.

The floor is the time that the products of one decode step take at the measured speed of one core, plus
reading the key/value cache once at the measured memory rate, with all slots busy. The logprob difference is
the engine's against the full TorchTitan forward, over all responses.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Annotated, Any, Literal

# Before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from meshrl.actors.engines.engine import EngineRequest, FinishedSample
from meshrl.actors.engines.titan import EngineConfig, TitanEngine
from meshrl.actors.models import (
    Architecture,
    ModelConfig,
    architecture,
    build_model,
    export_hugging_face,
    load_tokenizer,
)
from meshrl.rollout import SamplingParams

Lengths = Literal["fixed", "geometric"]


@dataclass(frozen=True)
class GenerateBenchmark:
    """The embedded engine against Hugging Face `generate`."""

    model: str = "tiny-0.8m"
    """Name of the model; its weights are random."""
    slots: int = 64
    """Samples that run at once."""
    samples: int = 256
    """Responses of each case."""
    group_size: int = 8
    """Samples of each prompt."""
    prompt_tokens: int = 32
    fixed_tokens: int = 64
    """Length of each response where lengths are fixed."""
    mean_tokens: int = 64
    """Mean where lengths are geometric."""
    most_tokens: int = 256
    """Cap where lengths are geometric."""
    threads: int = 1
    """Cores; the floor is that of one."""
    repeats: int = 3
    """Of the engine's runs, the fastest counts. Hugging Face, which is slow, runs once after a short
    warm-up."""
    seed: int = 0
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one JSON object per row in place of the table."""


def main() -> None:
    """Run and print."""
    benchmark = tyro.cli(GenerateBenchmark, description=__doc__)
    torch.set_num_threads(benchmark.threads)
    rows = measure(benchmark)
    if benchmark.json:
        for row in rows:
            print(json.dumps(row))
        return
    table = Table(title=f"{benchmark.model}, {benchmark.slots} slots, {benchmark.threads} thread(s)")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=160).print(table)


def measure(benchmark: GenerateBenchmark) -> list[dict[str, Any]]:
    """One row for each kind of lengths and each engine."""
    gemm_rate, memory_rate = core_rates()
    rows = []
    workload = _Workload(benchmark)
    kinds: tuple[Lengths, ...] = ("fixed", "geometric")
    for lengths in kinds:
        floor = floor_tokens_per_second(
            workload.shape,
            benchmark.slots,
            benchmark.prompt_tokens + workload.mean_context(lengths),
            gemm_rate,
            memory_rate,
        )
        reference_tokens, reference_seconds = workload.hugging_face(lengths)
        reference = reference_tokens / reference_seconds
        runs = [workload.engine(lengths) for _ in range(benchmark.repeats)]
        samples, seconds = min(runs, key=lambda run: run[1])
        tokens = sum(len(sample.token_ids) for sample in samples)
        for engine, count, rate, difference in (
            ("hugging face", reference_tokens, reference, float("nan")),
            ("meshrl titan", tokens, tokens / seconds, workload.logprob_difference(samples)),
        ):
            rows.append(
                {
                    "lengths": lengths,
                    "engine": engine,
                    "tokens": count,
                    "tokens_per_second": round(rate),
                    "over_hugging_face": rate / reference,
                    "floor_tokens_per_second": round(floor),
                    "share_of_floor": rate / floor,
                    "logprob_difference_max": None if difference != difference else difference,
                }
            )
    for row in rows:
        row |= {"gemm_gflops": gemm_rate / 1e9, "memory_gb_per_second": memory_rate / 1e9}
    return rows


class _Workload:
    """Weights, prompts and both ways to continue them."""

    def __init__(self, benchmark: GenerateBenchmark) -> None:
        self.benchmark = benchmark
        self.config = ModelConfig(benchmark.model)
        self.tokenizer = load_tokenizer("bytes")
        # No end token but those of the case: neither engine may stop early.
        self.real_end, self.tokenizer.end_id = self.tokenizer.end_id, -1
        self.shape = architecture(self.config, self.tokenizer.vocab_size)
        self.model = build_model(self.config, self.tokenizer.vocab_size, seed=benchmark.seed).eval()
        self._engine = TitanEngine(EngineConfig(slots=benchmark.slots), self.config, self.tokenizer)
        self._engine.load_weights(self.model.state_dict(), 0)
        prompts = benchmark.samples // benchmark.group_size
        random = np.random.default_rng(benchmark.seed)
        self.prompts = random.integers(0, 256, (prompts, benchmark.prompt_tokens))
        # Fresh weights sample nearly uniformly, so this many ids end one response in `mean_tokens`.
        self.stop_ids = tuple(range(max(1, round(self.shape.vocab_size / benchmark.mean_tokens))))

    def limits(self, lengths: Lengths) -> tuple[int, tuple[int, ...]]:
        """Most tokens, and the ids that end a response."""
        if lengths == "fixed":
            return self.benchmark.fixed_tokens, ()
        return self.benchmark.most_tokens, self.stop_ids

    def mean_context(self, lengths: Lengths) -> float:
        """Response tokens that a running sample has cached, on average."""
        return self.benchmark.fixed_tokens / 2 if lengths == "fixed" else float(self.benchmark.mean_tokens)

    def engine(self, lengths: Lengths) -> tuple[list[FinishedSample], float]:
        """All responses, and the seconds from the first request to the last response."""
        engine = self._engine
        most, stop_ids = self.limits(lengths)
        sampling = SamplingParams(max_tokens=most, stop_token_ids=stop_ids)
        size = self.benchmark.group_size
        start = process_time()
        for group, prompt in enumerate(self.prompts):
            seeds = tuple(range(group * size, group * size + size))
            engine.submit(EngineRequest(group, prompt.tolist(), seeds, sampling))
        finished = []
        while not engine.idle:
            finished += engine.step()
        return finished, process_time() - start

    def hugging_face(self, lengths: Lengths) -> tuple[int, float]:
        """Tokens and seconds of `generate` over batches of `slots` samples."""
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

        with tempfile.TemporaryDirectory() as directory:
            self.tokenizer.end_id = self.real_end
            export_hugging_face(self.model.state_dict(), self.config, self.tokenizer, Path(directory))
            self.tokenizer.end_id = -1
            model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        most, stop_ids = self.limits(lengths)
        options: dict[str, Any] = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
        options |= dict(pad_token_id=self.shape.vocab_size - 1)
        model.generation_config.eos_token_id = list(stop_ids) or None
        prompts = torch.from_numpy(self.prompts.repeat(self.benchmark.group_size, axis=0))
        torch.manual_seed(self.benchmark.seed)
        tokens = 0
        with torch.inference_mode():
            model.generate(prompts[: self.benchmark.slots], max_new_tokens=4, **options)
            start = process_time()
            for batch in prompts.split(self.benchmark.slots):
                responses = model.generate(batch, max_new_tokens=most, **options)[:, batch.shape[1] :]
                ended = torch.isin(responses, torch.tensor(stop_ids, dtype=torch.int64))
                # Every token counts that no earlier end token precedes.
                tokens += int((ended.cumsum(-1) - ended.long() == 0).sum())
            return tokens, process_time() - start

    @torch.no_grad()
    def logprob_difference(self, samples: list[FinishedSample]) -> float:
        """Largest |logprob of the engine - logprob of the full forward| over all sampled tokens."""
        worst = 0.0
        start = self.benchmark.prompt_tokens
        for sample in samples:
            ids = torch.cat([torch.from_numpy(self.prompts[sample.group_id]), sample.token_ids.long()])
            logits = self.model(ids[None], positions=torch.arange(len(ids))[None])[0]
            full = torch.log_softmax(logits[start - 1 : -1].float(), -1).gather(-1, ids[start:, None])[:, 0]
            worst = max(worst, float((full - sample.logprobs).abs().max()))
        return worst


def core_rates() -> tuple[float, float]:
    """Fp32 product speed (operations per second) and memory read rate (bytes per second), as measured now."""
    matrix = torch.randn(1024, 1024)
    product_seconds = _fastest(lambda: torch.mm(matrix, matrix))
    large = torch.ones(64 * 2**20 // 4)
    read_seconds = _fastest(lambda: large.sum())
    return 2 * 1024**3 / product_seconds, large.nbytes / read_seconds


def floor_tokens_per_second(
    shape: Architecture, slots: int, mean_context: float, gemm_rate: float, memory_rate: float
) -> float:
    """Tokens per second if a decode step did its products at full speed and read its cache once, and nothing
    else."""
    heads, kv_heads = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    layer = shape.dim * (2 * heads + 2 * kv_heads + 3 * shape.hidden_dim)
    products = 2 * slots * (shape.n_layers * layer + shape.vocab_size * shape.dim)
    cache = 4 * slots * shape.n_layers * 2 * kv_heads * mean_context
    return slots / (products / gemm_rate + cache / memory_rate)


def _fastest(run: Callable[[], Any], times: int = 20) -> float:
    seconds = []
    for _ in range(times):
        start = process_time()
        run()
        seconds.append(process_time() - start)
    return min(seconds)


if __name__ == "__main__":
    main()
