"""A learner or a generator as a process of its own without Monarch: endpoints called over its standard streams.

Run as `python weight_peer.py learner|generator`, anywhere: in another network namespace too.
"""

import asyncio
import base64
import inspect
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from meshrl.weights.layout import Layout
from meshrl.weights.workers import PublishesWeights, ReceivesWeights
from meshrl.worker import Worker, endpoint


class Learner(PublishesWeights, Worker):
    """Weights of every dtype that models have."""

    @endpoint
    async def setup(self, setup: None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.named = {
            "matrix": torch.randn(300, 200, generator=generator),
            "transposed": torch.randn(64, 128, generator=generator).T,
            "half": torch.randn(33, 7, generator=generator).bfloat16(),
            "norm": torch.randn(200, generator=generator),
        }

    def weight_tensors(self) -> Mapping[str, Tensor]:
        return self.named

    @endpoint
    async def weights(self) -> dict[str, Tensor]:
        return self.named


class Generator(ReceivesWeights, Worker):
    """Takes half of the matrix and keeps a copy."""

    @endpoint
    async def setup(self, setup: None) -> None:
        pass

    def weights_target(self, source: Layout) -> Layout:
        return source.split({"matrix": 1}, ranks=2).of_rank(1)

    async def swap_weights(self, named: Mapping[str, Tensor], version: int) -> None:
        self.used = {name: tensor.clone() for name, tensor in named.items()}

    @endpoint
    async def weights(self) -> dict[str, Tensor]:
        return self.used


async def serve(role: str) -> None:
    """Answer calls until the input ends."""
    kind = {"learner": Learner, "generator": Generator}[role]
    worker = kind()
    worker.role, worker.replica, worker.replicas, worker.rank, worker.world_size = role, 0, 1, 0, 1
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints does not disturb the answers
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, args = decoded(line)
        try:
            method: Any = kind.__dict__.get(name) or getattr(kind, name)
            answer: Any = await inspect.unwrap(method._method)(worker, *args)
        except Exception as error:
            answer = error
        print(encoded(answer), file=answers, flush=True)


def encoded(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def decoded(line: str) -> Any:
    return pickle.loads(base64.b64decode(line))


if __name__ == "__main__":
    # By its importable name, so that what it sends can be read elsewhere.
    import weight_peer

    asyncio.run(weight_peer.serve(sys.argv[1]))
