"""The order of the data: a pure function of the seed and the position, without any state.

The samples of each epoch are put in a pseudo-random order by a Feistel network, which is a
bijection that can be asked for any element, in constant memory (M. Luby and C. Rackoff, "How to
construct pseudorandom permutations from pseudorandom functions", 1988). A domain that is no power
of four is reached by cycle walking (J. Black and P. Rogaway, "Ciphers with arbitrary finite
domains", 2002). The round function mixes with the constants of splitmix64 (G. Steele, D. Lea and
C. Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_ROUNDS = 6
# Positions whose samples are computed together; numpy is slow on the few of one batch.
_BLOCK = 4096
# Batches that group_by_length sorts together. More are more alike in length and less random.
_GROUPED_BATCHES = 64


class Permutation:
    """A pseudo-random order of the numbers below ``size``.

    Args:
        size: at least 1, below 2**62.
        key: any bytes; another key gives another order.
    """

    def __init__(self, size: int, key: bytes) -> None:
        self._size = np.uint64(size)
        self._half = np.uint64(max((max(size - 1, 1).bit_length() + 1) // 2, 1))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        digest = hashlib.blake2b(key, digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """The numbers at ``positions``, each in [0, size)."""
        values = self._encrypt(positions.astype(np.uint64))
        # What falls outside goes round again: it stays a bijection of the numbers below size.
        outside = np.flatnonzero(values >= self._size)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self._size]
        return values.astype(np.int64)

    def _encrypt(self, values: Words) -> Words:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        mixed: Words = (left << self._half) | right
        return mixed


def _mix(values: Words) -> Words:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = values ^ (values >> np.uint64(31))
    return mixed


class Sampler:
    """Which samples belong to which batch.

    Global batch ``s`` takes the positions [s·G, (s+1)·G) of an endless sequence in which one
    epoch, in its own order, follows the other. So the sequence never depends on the number of
    ranks, on the micro-batches, or on where a training was interrupted.

    Args:
        size: number of samples, at least 1.
        seed: of the order.
        global_batch_size: samples of one step, G.
        lengths: gives the lengths of samples; if set, batches get samples of about one length.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        global_batch_size: int,
        lengths: Callable[[Indices], npt.NDArray[Any]] | None = None,
    ) -> None:
        self.size = size
        self.seed = seed
        self.global_batch_size = global_batch_size
        self._lengths = lengths
        self._block_size = _GROUPED_BATCHES * global_batch_size if lengths else _BLOCK
        self._block = lru_cache(maxsize=4)(self._compute_block)

    def global_batch(self, step: int) -> Indices:
        """The samples of step ``step``, counted from 0. Shape (G,)."""
        start = step * self.global_batch_size
        return self._at(start, start + self.global_batch_size)

    def micro_batch(self, step: int, index: int, rank: int, world_size: int, size: int) -> Indices:
        """The part of a global batch that one forward pass of one rank takes. Shape (size,).

        Args:
            step: counted from 0.
            index: which forward pass of the step.
            rank, world_size: which data-parallel rank, of how many.
            size: samples of one forward pass; ``size · world_size`` divides G.
        """
        start = step * self.global_batch_size + (index * world_size + rank) * size
        return self._at(start, start + size)

    def _at(self, start: int, stop: int) -> Indices:
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.size)
            number, skip = divmod(offset, self._block_size)
            part = self._block(epoch, number)[skip : skip + stop - start]
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _compute_block(self, epoch: int, number: int) -> Indices:
        first = number * self._block_size
        positions = np.arange(first, min(first + self._block_size, self.size), dtype=np.int64)
        samples = Permutation(self.size, f"{self.seed}:{epoch}".encode())(positions)
        if self._lengths is not None:
            # The longest first: if memory does not suffice, it shows at once.
            samples = samples[np.argsort(-self._lengths(samples), kind="stable")]
        return samples
