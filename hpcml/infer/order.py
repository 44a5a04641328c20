"""The order in which rows are asked, so that those with a common beginning follow one another."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# Lengths, in characters, at which beginnings are compared. The first is more than most questions
# have in common by chance, and more than a block of an engine's prefix cache.
_LENGTHS = (256, 1024, 4096)
# Odd numbers without a pattern: the fractions of the golden ratio and of the square root of 2.
_ROW = np.uint64(0x9E3779B97F4A7C15)
_FACTOR = np.uint64(0x6A09E667F3BCC909)
LEVELS = len(_LENGTHS)
# Rows whose lengths differ by less are of the same length.
_LENGTH_STEP = 64

Array = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]


def digest64(text: str) -> int:
    """64 bits of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def keys_digest(rows: pa.Array, keys: pa.Array) -> int:
    """A digest of numbers and keys that is a sum over the rows, modulo 2**64.

    Whatever way rows are divided up, the sum of the digests of the pieces is that of the whole.

    Args:
        rows: int64.
        keys: large_string without nulls.
    """
    offsets = np.frombuffer(keys.buffers()[1], np.int64)[keys.offset : keys.offset + len(keys) + 1]
    data = keys.buffers()[2]
    first = int(offsets[0]) if len(offsets) else 0
    last = int(offsets[-1]) if len(offsets) else 0
    symbols = np.frombuffer(data, np.uint8)[first:last] if data is not None else np.empty(0, "u1")
    lengths = np.diff(offsets)
    # Each byte counts times a factor of its place in the key (a polynomial modulo 2**64).
    places = np.arange(len(symbols)) - np.repeat(offsets[:-1] - first, lengths)
    factors = np.cumprod(np.full(int(lengths.max(initial=0)) + 1, _FACTOR, np.uint64))
    weighted = (symbols.astype(np.uint64) + np.uint64(1)) * factors[places]
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)])
    hashes = total[offsets[1:] - first] - total[offsets[:-1] - first]
    numbers = rows.to_numpy().astype(np.uint64)
    mixed = (hashes + (numbers + np.uint64(1)) * _ROW) * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    return int((mixed * _ROW).sum(dtype=np.uint64))


def beginnings(text: str) -> tuple[int, ...]:
    """A digest of the beginning of ``text`` at each level; 0 where it is shorter."""
    size = len(text)
    return tuple(digest64(text[:length]) if size >= length else 0 for length in _LENGTHS)


def by_prefix(levels: list[Hashes]) -> Array:
    """Row numbers such that rows with a common beginning are neighbours, at every level.

    Groups come in the order of their first row, so that rows without anything in common, or with
    all in common, stay in the order of the input.

    Args:
        levels: for each level the digests of all rows; 0 has nothing in common with others.
    """
    count = len(levels[0])
    numbers = np.arange(count, dtype=np.int64)
    firsts = []
    for digests in levels:
        _, first, group = np.unique(digests, return_index=True, return_inverse=True)
        firsts.append(np.where(digests == 0, numbers, first[group]))
    return np.lexsort((numbers, *reversed(firsts))).astype(np.int64)


def by_length(lengths: Array) -> Array:
    """Row numbers such that rows of like length are neighbours, the longest first.

    For engines that pad the rows of a batch to the longest one. The longest first, so that what
    does not fit into memory shows at once.
    """
    numbers = np.arange(len(lengths), dtype=np.int64)
    return np.lexsort((numbers, -(lengths // _LENGTH_STEP))).astype(np.int64)
