"""Qwen3 by name: its shape, its parameters, and the TorchTitan model built from it.

The shape (`Architecture`) and the parameter table are plain data, so that a process which only needs names
and sizes does not import TorchTitan. Learner and generator share one definition, hence one set of parameter
names.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from meshrl.actors.hugging_face import export_hugging_face, load_hugging_face
from meshrl.actors.tokenizer import Tokenizer, load_tokenizer
from meshrl.errors import UserError

if TYPE_CHECKING:
    from torchtitan.models.qwen3 import Qwen3Model

__all__ = [
    "Architecture",
    "ModelConfig",
    "Tokenizer",
    "architecture",
    "build_model",
    "export_hugging_face",
    "load_hugging_face",
    "load_tokenizer",
    "model_names",
    "parameter_shapes",
    "prepare_torchtitan",
    "titan_config",
]


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: str = "tiny-0.4m"
    """`tiny-0.4m`, `tiny-0.8m`, `tiny-1m` (for CPUs), or an official size such as `qwen3-0.6b`."""
    max_tokens: int = 0
    """Context in tokens, prompt and response together; 0: the model's own."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a dense Qwen3."""

    dim: int
    """Width of the residual stream."""
    n_layers: int
    n_heads: int
    n_kv_heads: int
    """Key/value heads; each serves `n_heads / n_kv_heads` query heads."""
    head_dim: int
    hidden_dim: int
    """Width of the gated feed-forward layer."""
    vocab_size: int
    """Rows of the embedding."""
    max_tokens: int
    """Context in tokens."""
    rope_theta: float = 1e4
    """Base of the rotary frequencies."""
    tied: bool = True
    """Embedding and output share one weight."""
    norm_epsilon: float = 1e-6


_TINY_LAYERS: dict[str, Any] = dict(
    dim=128, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=384, vocab_size=0
)

_TINY = {
    "tiny-0.4m": Architecture(n_layers=2, max_tokens=256, **_TINY_LAYERS),
    "tiny-0.8m": Architecture(n_layers=4, max_tokens=512, **_TINY_LAYERS),
    "tiny-1m": Architecture(n_layers=5, max_tokens=1024, **_TINY_LAYERS),
}
"""Sizes for CPUs; `vocab_size` comes from the tokenizer."""

_OFFICIAL = {f"qwen3-{size.lower()}": size for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")}
"""Our name → TorchTitan's."""


def attention_tokens(model: ModelConfig, vocab_size: int) -> float:
    """The length at which attention costs as much as all matrix products of a token.

    Those take 2 operations a weight. Causal attention takes 2 · heads · head_dim a layer for each token before, on
    average half the length, once for scores and once for values (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    sizes = architecture(model, vocab_size)
    width, shared = sizes.n_heads * sizes.head_dim, sizes.n_kv_heads * sizes.head_dim
    layer = sizes.dim * (2 * width + 2 * shared + 3 * sizes.hidden_dim)
    weights = sizes.n_layers * layer + sizes.dim * sizes.vocab_size
    return weights / (sizes.n_layers * width)


def model_names() -> tuple[str, ...]:
    """Names that `ModelConfig.name` may have."""
    return (*_TINY, *_OFFICIAL)


def architecture(config: ModelConfig, vocab_size: int) -> Architecture:
    """Sizes of the model of that name, for a tokenizer of `vocab_size` tokens.

    Tiny models have exactly `vocab_size` embedding rows; official ones keep their own count, so that
    published weights fit.

    Raises:
        UserError: unknown name, a context beyond what the model was made for, or a tokenizer too large for an
            official size.
    """
    if config.name in _TINY:
        found = replace(_TINY[config.name], vocab_size=vocab_size)
    elif config.name in _OFFICIAL:
        found = _official_architecture(config.name)
        if vocab_size > found.vocab_size:
            raise UserError(
                f"the tokenizer has {vocab_size} tokens, {config.name} only {found.vocab_size} embedding "
                "rows: use the tokenizer that belongs to the model"
            )
    else:
        close = difflib.get_close_matches(config.name.lower(), model_names(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"unknown model {config.name!r}: {hint}the names are {', '.join(model_names())}")
    # A tiny model starts from nothing, so its context may be anything.
    most = found.max_tokens if config.name in _OFFICIAL else 2**20
    if not 0 <= config.max_tokens <= most:
        raise UserError(f"max_tokens is {config.max_tokens}: {config.name} takes 1 to {most}, or 0")
    return replace(found, max_tokens=config.max_tokens or found.max_tokens)


def parameter_shapes(config: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by TorchTitan name, in model order.

    A tied output weight appears as `tok_embeddings.weight` only.

    >>> parameter_shapes(ModelConfig("tiny-0.4m"), 16)["layers.0.attention.qkv_linear.wk.weight"]
    (64, 128)
    """
    a = architecture(config, vocab_size)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (a.vocab_size, a.dim)}
    for layer in range(a.n_layers):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}attention.qkv_linear.wq.weight": (a.n_heads * a.head_dim, a.dim),
            f"{prefix}attention.qkv_linear.wk.weight": (a.n_kv_heads * a.head_dim, a.dim),
            f"{prefix}attention.qkv_linear.wv.weight": (a.n_kv_heads * a.head_dim, a.dim),
            f"{prefix}attention.wo.weight": (a.dim, a.n_heads * a.head_dim),
            f"{prefix}attention.q_norm.weight": (a.head_dim,),
            f"{prefix}attention.k_norm.weight": (a.head_dim,),
            f"{prefix}feed_forward.w1.weight": (a.hidden_dim, a.dim),
            f"{prefix}feed_forward.w2.weight": (a.dim, a.hidden_dim),
            f"{prefix}feed_forward.w3.weight": (a.hidden_dim, a.dim),
            f"{prefix}attention_norm.weight": (a.dim,),
            f"{prefix}ffn_norm.weight": (a.dim,),
        }
    shapes["norm.weight"] = (a.dim,)
    if not a.tied:
        shapes["lm_head.weight"] = (a.vocab_size, a.dim)
    return shapes


def titan_config(config: ModelConfig, vocab_size: int, attention: Any = None) -> Qwen3Model.Config:
    """TorchTitan's configuration of the model, with separate q, k and v weights.

    Args:
        attention: config of the inner attention; None: `PackedAttention`.
    """
    prepare_torchtitan()
    import torchtitan.models.qwen3 as qwen3
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear

    from meshrl.actors.attention import PackedAttention

    a = architecture(config, vocab_size)
    # TorchTitan has no public way to a dense Qwen3 of other sizes; its own sizes are made with these helpers.
    layers = qwen3._build_qwen3_layers(
        n_layers=a.n_layers,
        dim=a.dim,
        n_heads=a.n_heads,
        n_kv_heads=a.n_kv_heads,
        head_dim=a.head_dim,
        hidden_dim=a.hidden_dim,
        # Fused weights would make state_dict() a collective and hide which rank holds what.
        fuse_qkv=False,
        attn_backend="flex",
        rope=CosSinRoPE.Config(dim=a.head_dim, max_seq_len=a.max_tokens, theta=a.rope_theta),
    )
    for layer in layers:
        # One config object per layer: parallelize writes its shardings into it.
        layer.attention.inner_attention = (
            type(attention)() if attention is not None else PackedAttention.Config()
        )
    return qwen3.Qwen3Model.Config(
        vocab_size=a.vocab_size,
        dim=a.dim,
        norm=qwen3._qwen3_norm(a.dim),
        enable_weight_tying=a.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=a.vocab_size,
            embedding_dim=a.dim,
            param_init=qwen3._EMBEDDING_SKIP_INIT if a.tied else qwen3._EMBEDDING_INIT,
        ),
        lm_head=Linear.Config(in_features=a.dim, out_features=a.vocab_size, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )


def build_model(
    config: ModelConfig, vocab_size: int, attention: Any = None, *, seed: int | None = None
) -> Qwen3Model:
    """The whole model on one device in float32, with fresh weights.

    `model(token_ids [rows, tokens] int64, positions=..., attention_masks=...)` gives logits
    `[rows, tokens, vocab]`. Without `attention_masks` each row is one causal sequence; see `PackedAttention`
    for packed rows.

    Args:
        attention: config of the inner attention; None: `PackedAttention`.
        seed: of the weights; None: from torch's own generator.
    """
    model = titan_config(config, vocab_size, attention).build()
    with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model.init_states()
    return model


def prepare_torchtitan() -> None:
    """Make TorchTitan run on the CPU where there is no accelerator. Call before any other TorchTitan import.

    TorchTitan takes "no accelerator" for CUDA when its utilities are imported, and other modules copy that.
    """
    if torch.accelerator.is_available():
        return
    utilities = importlib.import_module("torchtitan.tools.utils")
    for name, module in list(sys.modules.items()):
        # Modules that were imported on the way have copied the wrong device already.
        if name.startswith("torchtitan") and getattr(module, "device_type", None) == "cuda":
            vars(module)["device_type"] = "cpu"
            if hasattr(module, "device_module"):
                vars(module)["device_module"] = torch.cpu
    assert vars(utilities)["device_type"] == "cpu"


def _official_architecture(name: str) -> Architecture:
    """Read the sizes from TorchTitan's registry."""
    prepare_torchtitan()
    from torchtitan.models.qwen3 import qwen3_configs

    config = qwen3_configs[_OFFICIAL[name]](attn_backend="flex")
    attention = config.layers[0].attention
    return Architecture(
        dim=config.dim,
        n_layers=len(config.layers),
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        head_dim=attention.head_dim,
        hidden_dim=config.layers[0].feed_forward.w1.out_features,
        vocab_size=config.vocab_size,
        max_tokens=attention.rope.max_seq_len,
        rope_theta=attention.rope.theta,
        tied=config.enable_weight_tying,
        norm_epsilon=config.norm.eps,
    )
