"""The order in which rows are asked, and the digest of keys."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from hpcml.infer import order


def ordered(texts: list[str]) -> list[int]:
    levels = [[order.beginnings(text)[level] for text in texts] for level in range(order.LEVELS)]
    return order.by_prefix([np.array(level, np.uint64) for level in levels]).tolist()


documents = st.sampled_from(["a" * 300, "b" * 300, "a" * 300 + "c" * 1000, "d" * 5000, ""])


@given(st.lists(st.tuples(documents, st.text(max_size=5))))
def test_rows_with_a_common_beginning_are_neighbours(rows: list[tuple[str, str]]) -> None:
    texts = [document + question for document, question in rows]
    sequence = ordered(texts)
    assert sorted(sequence) == list(range(len(texts)))
    for length in (256, 1024, 4096):
        beginnings = [texts[row][:length] for row in sequence if len(texts[row]) >= length]
        runs = sum(a != b for a, b in itertools.pairwise(beginnings))
        assert runs == max(0, len(set(beginnings)) - 1)


@given(st.lists(st.text(max_size=20)))
def test_without_common_beginnings_the_order_stays(texts: list[str]) -> None:
    assert ordered(texts) == list(range(len(texts)))


@given(st.lists(st.integers(0, 10_000)))
def test_rows_of_like_length_are_neighbours(lengths: list[int]) -> None:
    sequence = order.by_length(np.array(lengths, np.int64)).tolist()
    assert sorted(sequence) == list(range(len(lengths)))
    steps = [lengths[row] // 64 for row in sequence]
    assert steps == sorted(steps, reverse=True)


def digest(pairs: list[tuple[int, str]]) -> int:
    numbers = pa.array([number for number, _ in pairs], pa.int64())
    return order.keys_digest(numbers, pa.array([key for _, key in pairs], pa.large_string()))


keys = st.lists(st.tuples(st.integers(0, 2**40), st.text(max_size=10)), unique=True)


@given(keys, st.randoms(), st.integers(0, 20))
def test_the_digest_of_keys_is_the_sum_of_its_pieces(pairs, random, cut) -> None:  # type: ignore[no-untyped-def]
    whole = digest(pairs)
    shuffled = random.sample(pairs, len(pairs))
    assert (digest(shuffled[:cut]) + digest(shuffled[cut:])) % 2**64 == whole


@given(keys.filter(bool), st.data())
def test_the_digest_of_keys_notices_a_change(pairs, data) -> None:  # type: ignore[no-untyped-def]
    place = data.draw(st.integers(0, len(pairs) - 1))
    number, key = pairs[place]
    other = data.draw(st.tuples(st.integers(0, 2**40), st.text(max_size=10)))
    if other != (number, key):
        assert digest([*pairs[:place], other, *pairs[place + 1 :]]) != digest(pairs)
    assert digest(pairs[:place] + pairs[place + 1 :]) != digest(pairs)


def test_the_digest_of_a_slice() -> None:
    numbers = pa.array(range(10), pa.int64())
    texts = pa.array([f"key {number}" for number in range(10)], pa.large_string())
    parts = [order.keys_digest(numbers[a:b], texts[a:b]) for a, b in ((0, 3), (3, 4), (4, 10))]
    assert sum(parts) % 2**64 == order.keys_digest(numbers, texts)
