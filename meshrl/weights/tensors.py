"""The layout of the tensors that a rank has: whole ones, or shards of DTensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshrl.weights.errors import LayoutError
from meshrl.weights.layout import Box, Layout, Parameter


def layout_of(named: Mapping[str, Tensor]) -> Layout:
    """The layout of one rank's tensors; one box a name, of which a sharded rank may hold an empty one.

    Args:
        named: parameters and buffers by name, whole tensors or DTensors, of any strides. Names that share
            memory (tied) stay two parameters.

    Raises:
        LayoutError: a DTensor is a partial sum, or its shard is not one box.
    """
    parameters = {}
    for name, tensor in named.items():
        shape = tuple(tensor.shape)
        box = _box_of_shard(name, tensor) if isinstance(tensor, DTensor) else Box.whole(shape)
        parameters[name] = Parameter(shape, tensor.dtype, (box,))
    return Layout(parameters, 1)


def weights_of(module: torch.nn.Module) -> dict[str, Tensor]:
    """What of a module must travel: its parameters, and the buffers that a checkpoint of it would hold.

    The live tensors themselves: detaching a DTensor takes longer than copying a small one.
    """
    computed = {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    buffers = ((name, tensor) for name, tensor in module.named_buffers() if name not in computed)
    return dict([*module.named_parameters(), *buffers])


def signature(named: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    """What decides the layout of these tensors on this rank, found much faster than the layout itself."""
    with torch.no_grad():
        return _signature(named)


def _signature(named: Mapping[str, Tensor]) -> list[tuple[object, ...]]:
    return [
        (
            name,
            tensor.shape,
            tensor.dtype,
            local(tensor).shape,
            tensor.placements if isinstance(tensor, DTensor) else (),
        )
        for name, tensor in named.items()
    ]


def difference(before: Layout, now: Layout) -> str:
    """The first thing that two layouts of one rank do not share, in words."""
    for name in before.parameters.keys() | now.parameters.keys():
        old, new = before.parameters.get(name), now.parameters.get(name)
        if old != new:
            return f"{name} was {_described(old)} and is {_described(new)}"
    return "the order of the parameters"


def _described(held: Parameter | None) -> str:
    if held is None:
        return "absent"
    (box,) = held.boxes
    assert box is not None
    return f"{held.dtype} {held.shape}, of which {box.shape} from {box.offset} here"


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, without its history."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not torch.is_grad_enabled():
        return tensor.to_local()
    with torch.no_grad():  # 50 times faster than keeping a history and dropping it
        return tensor.to_local()


def _box_of_shard(name: str, tensor: DTensor) -> Box:
    """Box of this rank's shard, after checking that the placement says what the shard is."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise LayoutError(
            f"{name} is a partial sum ({tensor.placements}): only sharded or replicated weights travel"
        )
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    held = tuple(local(tensor).shape)
    if tuple(shape) != held:
        raise LayoutError(f"{name} should be a shard {tuple(shape)} by {tensor.placements} but holds {held}")
    return Box(tuple(int(o) for o in offset), held)
