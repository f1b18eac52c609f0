"""A controller that counts what passes through it: `python controller_bytes.py MAX_TOKENS` prints bytes per step.

A process of its own, since Monarch looks its pickling functions up once.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile

import monarch._src.actor.pickle as pickling

from meshrl.actors.reward import RewardConfig
from meshrl.actors.rollouts import RolloutsConfig
from meshrl.programs.config import EvaluationConfig
from meshrl.programs.grpo import GRPOConfig, grpo
from meshrl.programs.sft import WarmUpConfig
from meshrl.rollout import SamplingParams
from meshrl.run import launch

count = {"messages": 0, "bytes": 0}
dump, loads = pickling.torch_dump, pickling.torch_loads


def counting_dump(obj, f):
    before = len(f)
    result = dump(obj, f)
    count["messages"] += 1
    count["bytes"] += len(f) - before
    return result


def counting_loads(data):
    count["messages"] += 1
    count["bytes"] += len(data)
    return loads(data)


pickling.torch_dump, pickling.torch_loads = counting_dump, counting_loads


def even(rollout) -> float:
    """Rewards that differ within groups, whatever the responses are."""
    return float(rollout.id % 2)


async def measure(max_tokens: int) -> dict[str, float]:
    config = GRPOConfig(
        steps=6,
        sampling=SamplingParams(max_tokens=max_tokens),
        rollouts=RolloutsConfig(prompts_per_step=4, group_size=4),
        warm_up=WarmUpConfig(steps=0),
        evaluation=EvaluationConfig(prompts=0),
        reward=RewardConfig(function=even),
        samples_every=0,
    )
    seen, tokens = [], 0.0
    with tempfile.TemporaryDirectory() as directory:
        async for report in launch(grpo, config, directory=directory):
            seen.append(dict(count))
            tokens = max(tokens, report.metrics.get("response_tokens", 0.0))
    # Between the second step and the last but one: neither start nor end.
    steps = len(seen) - 3
    return {name: (seen[-2][name] - seen[1][name]) / steps for name in count} | {"tokens": tokens}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure(int(sys.argv[1])))))
