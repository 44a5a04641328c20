"""The learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpcml.train.config import TrainingConfig, TrainingError

_WITHOUT_WARMUP = ("cyclic", "one_cycle", "reduce_on_plateau")


class Schedule:
    """Sets the learning rate of each step; the last word is a pure function of the step.

    Only ``reduce_on_plateau`` remembers something: the evaluations that it was shown.

    Args:
        optimizer: each parameter group's learning rate is taken as its peak.
        config: the hyperparameters.
        total_steps: length of the training.
        maximize: whether a larger value of what :meth:`observe` gets is better.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: TrainingConfig,
        total_steps: int,
        maximize: bool = False,
    ) -> None:
        self._optimizer = optimizer
        self._config = config
        self._total = total_steps
        self._sign = -1.0 if maximize else 1.0
        self._peaks = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = 0
        self._reduced = 1.0
        self._best = math.inf
        self._waited = 0
        self._apply()

    def step(self) -> None:
        """Go on to the next step; to be called after each update of the weights."""
        self._step += 1
        self._apply()

    def observe(self, value: float) -> None:
        """Take note of an evaluation; ``reduce_on_plateau`` acts on it."""
        config = self._config
        if config.lr_scheduler_type != "reduce_on_plateau":
            return
        value *= self._sign
        # The threshold is relative, as in torch, and also for objectives below zero.
        if self._best == math.inf or value < self._best - config.lr_threshold * abs(self._best):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited > config.lr_patience:
            self._reduced *= config.lr_factor
            self._waited = 0
            self._apply()

    def get_last_lr(self) -> list[float]:
        """The learning rate of the coming step, before any layer-wise decay, as a list of one."""
        return [self._config.learning_rate * self._factor()]

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` needs to go on."""
        return {
            "step": self._step,
            "reduced": self._reduced,
            "best": self._best,
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken."""
        self._step = state["step"]
        self._reduced = state["reduced"]
        self._best = state["best"]
        self._waited = state["waited"]
        self._apply()

    def _factor(self) -> float:
        return multiplier(self._config, self._step, self._total) * self._reduced

    def _apply(self) -> None:
        factor = self._factor()
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor


def multiplier(config: TrainingConfig, step: int, total_steps: int) -> float:
    """The learning rate of a step as a multiple of ``learning_rate``.

    Args:
        config: the hyperparameters.
        step: counted from 0.
        total_steps: length of the training.
    """
    kind = config.lr_scheduler_type
    if kind in _WITHOUT_WARMUP:
        warmup = 0
    elif config.warmup_ratio is not None:
        warmup = math.ceil(config.warmup_ratio * total_steps)
    else:
        warmup = config.warmup_steps
    if step < warmup:
        return step / warmup
    step -= warmup
    done = min(step / max(total_steps - warmup, 1), 1.0)
    end = config.lr_end / config.learning_rate
    if kind in ("constant", "reduce_on_plateau"):
        return 1.0
    if kind == "linear":
        return 1.0 - done
    if kind == "step":
        return float((config.lr_gamma or 0.1) ** (step // config.lr_step_size))
    if kind == "exponential":
        return float((config.lr_gamma or 0.99) ** step)
    if kind == "polynomial":
        return float(end + (1 - end) * (1 - done) ** config.lr_power)
    if kind == "cosine":
        return end + (1 - end) * _half_wave(2 * (config.lr_num_cycles or 0.5) * done)
    if kind == "cosine_with_restarts":
        cycles = config.lr_num_cycles or 1.0
        return end if done >= 1 else end + (1 - end) * _half_wave(cycles * done % 1.0)
    if kind == "cyclic":
        return _cyclic(config, step)
    if kind == "one_cycle":
        return _one_cycle(config, step, total_steps)
    raise TrainingError(f"no schedule is called {kind!r}")


def _half_wave(done: float) -> float:
    """From 1 at 0 to 0 at 1, and back again at 2."""
    return 0.5 * (1 + math.cos(math.pi * done))


def _cyclic(config: TrainingConfig, step: int) -> float:
    """Triangles between the base and the peak (L. N. Smith, "Cyclical learning rates", 2017)."""
    base = config.lr_base / config.learning_rate
    cycle, within = divmod(step / config.lr_step_size_up, 2)
    height = 1 - abs(within - 1)
    if config.lr_cyclic_mode == "triangular2":
        height /= 2**cycle
    return base + (1 - base) * height


def _one_cycle(config: TrainingConfig, step: int, total_steps: int) -> float:
    """Up, then far down, by half waves (L. N. Smith and N. Topin, "Super-convergence", 2019)."""
    first = 1 / config.lr_div_factor
    last = first / config.lr_final_div_factor
    top = max(config.lr_pct_start * total_steps - 1, 0.0)
    if step < top:
        return 1 + (first - 1) * _half_wave(step / top)
    rest = max(total_steps - 1 - top, 1e-9)
    return last + (1 - last) * _half_wave(min((step - top) / rest, 1.0))
