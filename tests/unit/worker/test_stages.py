"""Results of earlier stages, put into a cell when it starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcml.worker.stages import NoResult, best_cell, complete, require, resolve
from tests.unit.worker.worker_run import Run


def write_run(root: Path, results: list[dict[str, Any]], mode: str | None = "min") -> Path:
    run = root / "name.first" / "id"
    (run / "cells").mkdir(parents=True)
    objective = {"metric": "loss", "mode": mode} if mode else None
    plan = {"objective": objective, "cells": len(results) + 1}
    (run / "plan.json").write_text(json.dumps(plan))
    for index, metrics in enumerate(results):
        cell = run / "cells" / f"c{index}"
        (cell / "checkpoints" / "step-5").mkdir(parents=True)
        (cell / "checkpoints" / "latest").write_text("step-5\n")
        result = {"id": f"c{index}", "index": index, "params": {"lr": index / 10, "a.b": "x"}}
        (cell / "result.json").write_text(json.dumps({**result, "metrics": metrics}))
    (run / "cells" / "unfinished").mkdir()
    return run


def token(what: str) -> str:
    return f"\0name.first/id\0{what}\0"


@pytest.mark.parametrize(("mode", "best"), [("min", "c1"), ("max", "c0")])
def test_the_best_cell_by_the_objective(tmp_path: Path, mode: str, best: str) -> None:
    run = write_run(tmp_path, [{"loss": 2.0}, {"loss": 1.0}, {"loss": float("nan")}, {}], mode)
    assert best_cell(str(run))["id"] == best


def test_equal_cells_keep_their_order(tmp_path: Path) -> None:
    run = write_run(tmp_path, [{"loss": 1.0}, {"loss": 1.0}])
    assert best_cell(str(run))["id"] == "c0"


def test_tokens_become_values_and_parts_of_texts(tmp_path: Path) -> None:
    run = write_run(tmp_path, [{"loss": 2.0}, {"loss": 1.0}])
    cell = {
        "params": {"learning_rate": token("best.params.lr")},
        "argv": ["--run", token("run"), f"--lr={token('best.params.lr')}/{token('best.id')}"],
        "nested": [{"x": token("best.params.a.b")}, 3, None, token("best.metrics.loss")],
        "checkpoint": token("best.checkpoint"),
    }
    assert resolve(cell, str(tmp_path)) == {
        "params": {"learning_rate": 0.1},
        "argv": ["--run", str(run), "--lr=0.1/c1"],
        "nested": [{"x": "x"}, 3, None, 1.0],
        "checkpoint": str(run / "cells" / "c1" / "checkpoints" / "step-5"),
    }


def test_what_a_program_gets_is_text_as_a_recipe_writes_it(tmp_path: Path) -> None:
    own = {"search.a": 0.5, "search.b": None, "search.c": True}
    a, b, c = (f"\0\0{name}\0" for name in own)
    payload = {"argv": ["run", a, b, f"-c={c}"], "directory": a, "env": {"A": a, "C": c, "D": "d"}}
    assert complete({"params": {"a": a, "c": c}, "payload": payload}, "", own) == {
        "params": {"a": 0.5, "c": True},
        "payload": {
            "argv": ["run", "0.5", "null", "-c=true"],
            "directory": "0.5",
            "env": {"A": "0.5", "C": "true", "D": "d"},
        },
    }


def test_a_run_without_objective_has_a_best_cell_only_if_it_has_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", [{}], None)
    assert best_cell(str(run))["id"] == "c0"
    with pytest.raises(NoResult, match="no objective"):
        best_cell(str(write_run(tmp_path / "two", [{}, {}], None)))


@pytest.mark.parametrize(
    ("results", "what", "said"),
    [
        ([], "best.id", "no cell with a value of loss"),
        ([{"loss": 1.0}], "best.params.width", "has no best.params.width; it has lr, a.b"),
        ([{"loss": 1.0}], "best.metrics.accuracy", "it has loss"),
    ],
)
def test_what_is_missing_is_said(tmp_path: Path, results: list, what: str, said: str) -> None:
    write_run(tmp_path, results)
    with pytest.raises(NoResult, match=said):
        resolve([token(what)], str(tmp_path))


def test_a_stage_is_complete_when_each_of_its_cells_is_done(tmp_path: Path) -> None:
    run = write_run(tmp_path, [{"loss": 1.0}, {"loss": 2.0}])
    with pytest.raises(NoResult, match=r"not complete: 1 of 3 cells of .*name\.first/id are not"):
        require(str(run))
    (run / "cells" / "unfinished" / "result.json").write_text("{}")
    require(str(run))


def test_a_cell_does_not_start_before_the_stages_that_it_needs(tmp_path: Path) -> None:
    write_run(tmp_path, [{"loss": 1.0}])
    run = Run(tmp_path, ["pass"], needs=["name.first/id"])
    assert run.run() == 1
    (end,) = run.events(kind="ended")
    assert end["reason"].startswith("the stage before is not complete: 1 of 2 cells")
    assert not list(run.folder.cell_dir("cell0").glob("log.*"))
