"""Intervals of checkpoints, and trainings in jobs of limited lengths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.interval import automatic_interval, optimal_interval
from hpcml.plan.training.backfill import (
    Costs,
    segments,
)
from hpcml.train.interval import CheckpointClock


def lost(interval: float, save: float, mtbf: float) -> float:
    """The time that a training takes, as a multiple of what it would take without checkpoints and
    failures: Daly 2006, equation 20, with a restart that takes no time.
    """
    return mtbf * (math.exp((interval + save) / mtbf) - 1) / interval


@given(st.floats(0.01, 3600), st.floats(600, 1e8))
def test_no_other_interval_is_much_better(save: float, mtbf: float) -> None:
    interval = optimal_interval(save, mtbf)
    assert interval > 0
    if save < mtbf / 2:
        best = min(lost(interval * 1.05**power, save, mtbf) for power in range(-30, 31))
        assert lost(interval, save, mtbf) <= best * 1.001


def test_short_saves_follow_young() -> None:
    assert optimal_interval(1, 1e6) == pytest.approx(math.sqrt(2e6), rel=1e-3)
    assert optimal_interval(60, 1e7) == pytest.approx(math.sqrt(2 * 60 * 1e7), rel=3e-3)


def test_long_saves_follow_daly() -> None:
    """Young would be off: a save of 100 s, a failure each 1,000 s."""
    young = math.sqrt(2 * 100 * 1000)
    expected = young * (1 + math.sqrt(0.05) / 3 + 0.05 / 9) - 100
    assert optimal_interval(100, 1000) == pytest.approx(expected)
    assert optimal_interval(100, 1000) < 0.9 * young
    assert optimal_interval(5000, 1000) == 1000


@given(st.floats(0.001, 1e5), st.floats(600, 1e9))
def test_the_training_decides_in_the_same_way(save: float, mtbf: float) -> None:
    """It has the formula once more, since it runs where the plan is not."""
    clock = CheckpointClock(fixed=None, mtbf=mtbf, save=save, now=0)
    assert automatic_interval(save, mtbf) == pytest.approx(clock.interval)


COSTS = Costs(save=20, restore=10, best=0, interval=3000, mtbf=math.inf, lead=60, startup=50)


def test_a_job_by_hand() -> None:
    """Of 1,000 s: 50 start, 10 restore, 880 train, 20 save; the lead's other 40 are given back."""
    found = segments(1000, 8800, COSTS)
    assert found.links == 10
    assert found.lost == 80
    assert found.useful == pytest.approx(880 / 960)
    assert found.total == pytest.approx(9600)


def test_a_training_that_ends_in_one_job() -> None:
    found = segments(10_000, 900, COSTS)
    assert found.links == 1
    assert found.total == pytest.approx(50 + 900 * (1 + 20 / 3000))


def test_jobs_that_are_too_short() -> None:
    assert segments(100, 8800, COSTS).links is None
    assert segments(121, 8800, COSTS).links == 8800


def test_a_lead_that_is_too_short_loses_what_was_not_saved() -> None:
    slow = Costs(save=90, restore=10, best=0, interval=300, mtbf=math.inf, lead=60, startup=50)
    found = segments(3000, 10_000, slow)
    # 2,880 s between the restored checkpoint and the signal have 7 periodic saves.
    assert found.links == math.ceil(10_000 / (7 * 300))
    # None is complete: it would begin anew in each job.
    assert segments(400, 10_000, slow).links is None


@given(st.integers(300, 100_000), st.floats(1000, 1e6), st.floats(0, 50), st.floats(1e4, 1e9))
def test_longer_jobs_are_never_worse(
    length: int, training: float, save: float, mtbf: float
) -> None:
    interval = optimal_interval(max(save, 0.01), mtbf)
    costs = Costs(max(save, 0.01), save, interval, interval, mtbf, lead=60, startup=60)
    short, long = segments(length, training, costs), segments(2 * length, training, costs)
    assert 0 <= short.useful < 1
    if short.links is None:
        return
    assert long.links is not None
    assert long.links <= short.links
    assert short.total is not None
    assert short.total > training
    assert short.links * length >= training
