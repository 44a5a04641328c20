"""Successive halving on this machine: the same best cell for a part of the steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Hpcml, kill_everything_of, wait_until, write_texts

# Descends into a valley, from its own checkpoint, up to the step that it is told.
PROGRAM = """
import json, os, sys, hpcml
rate, momentum, start = map(float, sys.argv[1:4])
assert sys.argv[4:] in ([], ["--to=" + os.environ.get("HPCML_STEPS", "")])
path = os.path.join(os.environ["HPCML_CHECKPOINTS"], "state.json")
state = {"step": 0, "x": [4.0 + start, -3.0], "v": [0.0, 0.0]}
if os.path.exists(path):
    state = json.load(open(path))
steps = open(os.path.join(os.environ["HPCML_RUN_DIR"], "steps"), "a")
if os.path.exists(f"{rate}.breaks"):
    sys.exit("broken")
while state["step"] < int(os.environ.get("HPCML_STEPS", 45)):
    for place, slope in enumerate((1.0, 25.0)):
        gradient = slope * state["x"][place]
        state["v"][place] = momentum * state["v"][place] - rate * gradient
        state["x"][place] += state["v"][place]
    state["step"] += 1
    steps.write("x")
loss = sum(slope * x * x for slope, x in zip((1.0, 25.0), state["x"]))
hpcml.report(step=state["step"], loss=loss)
json.dump(state, open(path, "w"))
"""
RECIPE: dict[str, Any] = {
    "name": "valley",
    "kind": "command",
    "sweep": {
        "grid": {"rate": [0.001, 0.01, 0.03], "momentum": [0.0, 0.5, 0.8], "start": [0, 0.5, 1]},
        "halving": {"metric": "loss", "factor": 3, "rungs": 3, "steps": 45},
    },
    "command": {
        "run": [sys.executable, "run.py"]
        + [f"{{{{ params.{name} }}}}" for name in ("rate", "momentum", "start")]
    },
}


def write(hpcml: Hpcml, **changes: Any) -> Path:
    hpcml.write("run.py", PROGRAM)
    return hpcml.write("recipe.yaml", yaml.safe_dump({**RECIPE, **changes}))


def small(hpcml: Hpcml) -> Path:
    """Three cells and two rungs, where how many there are says nothing."""
    grid = {"rate": [0.001, 0.01, 0.03], "momentum": [0.0], "start": [0]}
    halving = {"metric": "loss", "factor": 2, "rungs": 2, "steps": 45}
    run = [*RECIPE["command"]["run"], "--to={{ halving.steps }}"]
    sweep = {"grid": grid, "halving": halving}
    return write(hpcml, sweep=sweep, command={"run": run})


def results(hpcml: Hpcml, name: str) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(hpcml("results", name, "--json").stdout)["cells"]
    return cells


def test_it_finds_the_best_of_the_full_sweep_for_a_part_of_its_steps(hpcml: Hpcml) -> None:
    hpcml("sweep", write(hpcml))
    grid = {"grid": RECIPE["sweep"]["grid"]}
    hpcml("sweep", write(hpcml, name="full", objective={"metric": "loss"}, sweep=grid))
    best, whole = results(hpcml, "valley")[0], results(hpcml, "full")[0]
    assert (best["id"], best["metrics"]) == (whole["id"], whole["metrics"])
    steps, all_steps = (
        next(hpcml.folder.glob(f"runs/{name}/*/steps")).stat().st_size
        for name in ("valley", "full")
    )
    assert all_steps == 27 * 45
    assert steps == 27 * 5 + 9 * 10 + 3 * 30
    status = hpcml.status("valley")
    assert status["states"] == {"dropped": 24, "done": 3}
    reasons = [cell["reason"] for cell in status["cells"]]
    assert reasons.count("dropped at rung 1") == 18
    assert reasons.count("dropped at rung 2") == 6
    again = hpcml("sweep", write(hpcml)).stderr
    assert "rung 3 of 3: 0 cells" in again


def test_a_failed_cell_is_out_and_the_others_go_on(hpcml: Hpcml) -> None:
    recipe = small(hpcml)
    hpcml.write("0.03.breaks", "")
    hpcml("sweep", recipe, code=1)
    assert hpcml.status("valley")["states"] == {"failed": 1, "done": 2}
    assert [cell["params"]["rate"] for cell in results(hpcml, "valley")] == [0.01, 0.001, 0.03]


def test_the_command_given_again_goes_on_where_a_rung_broke_off(hpcml: Hpcml) -> None:
    recipe = small(hpcml)
    for rate in (0.001, 0.01, 0.03):
        hpcml.write(f"{rate}.breaks", "")
    said = hpcml("sweep", recipe, code=1).stderr
    assert "rung 1 has no cell with a value of loss: 3 failed" in said
    for path in hpcml.folder.glob("*.breaks"):
        path.unlink()
    hpcml("sweep", recipe)
    assert hpcml.status("valley")["states"] == {"dropped": 1, "done": 2}


def test_killed_at_any_moment_it_ends_the_same(hpcml: Hpcml) -> None:
    recipe = small(hpcml)
    for seen in ("cells/*/rungs/1.json", "rungs/2.json"):
        sweep = hpcml.start("sweep", recipe)
        found = f"runs/valley/*/{seen}"
        wait_until(lambda found=found: any(hpcml.folder.glob(found)), what=seen)
        kill_everything_of(sweep)
    hpcml("sweep", recipe)
    assert hpcml.status("valley")["states"] == {"dropped": 1, "done": 2}


def test_a_training_goes_on_from_its_checkpoint_as_if_there_were_no_rungs(
    hpcml: Hpcml, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="the engine torch is not installed")
    texts = write_texts(tmp_path / "texts")
    recipe = {
        "name": "halved",
        "kind": "train",
        "params": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 300,
            "max_length": 16,
            "max_steps": 12,
            "dropout": 0.1,
        },
        "train": {"data": {"files": [texts]}},
    }
    sweep = {"grid": {"learning_rate": [1e-4, 1e-2]}}
    halving = {"halving": {"factor": 2, "rungs": 2}}
    hpcml("sweep", hpcml.write("a.yaml", yaml.safe_dump({**recipe, "sweep": sweep | halving})))
    alone = {**recipe, "name": "alone", "sweep": {"grid": {"learning_rate": [1e-2]}}}
    hpcml("sweep", hpcml.write("b.yaml", yaml.safe_dump(alone)))
    best, other = results(hpcml, "halved")
    (whole,) = results(hpcml, "alone")
    assert best["id"] == whole["id"]
    assert best["metrics"]["eval_loss"] == whole["metrics"]["eval_loss"]
    assert (other["state"], other["step"], other["reason"]) == ("dropped", 6, "dropped at rung 1")
    hpcml("export", "halved", "best", tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
