from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.schedule import Schedule, multiplier

STEPS = 100


def rates(**parameters: Any) -> list[float]:
    config = TrainingConfig(**{"learning_rate": 1.0, **parameters})
    return [multiplier(config, step, STEPS) for step in range(STEPS)]


def by_torch(kind: type, peak: float = 1.0, **arguments: Any) -> list[float]:
    """The same schedule as torch has it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    schedule = kind(optimizer, **arguments)
    found = []
    for _ in range(STEPS):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"lr_scheduler_type": "step", "lr_step_size": 30, "lr_gamma": 0.5},
            by_torch(lr_scheduler.StepLR, step_size=30, gamma=0.5),
        ),
        (
            {"lr_scheduler_type": "exponential", "lr_gamma": 0.9},
            by_torch(lr_scheduler.ExponentialLR, gamma=0.9),
        ),
        (
            {"lr_scheduler_type": "polynomial", "lr_power": 2.0},
            by_torch(lr_scheduler.PolynomialLR, total_iters=STEPS, power=2.0),
        ),
        (
            {"lr_scheduler_type": "cosine", "lr_end": 0.1},
            by_torch(lr_scheduler.CosineAnnealingLR, T_max=STEPS, eta_min=0.1),
        ),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_num_cycles": 4, "lr_end": 0.2},
            by_torch(lr_scheduler.CosineAnnealingWarmRestarts, T_0=25, eta_min=0.2),
        ),
        (
            {"lr_scheduler_type": "cyclic", "lr_base": 0.1, "lr_step_size_up": 20},
            by_torch(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=1.0, step_size_up=20,
                     cycle_momentum=False),
        ),
        (
            {"lr_scheduler_type": "cyclic", "lr_cyclic_mode": "triangular2", "lr_step_size_up": 10},
            by_torch(lr_scheduler.CyclicLR, base_lr=0.0, max_lr=1.0, step_size_up=10,
                     mode="triangular2", cycle_momentum=False),
        ),
    ],
    ids=lambda value: value["lr_scheduler_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_schedules_are_those_of_torch(parameters: dict[str, Any], expected: list[float]) -> None:
    assert rates(**parameters) == pytest.approx(expected, abs=1e-6)


def test_one_cycle_is_that_of_torch() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=STEPS, pct_start=0.4, div_factor=10,
        final_div_factor=50, cycle_momentum=False,
    )  # fmt: skip
    expected = []
    for step in range(STEPS):
        expected.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if step < STEPS - 1:
            schedule.step()
    one_cycle = {
        "lr_scheduler_type": "one_cycle", "lr_pct_start": 0.4, "lr_div_factor": 10.0,
        "lr_final_div_factor": 50.0,
    }  # fmt: skip
    assert rates(**one_cycle) == pytest.approx(expected, abs=1e-6)


def test_constant_and_linear() -> None:
    assert set(rates(lr_scheduler_type="constant")) == {1.0}
    assert rates(lr_scheduler_type="linear")[::50] == [1.0, 0.5]


def test_the_defaults_of_gamma_and_cycles_depend_on_the_schedule() -> None:
    assert rates(lr_scheduler_type="step", lr_step_size=10)[10] == pytest.approx(0.1)
    assert rates(lr_scheduler_type="exponential")[1] == pytest.approx(0.99)
    assert rates(lr_scheduler_type="cosine")[50] == pytest.approx(0.5)
    waves = rates(lr_scheduler_type="cosine", lr_num_cycles=1.0)
    assert waves[50] == pytest.approx(0.0)
    assert waves[75] == pytest.approx(0.5)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 20}, {"warmup_ratio": 0.2}])
def test_warmup_rises_linearly_and_then_the_schedule_begins(warmup: dict[str, Any]) -> None:
    found = rates(lr_scheduler_type="linear", **warmup)
    assert found[:20] == pytest.approx([step / 20 for step in range(20)])
    assert found[20] == 1.0
    assert found[60] == pytest.approx(0.5)


def test_the_end_is_absolute() -> None:
    found = rates(learning_rate=0.5, lr_scheduler_type="polynomial", lr_end=0.1)
    assert 0.5 * found[50] == pytest.approx(0.3)
    found = rates(learning_rate=0.5, lr_scheduler_type="cyclic", lr_base=0.1)
    assert 0.5 * found[0] == pytest.approx(0.1)


PLATEAU = {"lr_scheduler_type": "reduce_on_plateau", "learning_rate": 1.0}


def plateau(values: list[float], maximize: bool = False, **parameters: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(optimizer, TrainingConfig(**{**PLATEAU, **parameters}), 100, maximize)
    found = []
    for value in values:
        schedule.observe(value)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_reduce_on_plateau_is_that_of_torch() -> None:
    values = [3.0, 2.9, 2.9, 2.899, 2.9, 2.0, 2.1, 2.1, 1.99, 2.1, 2.1, 2.1]
    for patience, factor, threshold in ((0, 0.5, 1e-4), (1, 0.1, 1e-2), (2, 0.5, 1e-2)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=patience, factor=factor, threshold=threshold
        )
        expected = []
        for value in values:
            theirs.step(value)
            expected.append(optimizer.param_groups[0]["lr"])
        found = plateau(values, lr_patience=patience, lr_factor=factor, lr_threshold=threshold)
        assert found == pytest.approx(expected)


def test_a_plateau_of_what_shall_grow() -> None:
    assert plateau([1.0, 2.0, 3.0], maximize=True, lr_patience=0) == [1.0, 1.0, 1.0]
    assert plateau([3.0, 2.0], maximize=True, lr_patience=0) == pytest.approx([1.0, 0.1])


@pytest.mark.parametrize("kind", ["linear", "reduce_on_plateau"])
def test_it_continues_where_it_was(kind: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        config = TrainingConfig(
            lr_scheduler_type=kind, learning_rate=0.3, lr_patience=0, lr_factor=0.5
        )
        return optimizer, Schedule(optimizer, config, 10)

    first, schedule = make()
    schedule.step()
    schedule.observe(1.0)
    schedule.observe(1.0)
    second, continued = make()
    continued.load_state_dict(schedule.state_dict())
    assert second.param_groups[0]["lr"] == first.param_groups[0]["lr"] < 0.3
    assert continued.get_last_lr() == schedule.get_last_lr()


def test_layers_keep_their_ratio() -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1.0, 0.5)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    schedule = Schedule(optimizer, TrainingConfig(learning_rate=1.0), 4)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 0.375]
    assert schedule.get_last_lr() == [0.75]


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(TrainingError, match="no schedule"):
        rates(lr_scheduler_type="wild")
