from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.interval import optimal_interval
from hpcml.train.interval import FIRST, CheckpointClock


def lost(interval: float, save: float, mtbf: float) -> float:
    """Time in all over useful time: Daly (2006), equation 20, without the restart."""
    return mtbf / interval * (math.exp((interval + save) / mtbf) - 1)


@given(save=st.floats(0.1, 100), mtbf=st.floats(1e3, 1e7))
def test_no_other_interval_loses_noticeably_less(save: float, mtbf: float) -> None:
    best = optimal_interval(save, mtbf)
    for other in (0.8, 0.9, 1.1, 1.25):
        assert lost(best, save, mtbf) <= lost(best * other, save, mtbf) * (1 + 1e-4)


def test_youngs_formula_is_its_first_term() -> None:
    assert optimal_interval(1, 1e6) == pytest.approx(math.sqrt(2e6), rel=1e-3)


def test_who_saves_longer_than_they_live_saves_all_the_time() -> None:
    assert optimal_interval(300, 100) == 100


def test_a_fixed_interval_is_kept() -> None:
    clock = CheckpointClock(10, 1e6, None, now=100)
    assert not clock.due(109)
    assert clock.due(110)
    assert clock.saved(3, now=113) is None
    assert not clock.due(122)
    assert clock.due(123)


def test_the_first_checkpoint_comes_early_and_decides_about_the_others() -> None:
    clock = CheckpointClock(None, 20_000, None, now=0)
    assert not clock.due(FIRST - 1)
    assert clock.due(FIRST)
    line = clock.saved(4, now=FIRST + 4)
    assert line is not None
    assert "saving took 4 s" in line
    assert "fails every 6 h" in line
    assert f"{optimal_interval(4, 20_000):.0f} s" in line
    assert clock.interval == optimal_interval(4, 20_000)
    assert not clock.due(FIRST + 4 + 390)
    assert clock.due(FIRST + 4 + 400)


def test_an_earlier_attempt_has_measured_it() -> None:
    assert CheckpointClock(None, 20_000, 4, now=0).interval == optimal_interval(4, 20_000)


def test_only_a_large_change_is_told() -> None:
    clock = CheckpointClock(None, 20_000, None, now=0)
    assert clock.saved(4, now=0)
    assert clock.saved(5, now=0) is None
    assert clock.saved(40, now=0)


@pytest.mark.parametrize(("save", "interval"), [(1, 1800), (30, 3000)])
def test_rare_failures_are_no_reason_to_save_hardly_ever(save: float, interval: float) -> None:
    clock = CheckpointClock(None, math.inf, None, now=0)
    line = clock.saved(save, now=0)
    assert clock.interval == interval
    assert line is not None
    assert f"at most {interval} s" in line
