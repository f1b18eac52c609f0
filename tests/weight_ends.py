"""The two ends of a broadcast without actors: one learner rank of whole tensors, readers in any process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from meshrl.weights.arena import Arena, WeightsConfig, WeightSource
from meshrl.weights.host import HostProcess
from meshrl.weights.layout import Layout
from meshrl.weights.plan import plan
from meshrl.weights.tensors import layout_of
from meshrl.weights.transfer import Subscriber

Target = Callable[[Layout], Layout]


@dataclass(frozen=True)
class Offered:
    """What a reader in another process needs."""

    held: Layout
    needed: Layout
    source: WeightSource

    def subscriber(self, rank: int = 0) -> Subscriber:
        return Subscriber(plan(self.held, self.needed), rank, [self.source])


def everything(source: Layout) -> Layout:
    return source.whole()


def publisher(
    named: Mapping[str, Tensor],
    target: Target = everything,
    *,
    transport: str = "memfd",
    config: WeightsConfig | None = None,
) -> tuple[Arena, Offered]:
    """An arena for these tensors, and what its readers need."""
    held = layout_of(named)
    needed = target(held)
    arena = Arena(named, plan(held, needed), 0, [HostProcess.current()] * needed.ranks, config)
    return arena, Offered(held, needed, arena.offer(transport))
