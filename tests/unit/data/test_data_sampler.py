from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.data.sampler import Permutation, Sampler


@given(size=st.integers(1, 5000), key=st.binary(max_size=8))
def test_a_permutation_has_each_number_once(size: int, key: bytes) -> None:
    order = Permutation(size, key)(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_a_permutation_of_a_large_domain_needs_no_memory() -> None:
    size = 10**15
    numbers = Permutation(size, b"key")(np.arange(1000))
    assert len(set(numbers.tolist())) == 1000
    assert numbers.min() >= 0
    assert numbers.max() < size


def test_a_permutation_looks_random() -> None:
    size = 20_000
    order = Permutation(size, b"key")(np.arange(size))
    steps = np.diff(order)
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.03
    assert np.count_nonzero(np.abs(steps) <= 2) < 20
    halves = np.bincount(order[: size // 2] // (size // 10), minlength=10)
    assert halves.min() > 0.9 * size / 20


def test_another_key_gives_another_order() -> None:
    positions = np.arange(1000)
    assert not np.array_equal(
        Permutation(1000, b"a")(positions), Permutation(1000, b"b")(positions)
    )


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("world_size", "size"), [(1, 12), (1, 4), (2, 3), (3, 2), (4, 3)])
def test_the_sequence_does_not_depend_on_the_layout(
    grouped: bool, world_size: int, size: int
) -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1001)
    sampler = Sampler(1001, 5, 12, (lambda chosen: lengths[chosen]) if grouped else None)
    for step in (0, 1, 83, 84, 200):
        whole = sampler.global_batch(step)
        passes = 12 // (world_size * size)
        parts = [
            sampler.micro_batch(step, index, rank, world_size, size)
            for index in range(passes)
            for rank in range(world_size)
        ]
        assert np.array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("grouped", [False, True])
def test_each_epoch_has_each_sample_once_in_its_own_order(grouped: bool) -> None:
    size, batch = 6000, 7
    sampler = Sampler(size, 3, batch, (lambda chosen: chosen % 50) if grouped else None)
    sequence = np.concatenate([sampler.global_batch(step) for step in range(2 * size // batch + 2)])
    first, second = sequence[:size], sequence[size : 2 * size]
    assert np.array_equal(np.sort(first), np.arange(size))
    assert np.array_equal(np.sort(second), np.arange(size))
    assert not np.array_equal(first, second)


def test_it_starts_anywhere_with_the_same_result() -> None:
    walked = Sampler(1000, 1, 8)
    batches = [walked.global_batch(step) for step in range(300)]
    assert np.array_equal(Sampler(1000, 1, 8).global_batch(299), batches[299])


def test_the_seed_decides() -> None:
    one, other = (Sampler(1000, seed, 8).global_batch(0) for seed in (0, 1))
    assert not np.array_equal(one, other)


def test_grouped_batches_have_samples_of_about_one_length() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 4096)

    def spread(sampler: Sampler) -> float:
        return float(np.mean([np.ptp(lengths[sampler.global_batch(s)]) for s in range(256)]))

    grouped = Sampler(4096, 0, 8, lambda chosen: lengths[chosen])
    assert spread(grouped) < 0.1 * spread(Sampler(4096, 0, 8))
