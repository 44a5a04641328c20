"""The generators of random numbers: seeding them, and carrying them over an interruption."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def seed_rank(seed: int, rank: int) -> None:
    """Seed every generator; each rank has random numbers of its own (for dropout)."""
    digest = hashlib.blake2b(f"{seed}:{rank}".encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little")
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)  # of the GPUs too


def random_state() -> dict[str, Any]:
    """The state of every generator, of types that ``torch.load(weights_only=True)`` reads."""
    version, internal, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Go on where :func:`random_state` was called."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
