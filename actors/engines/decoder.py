"""TorchTitan's dense Qwen3, written flat for generation on a CPU.

The same weights as the learner's module under the same names, in few operator calls: norm weights are folded
into the next linear, q, k and v are one product, gate and up another, norm and rotary embedding run once for
queries and keys. Keys and values live in one preallocated cache of lanes; a lane is one running sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from meshrl.actors.models import Architecture, ModelConfig, architecture, parameter_shapes
from meshrl.errors import UserError


@dataclass(frozen=True)
class Span:
    """Neighbouring lanes that attend to the same number of cache positions."""

    start: int
    stop: int
    length: int
    """Positions attended to: the longest lane's, so lanes of like length belong together."""


class _Layer:
    """Folded weights of one layer, matrices `[out, in]`, and its part of the cache.

    The halves of a query or key head, which rotary embedding turns as pairs, are interleaved: a pair is then
    one complex number and the turn one product. Attention does not mind, since both sides are reordered
    alike.
    """

    def __init__(self, shape: Architecture, cache: torch.Tensor) -> None:
        group = shape.n_heads // shape.n_kv_heads
        self.qkv = torch.empty(shape.n_kv_heads, group + 2, shape.head_dim, shape.dim)
        self.qk_norm = torch.empty(group + 1, shape.head_dim)
        self.output = torch.empty(shape.dim, shape.n_heads * shape.head_dim)
        # up first: the activation below multiplies in place and then needs [gated | gate]
        self.up_gate = torch.empty(2 * shape.hidden_dim, shape.dim)
        self.down = torch.empty(shape.dim, shape.hidden_dim)
        # made once, since even a view costs a microsecond
        self.qkv_in = self.qkv.view(-1, shape.dim).t()
        self.output_in, self.up_gate_in, self.down_in = self.output.t(), self.up_gate.t(), self.down.t()
        self.keys, self.values = cache.flatten(1, 2)
        self.key_rows, self.value_rows = cache.flatten(1, 3)


class FlatDecoder:
    """Prefill and decode over a cache of `lanes` x `positions`.

    Accuracy: fp32 throughout; logprobs agree with the module's forward to about 1e-6.
    """

    def __init__(self, model: ModelConfig, vocab_size: int, lanes: int, positions: int) -> None:
        self.shape = shape = architecture(model, vocab_size)
        self.group = shape.n_heads // shape.n_kv_heads
        self._weight_shapes = parameter_shapes(model, vocab_size)
        self._embedding = torch.empty(shape.vocab_size, shape.dim)
        self._head = torch.empty(shape.vocab_size, shape.dim)
        self._head_in = self._head.t()
        self._rotation = _rotation(shape, positions)
        self._epsilon = torch.tensor(shape.norm_epsilon)
        # numpy's zeros are untouched pages: memory is taken only as lanes fill. Zero, since masked positions
        # must be finite: -inf + NaN would be NaN.
        size = (shape.n_layers, 2, lanes, shape.n_kv_heads, positions, shape.head_dim)
        try:
            self._cache = torch.from_numpy(np.zeros(size, dtype=np.float32))
        except (MemoryError, ValueError):
            raise UserError(
                f"a key/value cache of {lanes} slots x {positions} tokens needs"
                f" {4 * math.prod(size) / 2**30:.1f} GiB, more than there is: lower the engine's slots or"
                " context_tokens"
            ) from None
        self._layers = [_Layer(shape, cache) for cache in self._cache]
        self._column = torch.arange(positions)
        self._lane_rows = torch.arange(lanes * shape.n_kv_heads).view(lanes, shape.n_kv_heads) * positions

    @property
    def cache_bytes(self) -> int:
        return self._cache.nbytes

    @torch.inference_mode()
    def load(self, named: Mapping[str, torch.Tensor]) -> None:
        """Fold these weights into the decoder's own buffers, all or none.

        Raises:
            UserError: a weight is missing or has another shape.
        """
        for name, shape in self._weight_shapes.items():
            if name not in named:
                raise UserError(f"weight {name} is missing; there are {len(named)} others")
            if tuple(named[name].shape) != shape:
                raise UserError(
                    f"weight {name} has shape {tuple(named[name].shape)}, the model needs {shape}"
                )
        # Products of half-precision weights would be rounded before they are stored.
        named = {name: named[name].float() for name in self._weight_shapes}
        heads, group, head_dim = self.shape.n_kv_heads, self.group, self.shape.head_dim
        for i, layer in enumerate(self._layers):
            weight = {
                name: named[f"layers.{i}.{name}.weight"]
                for name in (
                    *("attention_norm", "attention.q_norm", "attention.k_norm", "attention.wo", "ffn_norm"),
                    *(f"attention.qkv_linear.w{x}" for x in "qkv"),
                    *(f"feed_forward.w{x}" for x in "123"),
                )
            }
            norm = weight["attention_norm"]
            for first, size, name in ((0, group, "wq"), (group, 1, "wk"), (group + 1, 1, "wv")):
                matrix = weight[f"attention.qkv_linear.{name}"].reshape(heads, size, head_dim, -1)
                if name != "wv":
                    matrix = _interleave(matrix, dim=2)
                torch.mul(matrix, norm, out=layer.qkv[:, first : first + size])
            # the softmax scale goes with the queries
            layer.qk_norm[:group] = _interleave(weight["attention.q_norm"], dim=0) * head_dim**-0.5
            layer.qk_norm[group] = _interleave(weight["attention.k_norm"], dim=0)
            layer.output.copy_(weight["attention.wo"])
            norm = weight["ffn_norm"]
            torch.mul(weight["feed_forward.w3"], norm, out=layer.up_gate[: self.shape.hidden_dim])
            torch.mul(weight["feed_forward.w1"], norm, out=layer.up_gate[self.shape.hidden_dim :])
            layer.down.copy_(weight["feed_forward.w2"])
        self._embedding.copy_(named["tok_embeddings.weight"])
        head = self._embedding if self.shape.tied else named["lm_head.weight"]
        torch.mul(head, named["norm.weight"], out=self._head)

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], prompt_of_lane: Sequence[int], first_lane: int
    ) -> torch.Tensor:
        """Run prompts through the model, each once, and fill lanes with their keys and values.

        Args:
            prompts: token ids.
            prompt_of_lane: for each lane from `first_lane` on, which prompt it holds: 0, 0, 0, 1, 1 …

        Returns:
            logits after the last token of each prompt, float32 `[prompts, vocabulary]`.
        """
        shape, group = self.shape, self.group
        count, longest = len(prompts), max(map(len, prompts))
        tokens = np.zeros((count, longest), dtype=np.int64)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        source = torch.tensor(prompt_of_lane)
        lanes = slice(first_lane, first_lane + len(prompt_of_lane))
        rotation = self._rotation[:longest].repeat(count, 1)[:, None, None]
        x = self._embedding[torch.from_numpy(tokens).view(-1)]
        for i, layer in enumerate(self._layers):
            qkv = self._qkv(layer, x, rotation).view(
                count, longest, shape.n_kv_heads, group + 2, shape.head_dim
            )
            query = qkv[..., :group, :].flatten(2, 3).transpose(1, 2)
            key, value = qkv[..., group, :].transpose(1, 2), qkv[..., group + 1, :].transpose(1, 2)
            self._cache[i, 0, lanes, :, :longest] = key[source]
            self._cache[i, 1, lanes, :, :longest] = value[source]
            # right padding and causality: no real token sees a padding token
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=1.0, enable_gqa=True
            )
            attended = attended.transpose(1, 2).reshape(count * longest, -1)
            x = self._feed_forward(layer, torch.addmm(x, attended, layer.output_in))
        return self._logits(x.view(count, longest, -1)[torch.arange(count), last])

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        """One token further in lanes 0 … rows - 1.

        Args:
            tokens: int64 `[rows]`, the last token of each lane.
            positions: int64 `[rows]`, where it stands.
            spans: cover the lanes in order; each length exceeds the positions of its lanes.

        Returns:
            logits, float32 `[rows, vocabulary]`.
        """
        shape, group, rows = self.shape, self.group, tokens.shape[0]
        kv_heads, head_dim = shape.n_kv_heads, shape.head_dim
        rotation = self._rotation[positions][:, None, None]
        written = (self._lane_rows[:rows] + positions[:, None]).view(-1)
        attends = [
            (
                slice(span.start * kv_heads, span.stop * kv_heads),
                span.length,
                self._bias(positions[span.start : span.stop], span.length),
            )
            for span in spans
        ]
        attended = torch.empty(rows * kv_heads, group, head_dim)
        x = self._embedding[tokens]
        for layer in self._layers:
            qkv = self._qkv(layer, x, rotation).view(rows * kv_heads, group + 2, head_dim)
            layer.key_rows.index_copy_(0, written, qkv[:, group])
            layer.value_rows.index_copy_(0, written, qkv[:, group + 1])
            for part, length, bias in attends:
                scores = torch.baddbmm(bias, qkv[part, :group], layer.keys[part, :length].transpose(1, 2))
                torch.softmax(scores, -1, out=scores)
                torch.bmm(scores, layer.values[part, :length], out=attended[part])
            x = self._feed_forward(layer, torch.addmm(x, attended.view(rows, -1), layer.output_in))
        return self._logits(x)

    @torch.inference_mode()
    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` positions of lanes to other lanes, all reads before all writes."""
        if len(sources) == 1:
            self._cache[:, :, targets[0], :, :length] = self._cache[:, :, sources[0], :, :length]
        else:
            self._cache[:, :, list(targets), :, :length] = self._cache[:, :, list(sources), :, :length]

    def _bias(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """0 where a lane attends and -inf elsewhere, `[lanes * kv_heads, 1, length]`."""
        positions = positions.repeat_interleave(self.shape.n_kv_heads)[:, None, None]
        return torch.zeros(positions.shape[0], 1, length).masked_fill_(
            self._column[:length] > positions, float("-inf")
        )

    def _qkv(self, layer: _Layer, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Normed and rotated queries and keys beside the values: `[rows, kv_heads, group + 2, head_dim]`."""
        shape, group = self.shape, self.group
        qkv = torch.mm(self._normed(x), layer.qkv_in)
        qkv = qkv.view(-1, shape.n_kv_heads, group + 2, shape.head_dim)
        qk = qkv[:, :, : group + 1]
        normed = self._normed(qk).mul_(layer.qk_norm)
        torch.mul(_complex(normed), rotation, out=_complex(qk))
        return qkv

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.mm(self._normed(x), layer.up_gate_in)
        up, gate = hidden.chunk(2, -1)
        up.mul_(gate)
        # silu(gate) * up = (up * gate) * sigmoid(gate), which is glu
        return torch.addmm(x, F.glu(hidden), layer.down_in)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(self._normed(x), self._head_in)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm without weight; F.rms_norm takes twice the time on small rows."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _rotation(shape: Architecture, positions: int) -> torch.Tensor:
    """Unit complex numbers that turn each pair at each position: complex64 `[positions, head_dim / 2]`.

    Angles are computed as TorchTitan's CosSinRoPE does, to be equal to the last bit.
    """
    half = shape.head_dim // 2
    frequency = 1.0 / (
        shape.rope_theta ** (torch.arange(0, shape.head_dim, 2)[:half].float() / shape.head_dim)
    )
    angle = torch.outer(torch.arange(positions, dtype=frequency.dtype), frequency)
    return torch.complex(angle.cos(), angle.sin())


def _interleave(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Element j of the first half, then element j of the second half, for each j."""
    return x.unflatten(dim, (2, -1)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _complex(x: torch.Tensor) -> torch.Tensor:
    """The last dimension as complex numbers, the same memory."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))
