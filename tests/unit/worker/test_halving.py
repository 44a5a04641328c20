"""Which cells go on to the next rung, from what lies in a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcml.worker.halving import NotOver, choose, chosen

HALVING = {"metric": "loss", "mode": "min", "cells": [6, 3, 2], "steps": [1, 2, 4]}
OVER = [{"event": "started", "submission": 1, "job": "1"}]


def run_of(folder: Path, cells: list[Any], mode: str = "min") -> str:
    """A run whose cells have a loss in rung 1, or else these events."""
    halving = {**HALVING, "mode": mode, "cells": [len(cells), 3, 2]}
    (folder / "plan.json").write_text(json.dumps({"halving": halving}))
    lines = [json.dumps({"index": index, "id": f"c{index}"}) for index in range(len(cells))]
    (folder / "cells.jsonl").write_text("\n".join(lines) + "\n")
    for index, found in enumerate(cells):
        cell = folder / "cells" / f"c{index}"
        (cell / "rungs").mkdir(parents=True)
        if isinstance(found, list):
            (cell / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in found))
        else:
            metrics = {} if found is None else {"loss": found}
            (cell / "rungs" / "1.json").write_text(json.dumps({"metrics": metrics}))
    return str(folder)


def ended(cause: str, again: bool = False) -> list[dict[str, Any]]:
    return [*OVER, {"event": "ended", "cause": cause, "again": again}]


@pytest.mark.parametrize(("mode", "best"), [("min", [3, 1, 2]), ("max", [0, 1, 2])])
def test_the_best_go_on_and_equal_ones_in_the_order_of_the_sweep(
    tmp_path: Path, mode: str, best: list[int]
) -> None:
    run = run_of(tmp_path, [9.0, 2.0, 2.0, 1.0, 2.0], mode)
    assert choose(run, 2) == best


def test_cells_without_a_finite_value_and_failed_ones_are_no_candidates(tmp_path: Path) -> None:
    cancelled = [{"event": "cancelled"}]
    cells = [float("nan"), None, 5.0, ended("application"), float("inf"), cancelled]
    assert choose(run_of(tmp_path, cells), 2) == [2]
    said = json.loads((tmp_path / "rungs" / "2.json").read_text())
    assert (said["failed"], said["no_value"]) == ([3, 5], [0, 1, 4])


@pytest.mark.parametrize(
    "events",
    [
        [],
        OVER,
        ended("stopped"),
        ended("oom", again=True),
        [{"event": "cancelled"}, *OVER],
    ],
)
def test_it_waits_for_cells_that_may_still_end(
    tmp_path: Path, events: list[dict[str, Any]]
) -> None:
    with pytest.raises(NotOver, match="1 of 3 cells are unfinished, such as cell 1"):
        choose(run_of(tmp_path, [1.0, events, 2.0]), 2)
    assert chosen(str(tmp_path), 2) is None


def test_a_job_that_slurm_killed_for_its_memory_has_ended(tmp_path: Path) -> None:
    run = run_of(tmp_path, [1.0, OVER])
    (tmp_path / "tasks").mkdir()
    said = "slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.\n"
    (tmp_path / "tasks" / "001.1.err").write_text(said)
    assert choose(run, 2) == [0]


def test_without_any_candidate_nothing_is_decided(tmp_path: Path) -> None:
    with pytest.raises(NotOver, match="no cell with a value of loss: 1 failed, 1 reported none"):
        choose(run_of(tmp_path, [None, ended("killed")]), 2)
    assert chosen(str(tmp_path), 2) is None


def cancel(folder: Path, index: int, time: str) -> None:
    line = json.dumps({"event": "cancelled", "time": time})
    (folder / "cells" / f"c{index}" / "events.jsonl").write_text(f"{line}\n")


def test_a_cell_that_was_cancelled_after_its_rung_gives_its_place_to_the_next(
    tmp_path: Path,
) -> None:
    """Unless that was before the command was given again, which continues it."""
    run = run_of(tmp_path, [1.0, 2.0, 3.0, 4.0, 5.0])
    cancel(tmp_path, 0, "2026-01-01T00:00:02.000+00:00")
    cancel(tmp_path, 1, "2026-01-01T00:00:00.000+00:00")
    assert choose(run, 2, "2026-01-01T00:00:01.000+00:00") == [1, 2, 3]
    assert json.loads((tmp_path / "rungs" / "2.json").read_text())["failed"] == [0]


def test_when_all_are_cancelled_nothing_is_decided(tmp_path: Path) -> None:
    run = run_of(tmp_path, [1.0, ended("application")])
    cancel(tmp_path, 0, "2026-01-01T00:00:02.000+00:00")
    with pytest.raises(NotOver, match="all cells that have a value of loss in rung 1 are cancell"):
        choose(run, 2, "2026-01-01T00:00:01.000+00:00")
    assert choose(run, 2) == [0]


def test_it_is_decided_once(tmp_path: Path) -> None:
    run = run_of(tmp_path, [1.0, 2.0, 3.0, 4.0])
    assert choose(run, 2) == [0, 1, 2]
    (tmp_path / "cells" / "c3" / "rungs" / "1.json").write_text('{"metrics": {"loss": 0.0}}')
    assert choose(run, 2) == [0, 1, 2]
    assert [path.name for path in (tmp_path / "rungs").iterdir()] == ["2.json"]


def test_a_cell_that_has_not_begun_its_rung_has_not_failed_in_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, [1.0, 2.0, 3.0])
    choose(run, 2)
    (tmp_path / "cells" / "c0" / "events.jsonl").write_text(
        "".join(f"{json.dumps(event)}\n" for event in ended("rung"))
    )
    with pytest.raises(NotOver, match="rung 2 is not over: 3 of 3"):
        choose(run, 3)
