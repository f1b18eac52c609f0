"""Log-probabilities and entropy from logits whose vocabulary may be spread over ranks; logits are never gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def token_logprobs(logits: Tensor, token_ids: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each token under softmax(logits / temperature), and the entropy of that distribution.

    With tensor parallelism each rank works on its part of the vocabulary; two all-reduces of a few numbers per
    token join them, whatever the size of the vocabulary (Megatron-LM's vocabulary-parallel cross-entropy).

    Args:
        logits: `[tokens, vocabulary]`; plain, or a DTensor sharded by vocabulary.
        token_ids: int64 `[tokens]`, the same on every rank.

    Returns:
        float32 `[tokens]` with gradient to the logits, and float32 `[tokens]` without.
    """
    if not isinstance(logits, DTensor):
        return _TokenLogprobs.apply(logits, token_ids, 0, None, temperature)
    if logits.device_mesh.ndim != 1:
        raise ValueError(
            f"logits lie on a mesh of {logits.device_mesh.ndim} dimensions, wanted the vocabulary's one"
        )
    _, offset = compute_local_shape_and_global_offset(logits.shape, logits.device_mesh, logits.placements)
    group = logits.device_mesh.get_group()
    return _TokenLogprobs.apply(logits.to_local(), token_ids, offset[-1], group, temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        token_ids: Tensor,
        first: int,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        scores = logits.float() / temperature
        # Softmax does not change when all scores move together; the largest keeps exp within range.
        largest = scores.amax(-1)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        scores = scores - largest[:, None]
        exponentials = scores.exp()
        place = token_ids - first
        mine = (place >= 0) & (place < logits.shape[-1])
        place = torch.where(mine, place, 0)
        own = torch.where(mine, scores.gather(-1, place[:, None])[:, 0], 0.0)
        sums = torch.stack([exponentials.sum(-1), own, (exponentials * scores).sum(-1)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        total, chosen, weighted = sums
        log_total = total.log()
        ctx.save_for_backward(exponentials.div_(total[:, None]), place, mine)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        entropy = log_total - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, place, mine = ctx.saved_tensors
        gradient = gradients[0] / ctx.temperature
        result = probabilities * -gradient[:, None]
        result.scatter_add_(-1, place[:, None], torch.where(mine, gradient, 0.0)[:, None])
        return result.to(ctx.dtype), None, None, None, None
