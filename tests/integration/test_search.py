"""A search on this machine: rounds that go by what the rounds before found."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.conftest import Hpcml, kill_everything_of, wait_until, write_texts

# A bowl with its bottom at rate 0.01 and x 1.
PROGRAM = """
import math, os, sys, hpcml
rate, x = map(float, sys.argv[1:3])
assert os.environ["KIND"] in ("a", "b c")
if os.path.exists("breaks") and x > 0:
    sys.exit("broken")
hpcml.report(step=1, loss=(math.log10(rate) + 2) ** 2 + (x - 1) ** 2)
"""


def write(hpcml: Hpcml, **changes: Any) -> Path:
    hpcml.write("run.py", PROGRAM)
    params = {
        "rate": {"loguniform": [1e-5, 1]},
        "x": {"uniform": [-4, 4]},
        "kind": {"choice": ["a", "b c"]},
    }
    search = {"rounds": 3, "cells": 5, "metric": "loss", "params": params, **changes}
    recipe = {
        "name": "bowl",
        "kind": "command",
        "sweep": {"search": search},
        "command": {"run": [sys.executable, "run.py", "{{ params.rate }}", "{{ params.x }}"]},
        "env": {"KIND": "{{ params.kind }}"},
    }
    return hpcml.write("recipe.yaml", yaml.safe_dump(recipe))


def results(hpcml: Hpcml, *more: str | Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(hpcml("results", "bowl", "--json", *more).stdout)[
        "cells"
    ]
    return cells


def rounds(root: Path) -> list[str]:
    return [path.read_text() for path in sorted(root.glob("bowl/*/rounds/*.json"))]


def test_it_finds_better_cells_round_by_round_and_killed_it_finds_the_same(hpcml: Hpcml) -> None:
    recipe = write(hpcml)
    said = hpcml("sweep", recipe).stderr
    assert "search by tpe for the min of loss: 3 rounds of 5 cells" in said
    assert "round 3 of 3: 5 cells" in said
    cells = results(hpcml)
    losses = [cell["metrics"]["loss"] for cell in sorted(cells, key=lambda each: each["index"])]
    assert min(losses[5:]) < 0.5 * min(losses[:5])
    assert min(losses) < 1
    again = hpcml("sweep", recipe).stderr
    assert "15 done before, 0 left to run" in again
    # All tables have what was tried, and not what stood for it.
    folder = hpcml.run_folder()
    tried = {cell["id"]: cell["params"] for cell in cells}
    for line in csv.DictReader(io.StringIO(hpcml("results", "bowl", "--csv").stdout)):
        assert float(line["x"]) == tried[line["cell"]]["x"]
        assert line["kind"] == tried[line["cell"]]["kind"]
    for row in pq.read_table(folder / "results.parquet").to_pylist():
        assert (row["x"], row["rate"]) == (tried[row["cell"]]["x"], tried[row["cell"]]["rate"])
    hpcml("report", "bowl")
    page = (folder / "report.html").read_text()
    assert all(str(params["rate"]) in page for params in tried.values())
    best = cells[0]
    why = json.loads(hpcml("why", "bowl", "best", "--json").stdout)
    assert why["params"] == best["params"]
    assert f" {best['params']['rate']} {best['params']['x']}" in "\n".join(why["by_hand"])
    assert "\0" not in page + hpcml("status", "bowl").stdout

    other = hpcml.folder / "other"
    for seen in ("bowl/*/rounds/1.json", "bowl/*/rounds/2.json"):
        sweep = hpcml.start("sweep", recipe, "--root", other)
        wait_until(lambda seen=seen: any(other.glob(seen)), what=seen)
        kill_everything_of(sweep)
    hpcml("sweep", recipe, "--root", other)
    assert rounds(other) == rounds(hpcml.folder / "runs")
    found = results(hpcml, "--root", other)
    assert [(cell["id"], cell["metrics"]) for cell in found] == [
        (cell["id"], cell["metrics"]) for cell in cells
    ]


@pytest.mark.parametrize("sampler", ["cmaes", "qmc", "random"])
def test_every_sampler_goes_all_the_way(hpcml: Hpcml, sampler: str) -> None:
    params = {"rate": {"loguniform": [1e-5, 1]}, "x": {"uniform": [-4, 4]}}
    kind = {} if sampler == "cmaes" else {"kind": {"choice": ["a", "b c"]}}
    recipe = write(hpcml, sampler=sampler, rounds=2, cells=2, params={**params, **kind})
    if sampler == "cmaes":
        recipe.write_text(recipe.read_text().replace("'{{ params.kind }}'", "a"))
    hpcml("sweep", recipe)
    assert len({cell["params"]["x"] for cell in results(hpcml)}) == 4


def test_failed_cells_are_no_obstacle_and_get_another_try(hpcml: Hpcml) -> None:
    recipe = write(hpcml, rounds=2, cells=4)
    hpcml.write("breaks", "")
    hpcml("sweep", recipe, code=1)
    states = hpcml.status("bowl")["states"]
    assert set(states) == {"failed", "done"}
    assert sum(states.values()) == 8
    proposals = rounds(hpcml.folder / "runs")
    told = [value is None for value in json.loads(proposals[1])["from"][0]]
    assert told == [cell["x"] > 0 for cell in json.loads(proposals[0])["cells"]]
    (hpcml.folder / "breaks").unlink()
    said = hpcml("sweep", recipe).stderr
    assert f"{states['done']} done before, {states['failed']} left to run" in said
    assert hpcml.status("bowl")["states"] == {"done": 8}
    assert rounds(hpcml.folder / "runs") == proposals


def test_where_nothing_worked_it_stops_and_says_so(hpcml: Hpcml) -> None:
    recipe = write(
        hpcml,
        rounds=2,
        cells=1,
        params={
            "rate": {"loguniform": [1e-5, 1]},
            "x": {"uniform": [1, 4]},
            "kind": {"choice": ["a"]},
        },
    )
    hpcml.write("breaks", "")
    said = hpcml("sweep", recipe, code=1).stderr
    assert "no cell before round 2 has a value of loss: 1 failed" in said
    cells = hpcml.status("bowl")["cells"]
    assert [cell["state"] for cell in cells] == ["failed", "pending"]
    assert (cells[1]["params"], cells[1]["reason"]) == ({}, "to be proposed in round 2")
    assert "pending: to be proposed in round 2" in hpcml("why", "bowl", "1").stdout


def test_a_training_takes_what_is_proposed(hpcml: Hpcml, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the engine torch is not installed")
    recipe = {
        "name": "bowl",
        "kind": "train",
        "params": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 300,
            "max_length": 16,
            "max_steps": 4,
            "logging_steps": 1,
            "lr_scheduler_type": "constant",
        },
        "sweep": {
            "search": {
                "rounds": 2,
                "cells": 1,
                "params": {"lr": {"loguniform": [1e-4, 1e-1]}, "seed": {"int": [0, 9]}},
            }
        },
        "train": {"data": {"files": [write_texts(tmp_path / "texts")]}},
    }
    hpcml("sweep", hpcml.write("recipe.yaml", yaml.safe_dump(recipe)))
    assert "\\u0000" in (hpcml.run_folder() / "cells.jsonl").read_text()
    for cell in results(hpcml):
        assert cell["metrics"]["learning_rate"] == pytest.approx(cell["params"]["learning_rate"])
