"""Attention over packed rows: many documents end to end in one row, none sees another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.protocols.module import Module

BUCKET_GROWTH = 1.5
"""Documents of one bucket differ in length by less than this factor, which bounds the padding."""
BUCKET_MINIMUM_TOKENS = 16
"""Documents up to this length share one bucket: for such short ones a call costs more than the padding."""


@dataclass(frozen=True)
class Bucket:
    """Documents of similar length, as one padded batch."""

    gather: Tensor
    """int64 `[documents, longest]`: position in the packed row of each token; padding repeats the
    document's last token."""


@dataclass(frozen=True)
class Documents:
    """How a packed row is divided. Made once for each micro-batch, used by every layer."""

    buckets: tuple[Bucket, ...]
    scatter: Tensor
    """int64 `[tokens]`: where each token of the row lies in the buckets' padded batches, laid end to end."""
    document: Tensor
    """int64 `[tokens]`: which document each token belongs to, from 0."""
    positions: Tensor
    """int64 `[1, tokens]`: position of each token within its document, for the rotary embedding."""

    @staticmethod
    def of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Documents:
        """Divide a row of `sum(lengths)` tokens into documents of these lengths, in order.

        >>> Documents.of([3, 2]).positions
        tensor([[0, 1, 2, 0, 1]])
        """
        length = torch.tensor(list(lengths), dtype=torch.int64)
        if length.numel() == 0 or int(length.min()) < 1:
            raise ValueError(
                f"document lengths {list(lengths)}: at least one document, each of at least one token"
            )
        start = length.cumsum(0) - length
        document = torch.repeat_interleave(torch.arange(length.numel()), length)
        position = torch.arange(int(length.sum())) - start[document]
        buckets, scatter, offset = [], torch.empty_like(position), 0
        for members in _similar(length.tolist()):
            chosen = torch.tensor(members)
            longest = int(length[chosen].max())
            row = torch.minimum(torch.arange(longest), length[chosen, None] - 1)
            gather = start[chosen, None] + row
            real = torch.arange(longest) < length[chosen, None]
            scatter[gather[real]] = offset + torch.arange(gather.numel()).view_as(gather)[real]
            offset += gather.numel()
            buckets.append(Bucket(gather.to(device)))
        return Documents(tuple(buckets), scatter.to(device), document.to(device), position[None].to(device))


def _similar(lengths: Sequence[int]) -> list[list[int]]:
    """Documents in groups, longest first; none is shorter than its group's longest by `BUCKET_GROWTH`."""
    groups: list[list[int]] = []
    floor = 0.0
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[document]
        if not groups or longest < floor:
            groups.append([])
            floor = 0 if longest <= BUCKET_MINIMUM_TOKENS else longest / BUCKET_GROWTH
        groups[-1].append(document)
    return groups


class PackedAttention(Module):
    """Causal attention within each document; TorchTitan's `inner_attention` contract.

    A packed row's documents are gathered into padded batches by length. Padding comes after the real tokens,
    where a causal query never looks, so no mask is needed; its outputs are not gathered back, so no gradient
    flows through it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        q_BLNH: Tensor,  # noqa: N803
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Documents | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: object,
    ) -> Tensor:
        """Attend.

        Args:
            q_BLNH, k_BLNH, v_BLNH: `[rows, tokens, heads, head_dim]`.
            attention_masks: division of the one packed row; None: each row is one sequence.

        Returns:
            `[rows, tokens, query heads, head_dim]`.
        """
        if attention_masks is None:
            return _causal(q_BLNH, k_BLNH, v_BLNH, scale, enable_gqa)
        if q_BLNH.shape[0] != 1:
            raise ValueError(f"packed attention takes one row, not {q_BLNH.shape[0]}")
        q, k, v = q_BLNH[0], k_BLNH[0], v_BLNH[0]
        padded = [
            _causal(_take(q, at), _take(k, at), _take(v, at), scale, enable_gqa).flatten(0, 1)
            for at in (bucket.gather for bucket in attention_masks.buckets)
        ]
        return _take(torch.cat(padded), attention_masks.scatter)[None]


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """`rows[index]`; its backward adds whole rows, faster on a CPU than that of advanced indexing."""
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float | None, enable_gqa: bool) -> Tensor:
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        scale=scale,
        is_causal=True,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)
