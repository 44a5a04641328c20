"""Every task is in exactly one array, and the cap holds over all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcml.plan.arrays import split


@given(
    tasks=st.integers(1, 20_000),
    largest=st.integers(1, 5_000),
    max_running=st.none() | st.integers(1, 3_000),
)
def test_parts_cover_all_tasks_once_under_the_cap(
    tasks: int, largest: int, max_running: int | None
) -> None:
    parts = split(tasks, largest, max_running)
    assert [part.number for part in parts] == list(range(len(parts)))
    covered = 0
    for part in parts:
        assert part.offset == covered
        assert 1 <= part.tasks <= largest
        covered += part.tasks
    assert covered == tasks
    if max_running is None:
        assert all(part.max_running is None and part.after is None for part in parts)
        return
    # Parts that wait for each other never run together: count each lane by its widest part.
    lanes: dict[int, int] = {}
    lane_of: dict[int, int] = {}
    for part in parts:
        assert part.max_running is not None
        assert part.max_running >= 1
        lane = part.number if part.after is None else lane_of[part.after]
        lane_of[part.number] = lane
        lanes[lane] = max(lanes.get(lane, 0), part.max_running)
    assert sum(lanes.values()) <= max_running
    if len(parts) <= max_running:
        assert sum(part.max_running or 0 for part in parts) == max_running


def test_the_limit_is_on_the_index() -> None:
    parts = split(1500, 1001, None)
    assert [(part.offset, part.indices) for part in parts] == [(0, "0-1000"), (1001, "0-498")]


def test_a_cap_is_shared_out() -> None:
    assert [part.indices for part in split(2500, 1001, 50)] == [
        "0-1000%20",
        "0-1000%20",
        "0-497%10",
    ]
    assert [(p.indices, p.after) for p in split(5, 2, 1)] == [
        ("0-1%1", None),
        ("0-1%1", 0),
        ("0%1", 1),
    ]
