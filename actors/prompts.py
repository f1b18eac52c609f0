"""Which prompt comes when, and the random numbers of its samples: both a pure function of the run's seed."""

from __future__ import annotations

import hashlib
import random
from functools import lru_cache


def sample_seed(seed: int, *path: object) -> int:
    """A 63-bit seed for the sample named by `path`; different paths never share a stream (BLAKE2b)."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def prompt_index(position: int, size: int | None, seed: int) -> int:
    """The position-th training prompt: in order for an endless task, else a seeded shuffle of each epoch."""
    if size is None:
        return position
    epoch, offset = divmod(position, size)
    return _epoch_order(size, seed, epoch)[offset]


@lru_cache(maxsize=2)
def _epoch_order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed} epoch {epoch}").shuffle(order)
    return order
