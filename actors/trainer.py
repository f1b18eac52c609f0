"""One rank's share of the policy and its optimizer: TorchTitan's parts put together, no actor in sight.

All ranks make the same calls in the same order; every method below is collective unless it says otherwise.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor, Replicate

from meshrl.actors.models import ModelConfig, architecture, build_model, prepare_torchtitan, titan_config
from meshrl.actors.training import LearnerConfig, OptimizerConfig, Update
from meshrl.errors import UserError
from meshrl.handoff.dock import DockedBatch, Microbatch
from meshrl.losses import GlobalCounts, Loss, LossInputs, evaluate

prepare_torchtitan()

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer  # noqa: E402
from torchtitan.components.optimizer.optimizer import default_adamw  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims  # noqa: E402
from torchtitan.distributed.utils import clip_grad_norm_, set_spmd_backend  # noqa: E402
from torchtitan.models.qwen3 import parallelize_qwen3  # noqa: E402

from meshrl.actors.attention import Documents  # noqa: E402
from meshrl.actors.vocabulary import token_logprobs  # noqa: E402
from meshrl.weights.tensors import weights_of  # noqa: E402

FOREVER = 2**40
"""Steps of a schedule that does not end."""


class Trainer:
    """The policy on one learner rank."""

    def __init__(
        self,
        model: ModelConfig,
        config: LearnerConfig,
        vocab_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        store: Store | None = None,
    ) -> None:
        """Build this rank's part; the weights are the same for any number of ranks.

        Args:
            store: where the ranks meet; needed for more than one.

        Raises:
            UserError: the process count or the model does not fit `tensor_parallel`, or `initial_weights` another
                model.
        """
        self.config = config
        self.revision = 0
        """Changes of the weights so far."""
        self.rank, self.world_size = rank, world_size
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.architecture = architecture(model, vocab_size)
        self._model_config, self._vocab_size = model, vocab_size
        tensor_parallel = config.tensor_parallel
        heads = self.architecture.n_heads, self.architecture.n_kv_heads
        if tensor_parallel < 1 or world_size % tensor_parallel or any(n % tensor_parallel for n in heads):
            raise UserError(
                f"tensor_parallel is {tensor_parallel}: it must divide the {world_size} learner processes and the "
                f"model's {heads[0]} query and {heads[1]} key/value heads"
            )
        self.data_parallel, self.data_parallel_rank = world_size // tensor_parallel, rank // tensor_parallel
        self._data_parallel_group: dist.ProcessGroup | None = None
        if world_size == 1 and config.dtype == "float32":
            # One process needs no wrapper, and is a third faster without.
            self.model: nn.Module = build_model(model, vocab_size, seed=seed).to(self.device)
        else:
            self.model = self._sharded_model(store)
            self.load_weights(dict(build_model(model, vocab_size, seed=seed).named_parameters()))
        if config.initial_weights is not None:
            from meshrl.actors.hugging_face import load_hugging_face

            self.load_weights(load_hugging_face(config.initial_weights, model, vocab_size))
        # The head runs on trained tokens only, after the rest.
        self.model._skip_lm_head = True  # pyright: ignore[reportArgumentType]
        self.model.train()
        self.reset_optimizer(config.optimizer)

    def reset_optimizer(self, config: OptimizerConfig, steps: int | None = None) -> None:
        """Begin anew with fresh moments and learning rate. Not collective.

        Args:
            steps: in place of `config.steps`.
        """
        steps = config.steps if steps is None else steps
        if config.decay != "none" and steps < 1:
            raise UserError(f"optimizer.decay is {config.decay}: optimizer.steps must say when it is over")
        settings = default_adamw(
            lr=config.learning_rate, betas=config.betas, eps=config.epsilon, weight_decay=config.weight_decay
        )
        self.optimizer: OptimizersContainer = settings.build(model_parts=[self.model])
        # A constant rate is a schedule whose decay takes no step at the end of time.
        decays = config.decay != "none"
        self.schedule: LRSchedulersContainer = LRSchedulersContainer.Config(
            warmup_steps=config.warmup_steps,
            decay_ratio=None if decays else 0.0,
            decay_type=config.decay if config.decay != "none" else "linear",
            min_lr_factor=config.final_fraction,
        ).build(optimizers=self.optimizer, training_steps=steps if decays else FOREVER)
        self._optimizer_config = config, steps

    def step(
        self, batch: DockedBatch, loss: Loss, *, temperature: float = 1.0, supervised: bool = False
    ) -> Update:
        """One optimizer step on this rank's share of a batch.

        Args:
            temperature: logits are divided by it, so that log-probabilities are those of the sampler.
            supervised: nothing was sampled, so there are no sampler log-probabilities to compare with.

        Returns:
            Metrics of the whole batch, advantages of this rank's share. A batch with nothing to train on changes
            nothing and has the metric `skipped` 1.

        Raises:
            ValueError: the batch lacks a column that the loss needs.
            FloatingPointError: the gradient is not finite; the weights are as before.
        """
        advantages: dict[int, float] = {}
        if "advantages" in batch.rollout_columns:
            values = batch.rollout_columns["advantages"].tolist()
            advantages = dict(zip(batch.rollout_ids, values, strict=True))
        if batch.global_tokens == 0:
            return Update({"skipped": 1.0, "tokens": 0.0}, advantages, {})
        columns = loss.columns if supervised else {*loss.columns, "sampler_logprobs"}
        batch.check(columns)
        started = time.perf_counter()
        counts = GlobalCounts(batch.global_tokens, batch.global_rollouts)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.device))
        largest = torch.zeros((), device=self.device)
        for microbatch in batch.rows():
            inputs, entropy = self._evaluate(microbatch, temperature, columns)
            outputs = evaluate(loss, inputs)
            value = (outputs.per_token * loss.aggregation.weights(inputs, counts)).sum()
            value.backward()
            with torch.no_grad():
                sums["loss"] += value.detach() * counts.tokens
                sums["entropy"] += inputs.zeros_at_masked(entropy).sum()
                for name, total in outputs.sums.items():
                    sums[name] += total
                if not supervised and inputs.logprobs.numel():
                    difference = (
                        inputs.zeros_at_masked(inputs.logprobs) - inputs.column("sampler_logprobs")
                    ).abs()
                    sums["logprob_difference_mean"] += difference.sum()
                    largest = torch.maximum(largest, difference.max())
        middle = time.perf_counter()
        norm = self._clip()
        if not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"the gradient norm is {norm} at a loss of {sums['loss'].item() / counts.tokens:g}: the weights are "
                "unchanged; look at the batch, or lower the learning rate"
            )
        learning_rate = self.schedule.schedulers[0].get_last_lr()[0]
        self.optimizer.step()
        self.revision += 1
        self.schedule.step()
        self.optimizer.zero_grad()
        metrics = self._reduce(sums, counts.tokens)
        if squares := metrics.get("importance_weight_square_mean"):  # Kish 1965: (Σw)² / (n Σw²)
            metrics["effective_sample_share"] = metrics["importance_weight_mean"] ** 2 / squares
        if not supervised:
            metrics["logprob_difference_max"] = self._largest(largest)
        metrics |= {
            "gradient_norm": float(norm),
            "learning_rate": float(learning_rate),
            "tokens": float(batch.global_tokens),
            "rollouts": float(batch.global_rollouts),
            "skipped": 0.0,
        }
        ended = time.perf_counter()
        return Update(metrics, advantages, {"backward": middle - started, "optimizer": ended - middle})

    @torch.no_grad()
    def logprobs(self, batch: DockedBatch, temperature: float = 1.0) -> dict[int, Tensor]:
        """Log-probabilities of the response tokens, float32 `[response tokens]`, by rollout id of this rank's share."""
        found: dict[int, Tensor] = {}
        for microbatch in batch.rows():
            inputs, _ = self._evaluate(microbatch, temperature, ())
            for place, position in enumerate(microbatch.positions):
                chosen = inputs.mask & (inputs.sequence == place)
                found[batch.rollout_ids[position]] = inputs.logprobs[chosen].cpu()
        return found

    def weight_tensors(self) -> dict[str, Tensor]:
        """This rank's live parameters and buffers by name, DTensors where they are sharded. Not collective."""
        return weights_of(self.model)

    @torch.no_grad()
    def whole_weights(self) -> dict[str, Tensor]:
        """Whole parameters by name, on every rank."""
        return {name: _whole(tensor) for name, tensor in self.weight_tensors().items()}

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take these whole parameters; each rank keeps its part. Not collective.

        Raises:
            UserError: names or shapes are another model's.
        """
        _copy_parts(dict(self.model.named_parameters()), weights)
        self.revision += 1

    @torch.no_grad()
    def save(self, directory: Path) -> None:
        """Write weights and optimizer state, whole, to be loaded on any number of ranks; rank 0 writes."""
        from safetensors.torch import save_file

        tensors = {name: _whole(tensor) for name, tensor in self._state_tensors().items()}
        if self.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(
                {n: t.cpu().contiguous() for n, t in tensors.items()}, directory / "learner.safetensors"
            )
            config, steps = self._optimizer_config
            (directory / "learner.json").write_text(
                json.dumps(
                    {"optimizer": asdict(config), "steps": steps, "schedule": self.schedule.state_dict()}
                )
            )
        if self.world_size > 1:
            dist.barrier()

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Go on from what `save` wrote, bit for bit. Not collective.

        Raises:
            UserError: nothing there, or the state of another model.
        """
        from safetensors.torch import load_file

        file = directory / "learner.safetensors"
        if not file.is_file():
            raise UserError(f"{directory}: holds no learner state ({file.name} is missing)")
        state = json.loads((directory / "learner.json").read_text())
        config = {**state["optimizer"], "betas": tuple(state["optimizer"]["betas"])}
        self.reset_optimizer(OptimizerConfig(**config), state["steps"])
        _copy_parts(self._state_tensors(), load_file(file))
        self.revision += 1
        self.schedule.load_state_dict(state["schedule"])
        for optimizer, schedule in zip(self.optimizer, self.schedule, strict=True):
            for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate

    def _sharded_model(self, store: Store | None) -> nn.Module:
        """FSDP2 and tensor parallelism around a model without values."""
        config = self.config
        if not dist.is_initialized():
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=store or HashStore(),
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=config.collective_timeout_seconds),
            )
        # TorchTitan's newer default fails with torch 2.13 on more than one rank.
        parallelism = ParallelismConfig(
            spmd_backend="partial_dtensor", tensor_parallel_degree=config.tensor_parallel
        )
        set_spmd_backend("partial_dtensor")
        dims = ParallelDims.from_config(parallelism, self.world_size)
        dims.build_mesh()
        titan = titan_config(self._model_config, self._vocab_size)
        titan.update_from_config(config=SimpleNamespace(parallelism=parallelism))
        with torch.device("meta"):
            model = titan.build()
        model = parallelize_qwen3(
            model,
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param=config.dtype),
            parallelism=parallelism,
            compile_config=CompileConfig(),
            ac_config=None,  # pyright: ignore[reportArgumentType]
            dump_folder="",
        )
        if self.device.type == "cpu":
            # gloo cannot scale while it sums.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_states()
        if self.data_parallel > 1:
            self._data_parallel_group = dims.get_mesh("batch").get_group()
        return model

    def _evaluate(
        self, microbatch: Microbatch, temperature: float, columns: Collection[str]
    ) -> tuple[LossInputs, Tensor]:
        """Forward pass: the trained tokens of a micro-batch as loss inputs, and their entropies `[trained tokens]`."""
        lengths = microbatch.lengths
        tokens = microbatch.columns["token_ids"].to(self.device, torch.int64)
        # Sequence parallelism divides a row evenly; a row that is empty still takes part in every collective.
        padding = -len(tokens) % self.config.tensor_parallel if lengths else self.config.tensor_parallel
        if padding:
            tokens = torch.cat([tokens, tokens.new_zeros(padding)])
        documents = Documents.of([*lengths, padding] if padding else lengths, self.device)
        trained = microbatch.columns["response_mask"].to(self.device).nonzero()[:, 0]
        some = trained.numel() > 0
        # Nothing to train on: one masked token keeps the graph, and with it the backward collectives.
        predicted = trained if some else torch.zeros(1, dtype=torch.int64, device=self.device)
        hidden = self.model(tokens[None], positions=documents.positions, attention_masks=documents)
        # The logits that predict a token are those of the token before it.
        logits = self.model.lm_head(  # pyright: ignore[reportCallIssue]
            _select(hidden, (predicted - 1).clamp(min=0))
        )
        logprobs, entropy = token_logprobs(logits.squeeze(0), tokens[predicted], temperature)
        inputs = LossInputs(
            logprobs=logprobs,
            mask=torch.full_like(predicted, some, dtype=torch.bool),
            sequence=documents.document[predicted],
            sequences=max(len(lengths), 1),
        )
        if not lengths:  # placeholders
            asked = {name: torch.zeros_like(logprobs, requires_grad=False) for name in columns}
        else:
            asked = {name: microbatch.at(name, predicted, inputs.sequence) for name in columns}
        return replace(inputs, columns=asked), entropy

    def _clip(self) -> float:
        """Norm of the whole gradient, before it is scaled down."""
        most = self.config.max_gradient_norm or math.inf
        return float(clip_grad_norm_(self.model.parameters(), most, foreach=True))

    def _reduce(self, sums: Mapping[str, Tensor], tokens: int) -> dict[str, float]:
        """Sums over all data-parallel ranks, divided by the batch's tokens."""
        names = sorted(sums)
        values = torch.stack([sums[name].double() for name in names])
        if self._data_parallel_group is not None:
            dist.all_reduce(values, group=self._data_parallel_group)
        return {name: value / tokens for name, value in zip(names, values.tolist(), strict=True)}

    def _largest(self, value: Tensor) -> float:
        if self._data_parallel_group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, self._data_parallel_group)
        return value.item()

    def _state_tensors(self) -> dict[str, Tensor]:
        """Live tensors of weights and optimizer by name; makes moments that do not exist yet."""
        state = self.optimizer.state_dict()
        moments = {f"optimizer.{name}": value for name, value in state.items() if name.startswith("state.")}
        return {**self.weight_tensors(), **moments}


def _select(hidden: Tensor, rows: Tensor) -> Tensor:
    """`[1, tokens, dim]` → `[1, rows, dim]`; under tensor parallelism the same rows on every rank."""
    if isinstance(hidden, DTensor):
        rows = DTensor.from_local(rows, hidden.device_mesh, [Replicate()], run_check=False)
    return hidden.index_select(1, rows)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _copy_parts(targets: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into live ones of the same names, each rank its own part."""
    names = set(targets) ^ set(whole)
    wrong = names or {n for n, tensor in targets.items() if tensor.shape != whole[n].shape}
    if wrong:
        first = min(wrong)
        raise UserError(
            f"these are not the weights of this model: {len(wrong)} names or shapes differ, such as {first}"
        )
    for name, target in targets.items():
        value = whole[name].to(target.device, target.dtype)
        if isinstance(target, DTensor):
            mesh = target.device_mesh
            # Every rank has the whole, so cutting it needs no communication.
            replicated = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
            value = replicated.redistribute(mesh, target.placements)
        target.copy_(value)
