"""What learners of several tests share: a module of weights that is trained, and can be told whole."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from meshrl.weights.tensors import weights_of
from meshrl.weights.workers import PublishesWeights
from meshrl.worker import Worker, endpoint


class ModuleLearner(PublishesWeights, Worker):
    """Publishes `module`, which a subclass makes, sharded as it likes."""

    module: torch.nn.Module

    @endpoint
    async def setup(self, store: str) -> None:
        dist.init_process_group(
            "gloo", store=FileStore(store, self.world_size), rank=self.rank, world_size=self.world_size
        )

    def weight_tensors(self) -> Mapping[str, Tensor]:
        return weights_of(self.module)

    @endpoint
    async def train(self) -> None:
        """Change every weight."""
        with torch.no_grad():
            for tensor in self.weight_tensors().values():
                tensor.mul_(1.25).add_(0.125)

    @endpoint
    async def full_weights(self) -> dict[str, Tensor]:
        named = self.weight_tensors().items()
        return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named}
