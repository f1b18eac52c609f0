"""The learner on real meshes: whatever the layout of ranks, the same loss, gradient and weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from learner_workers import ShowsGradients
from safetensors.torch import load_file
from torch import Tensor

from meshrl.actors.learner import LearnerConfig, LearnerSetup, OptimizerConfig
from meshrl.actors.models import ModelConfig
from meshrl.losses import SequenceMean, SequenceSum, cross_entropy
from meshrl.mesh import RoleMesh
from meshrl.programs.tasks import ArithmeticTask
from meshrl.session import Session

LAYOUTS = {"FSDP2": (2, 1), "TP2": (2, 2), "FSDP2xTP2": (4, 2)}
"""Processes, and tensor parallelism."""
LOSSES = {
    "token mean": cross_entropy(),
    "sequence mean": cross_entropy(SequenceMean()),
    "sequence sum": cross_entropy(SequenceSum(5.0)),
}
MODEL = ModelConfig("tiny-0.4m", max_tokens=64)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as started:
        yield started


async def spawn(session: Session, procs: int, config: LearnerConfig, name: str) -> RoleMesh:
    mesh = await session.spawn(ShowsGradients, procs=procs, name=name)
    store = await mesh.call_rank("open_store")
    await mesh.call("setup", LearnerSetup(config, MODEL, ArithmeticTask(), 3, store))
    return mesh


Answer = tuple[dict[str, float], dict[str, Tensor]]


@pytest.fixture(scope="module")
def alone(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """One process, all in one micro-batch; and its weights after one step, as exported."""

    async def measure() -> dict[str, Answer]:
        async with Session() as session:
            mesh = await spawn(session, 1, LearnerConfig(max_gradient_norm=0), "one")
            answers = {name: (await mesh.call("gradients", loss, 0, 7))[0] for name, loss in LOSSES.items()}
            await mesh.call("export", directory := tmp_path_factory.mktemp("alone") / "final")
            return {**answers, "exported": ({}, load_file(directory / "model.safetensors"))}

    return runner.run(measure())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_loss_and_export_equal_one_process(
    layout: str, runner: asyncio.Runner, alone: dict[str, Answer], tmp_path: Path
) -> None:
    procs, tensor_parallel = LAYOUTS[layout]
    # Seven rows in micro-batches of at most two: with two data-parallel ranks one of eight is empty.
    config = LearnerConfig(tensor_parallel=tensor_parallel, max_gradient_norm=0, microbatch_tokens=20)

    async def measure() -> list[tuple[str, list[Answer]]]:
        async with Session() as session:
            mesh = await spawn(session, procs, config, "several")
            answers = [(name, await mesh.call("gradients", loss, 0, 7)) for name, loss in LOSSES.items()]
            await mesh.call("export", tmp_path / "final")
            return answers

    for name, ranks in runner.run(measure()):
        metrics, gradients = alone[name]
        for rank_metrics, rank_gradients in ranks:
            assert rank_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-5)
            assert rank_metrics["entropy"] == pytest.approx(metrics["entropy"], rel=1e-5)
            assert rank_metrics["gradient_norm"] == pytest.approx(metrics["gradient_norm"], rel=1e-5)
            assert set(rank_gradients) == set(gradients)
            for parameter, gradient in gradients.items():
                error = (rank_gradients[parameter] - gradient).abs().max() / gradient.abs().max()
                assert error <= 1e-5, (name, parameter, float(error))
    exported = load_file(tmp_path / "final" / "model.safetensors")
    for parameter, weight in alone["exported"][1].items():
        assert torch.equal(exported[parameter], weight), parameter


def test_saved_state_goes_on_bit_for_bit(runner: asyncio.Runner, tmp_path: Path) -> None:
    config = LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4))

    async def measure() -> list[dict[str, Tensor]]:
        found = []
        async with Session() as session:
            straight = await spawn(session, 1, config, "straight")
            resumed = await spawn(session, 1, config, "resumed")
            for step in range(4):
                if step == 2:
                    await straight.call("save", tmp_path / "state")
                await straight.call("supervised_step", cross_entropy(), 8 * step, 8)
            await resumed.call("load", tmp_path / "state")
            for step in (2, 3):
                await resumed.call("supervised_step", cross_entropy(), 8 * step, 8)
            for name, mesh in (("straight", straight), ("resumed", resumed)):
                await mesh.call("export", tmp_path / name)
                found.append(load_file(tmp_path / name / "model.safetensors"))
        return found

    straight, resumed = runner.run(measure())
    for parameter, weight in straight.items():
        assert torch.equal(resumed[parameter], weight), parameter
