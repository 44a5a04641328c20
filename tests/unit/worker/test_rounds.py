"""What the rounds of a search try, from what lies in a run folder."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcml.worker.chain import NotOver
from hpcml.worker.rounds import of_cell, propose, proposed
from hpcml.worker.sampler import Tried, ask

NUMBERS = {"x": {"uniform": [-5, 5]}, "rate": {"loguniform": [1e-4, 1]}, "n": {"int": [1, 8]}}
CHOICE = {"kind": {"choice": ["a", 1, True, None, 1.5]}}
SAMPLERS = ("tpe", "cmaes", "qmc", "random")


def search(sampler: str, rounds: int = 3, cells: int = 6, **more: Any) -> dict[str, Any]:
    found = {"sampler": sampler, "seed": 0, "metric": "loss", "mode": "min", "params": NUMBERS}
    return {**found, "cells": [cells] * rounds, **more}


def loss(params: dict[str, Any]) -> float:
    bowl = (params["x"] - 1.3) ** 2 + (math.log10(params["rate"]) + 2.2) ** 2
    return bowl + 0.1 * (params["n"] - 3) ** 2


def tried(params: Sequence[dict[str, Any]], sign: float = 1.0) -> list[Tried]:
    return [Tried(each, sign * loss(each), False) for each in params]


def sought(sampler: str, rounds: int, cells: int, **more: Any) -> list[list[Tried]]:
    """All rounds of a search; with ``mode`` max the loss is turned round."""
    what = search(sampler, rounds, cells, **more)
    sign = -1.0 if what["mode"] == "max" else 1.0
    history: list[list[Tried]] = []
    for _ in range(rounds):
        history.append(tried(ask(what, history), sign))
    return history


@pytest.mark.parametrize(
    ("sampler", "choice"),
    # cmaes knows no choice, which the recipe refuses.
    [*((name, False) for name in SAMPLERS), *((n, True) for n in SAMPLERS if n != "cmaes")],
)
def test_proposals_are_of_the_right_kind_and_follow_from_the_history_alone(
    sampler: str, choice: bool
) -> None:
    params = {**NUMBERS, **(CHOICE if choice else {})}
    what = search(sampler, params=params)
    history: list[list[Tried]] = []
    for _ in range(3):
        asked = ask(what, history)
        assert ask(what, history) == asked
        assert len(asked) == 6
        assert len({json.dumps(each) for each in asked}) > 1
        for each in asked:
            assert list(each) == list(params)
            assert -5 <= each["x"] <= 5
            assert 1e-4 <= each["rate"] <= 1
            assert type(each["n"]) is int
            assert 1 <= each["n"] <= 8
            assert json.dumps(each) == json.dumps(json.loads(json.dumps(each)))
            if choice:
                assert json.dumps(each["kind"]) in map(json.dumps, CHOICE["kind"]["choice"])
        # Of each round one fails and one has no value.
        values = tried(asked)
        values[1] = values[1]._replace(value=None, failed=True)
        values[2] = values[2]._replace(value=None)
        history.append(values)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_another_seed_proposes_something_else(sampler: str) -> None:
    assert ask(search(sampler), []) != ask(search(sampler, seed=1), [])


@pytest.mark.parametrize("sampler", ["tpe", "cmaes"])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_what_was_found_leads_closer_than_chance(sampler: str, mode: str) -> None:
    """The median of the last third is far below that of the first round, and of chance."""

    def median(cells: list[Tried]) -> float:
        return sorted(loss(cell.params) for cell in cells)[len(cells) // 2]

    rounds = sought(sampler, 9, 10, mode=mode)
    last = [cell for cells in rounds[6:] for cell in cells]
    by_chance = [cell for cells in sought("random", 9, 10)[6:] for cell in cells]
    assert median(last) < 0.5 * median(rounds[0])
    assert median(last) < 0.5 * median(by_chance)


def test_a_quasi_random_sequence_fills_the_space_evenly() -> None:
    """Of 16 points of a Sobol' sequence each 16th of each axis has exactly one."""
    params = {"x": {"uniform": [0, 1]}, "y": {"uniform": [0, 1]}}
    what = search("qmc", 4, 4, params=params)
    history: list[list[Tried]] = []
    for _ in range(4):
        history.append([Tried(each, 0.0, False) for each in ask(what, history)])
    for name in params:
        places = [int(cell.params[name] * 16) for cells in history for cell in cells]
        assert sorted(places) == list(range(16))


def run_of(folder: Path, what: dict[str, Any]) -> str:
    (folder / "plan.json").write_text(json.dumps({"search": what}))
    count = sum(what["cells"])
    lines = [json.dumps({"index": index, "id": f"c{index}"}) for index in range(count)]
    (folder / "cells.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def leave(folder: Path, index: int, **left: Any) -> None:
    """What a cell leaves: a loss, or events."""
    cell = folder / "cells" / f"c{index}"
    cell.mkdir(parents=True)
    if "loss" in left:
        (cell / "result.json").write_text(json.dumps({"metrics": left}))
    if "events" in left:
        (cell / "events.jsonl").write_text(
            "".join(f"{json.dumps(event)}\n" for event in left["events"])
        )


STARTED = {"event": "started", "submission": 1, "job": "1"}


def ended(cause: str, again: bool = False) -> list[dict[str, Any]]:
    return [STARTED, {"event": "ended", "cause": cause, "again": again}]


def test_a_round_is_proposed_once_from_all_that_has_ended(tmp_path: Path) -> None:
    run = run_of(tmp_path, search("tpe", rounds=2, cells=4))
    propose(run, 1)
    first = proposed(run, 1)
    assert first == ask(search("tpe", cells=4), [])
    leave(tmp_path, 0, loss=3.0)
    leave(tmp_path, 1, events=ended("application"))
    leave(tmp_path, 2, loss=float("nan"))
    leave(tmp_path, 3, events=[{"event": "cancelled", "time": "2026"}])
    propose(run, 2)
    assert json.loads((tmp_path / "rounds" / "2.json").read_text())["from"] == [
        [3.0, None, None, None]
    ]
    second = proposed(run, 2)
    assert second
    assert of_cell(run, search("tpe", cells=4), 5) == second[1]
    (tmp_path / "cells" / "c0" / "result.json").write_text('{"metrics": {"loss": 0.0}}')
    propose(run, 2)
    assert proposed(run, 2) == second
    assert sorted(path.name for path in (tmp_path / "rounds").iterdir()) == ["1.json", "2.json"]


@pytest.mark.parametrize(
    "events", [[], [STARTED], ended("stopped"), ended("oom", again=True), ended("application")]
)
def test_it_waits_for_cells_that_may_still_end(
    tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    run = run_of(tmp_path, search("random", rounds=3, cells=2))
    propose(run, 1)
    leave(tmp_path, 0, loss=1.0)
    leave(tmp_path, 1, events=events)
    if events == ended("application"):
        propose(run, 2)
        return
    with pytest.raises(NotOver, match="round 1 is not over: 1 of 2 cells are unfinished, such as"):
        propose(run, 2)
    assert proposed(run, 2) is None
    with pytest.raises(NotOver, match="round 2 is not proposed yet; give the command again"):
        of_cell(run, search("random", cells=2), 2)


def test_without_any_value_nothing_is_proposed(tmp_path: Path) -> None:
    run = run_of(tmp_path, search("tpe", rounds=2, cells=2))
    propose(run, 1)
    leave(tmp_path, 0, loss=float("inf"))
    leave(tmp_path, 1, events=ended("application"))
    with pytest.raises(NotOver, match="no cell before round 2 has a value of loss: 1 failed, 1 re"):
        propose(run, 2)


def test_a_later_round_does_not_come_before_an_earlier_one(tmp_path: Path) -> None:
    run = run_of(tmp_path, search("tpe"))
    with pytest.raises(NotOver, match="round 1 has not begun"):
        propose(run, 2)


def propose_and(run: str, number: int, *command: str, path: str = "") -> Any:
    """What the batch script starts, with ``path`` before all other packages."""
    root = str(Path(__file__).parents[3])
    return subprocess.run(
        [sys.executable, "-m", "hpcml.worker.rounds", run, str(number), *command],
        env={**os.environ, "PYTHONPATH": f"{path}:{root}"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_tasks_that_come_at_once_agree_and_become_their_commands(tmp_path: Path) -> None:
    run = run_of(tmp_path, search("tpe", cells=2))
    done = propose_and(run, 1, "sh", "-c", "echo hello; exit 75")
    assert (done.returncode, done.stdout, done.stderr) == (75, "hello\n", "")
    assert proposed(run, 1) == ask(search("tpe", cells=2), [])
    late = propose_and(run, 2, "echo", "never")
    assert (late.returncode, late.stdout) == (1, "")
    assert late.stderr.startswith("hpcml: round 1 is not over: 2 of 2 cells are unfinished")


def test_a_python_without_optuna_says_what_to_install(tmp_path: Path) -> None:
    run = run_of(tmp_path, search("tpe", cells=2))
    (tmp_path / "hides").mkdir()
    (tmp_path / "hides" / "optuna.py").write_text("raise ImportError('no optuna here')")
    done = propose_and(run, 1, "echo", "never", path=str(tmp_path / "hides"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"hpcml: {sys.executable} cannot propose round 1: no optuna here; "
        "pip install 'hpcml[search]'\n"
    )
    # What is proposed already needs none.
    propose(run, 1)
    again = propose_and(run, 1, "echo", "on", path=str(tmp_path / "hides"))
    assert (again.returncode, again.stdout) == (0, "on\n")


def test_an_evolution_moves_away_from_where_cells_diverge() -> None:
    """Half of the space diverges, as it does where a learning rate is too large."""
    what = search("cmaes", 6, 10)
    history: list[list[Tried]] = []
    for _ in range(6):
        history.append(
            [
                each if each.params["rate"] < 1e-2 else each._replace(value=None)
                for each in tried(ask(what, history))
            ]
        )
    diverged = [sum(cell.value is None for cell in cells) for cells in history]
    assert sum(diverged[3:]) < 0.5 * sum(diverged[:3])
