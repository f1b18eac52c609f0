"""Weights in and out of Hugging Face checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from meshrl.actors.tokenizer import Tokenizer
from meshrl.errors import UserError

if TYPE_CHECKING:
    from meshrl.actors.models import ModelConfig


def export_hugging_face(
    weights: Mapping[str, torch.Tensor], config: ModelConfig, tokenizer: Tokenizer, directory: Path
) -> None:
    """Write a checkpoint that transformers loads: `model.safetensors`, `config.json` and the tokenizer.

    Args:
        weights: whole parameters by TorchTitan name.
    """
    from safetensors.torch import save_file

    from meshrl.actors.models import architecture

    adapter = _adapter(config, tokenizer.vocab_size)
    directory.mkdir(parents=True, exist_ok=True)
    named = {
        name: value.detach().to("cpu").contiguous() for name, value in adapter.to_hf(dict(weights)).items()
    }
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    a = architecture(config, tokenizer.vocab_size)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "hidden_size": a.dim,
                "num_hidden_layers": a.n_layers,
                "num_attention_heads": a.n_heads,
                "num_key_value_heads": a.n_kv_heads,
                "head_dim": a.head_dim,
                "intermediate_size": a.hidden_dim,
                "vocab_size": a.vocab_size,
                "max_position_embeddings": a.max_tokens,
                "rope_theta": a.rope_theta,
                "rope_parameters": {"rope_type": "default", "rope_theta": a.rope_theta},
                "rms_norm_eps": a.norm_epsilon,
                "tie_word_embeddings": a.tied,
                "hidden_act": "silu",
                "attention_bias": False,
                "attention_dropout": 0.0,
                "use_sliding_window": False,
                "eos_token_id": tokenizer.end_id,
                "pad_token_id": tokenizer.pad_id,
                "torch_dtype": str(next(iter(named.values())).dtype).removeprefix("torch."),
            },
            indent=2,
        )
    )
    tokenizer.save(directory)


def load_hugging_face(directory: Path, config: ModelConfig, vocab_size: int) -> dict[str, torch.Tensor]:
    """Whole parameters by TorchTitan name, from a checkpoint directory.

    Raises:
        UserError: no checkpoint there, or one of another model.
    """
    from safetensors.torch import load_file

    from meshrl.actors.models import parameter_shapes

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UserError(f"{directory}: no *.safetensors file there")
    named: dict[str, torch.Tensor] = {}
    for file in files:
        named |= load_file(file)
    wanted = parameter_shapes(config, vocab_size)
    found = _adapter(config, vocab_size).from_hf(named)
    if "lm_head.weight" not in wanted:
        found.pop("lm_head.weight", None)
    wrong = {
        name
        for name in {*wanted, *found}
        if name not in found or name not in wanted or tuple(found[name].shape) != wanted[name]
    }
    if wrong:
        first = sorted(wrong)[0]
        shape = tuple(found[first].shape) if first in found else None
        raise UserError(
            f"{directory} does not hold a {config.name}: {len(wrong)} parameters differ, such as {first} "
            f"(there {shape}, wanted {wanted.get(first)})"
        )
    return found


def _adapter(config: ModelConfig, vocab_size: int):
    from meshrl.actors.models import titan_config

    titan = titan_config(config, vocab_size)
    from torchtitan.models.qwen3 import Qwen3StateDictAdapter

    return Qwen3StateDictAdapter(titan, None)
