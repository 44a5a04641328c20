"""Trainings on a real Slurm: the same numbers as on one machine, whatever happens on the way."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY, Hpcml, wait_until, write_texts
from tests.integration.slurm.conftest import SITE, LoginNode

pytest.importorskip("torch", reason="the engine torch is not installed")

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 400,
    "max_length": 32,
    "max_steps": 30,
    "eval_steps": 15,
    "save_steps": 10,
    "logging_steps": 5,
}


def lr_sweep(texts: str, **keys: Any) -> dict[str, Any]:
    return {
        "name": "lr_sweep",
        "kind": "train",
        "params": TINY,
        "sweep": {"grid": {"learning_rate": [1e-3, 1e-2], "seed": [0, 1]}},
        "train": {"data": {"files": [texts]}},
        "resources": {"time": "10m"},
        "array": {"max_running": 2},
        **keys,
    }


def losses(runs: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Every loss of every cell, in order."""
    found = {}
    for path in sorted(runs.glob("*/*/cells/*/metrics.jsonl")):
        lines = map(json.loads, path.read_text().splitlines())
        found[path.parent.name] = [
            (line["step"], line.get("loss"), line.get("eval_loss")) for line in lines
        ]
    return found


def test_a_sweep_in_a_container_gives_what_this_machine_gives(
    login: LoginNode, apptainer: Path, tmp_path: Path
) -> None:
    texts = write_texts(tmp_path / "texts")
    here = Hpcml(tmp_path / "here")
    here("sweep", here.write("recipe.yaml", yaml.safe_dump(lr_sweep(texts))), "--site", "local")
    # The image has no torch: it gets this Python with all that is installed for it.
    folders = sorted({sys.prefix, sys.base_prefix, str(REPOSITORY)} - {"/usr"})
    container = {
        "image": str(apptainer),
        "binds": [f"{folder}:{folder}:ro" for folder in folders],
        "python": sys.executable,
    }
    site = {**SITE, "container": {"runtime": "apptainer"}}
    login.write("site_configs/cluster.yaml", yaml.safe_dump(site))
    recipe = login.write("recipe.yaml", yaml.safe_dump(lr_sweep(texts, container=container)))
    login("sweep", recipe, "--wait")
    assert len(login.jobs()) == 1
    assert losses(login.folder / "runs") == losses(here.folder / "runs")


def final_weights(runs: Path) -> list[str]:
    """The digest of the weights that each cell ended with."""
    digests = []
    for pointer in sorted(runs.glob("*/*/cells/*/checkpoints/final")):
        manifest = json.loads(
            (pointer.parent / pointer.read_text().strip() / "manifest.json").read_text()
        )
        digests += [entry["sha256"] for name, entry in manifest["files"].items() if "model" in name]
    assert digests
    return digests


LONG = {**TINY, "max_steps": 4000, "eval_steps": 2000, "save_steps": 1000, "dropout": 0.1}


def long(texts: str, **keys: Any) -> dict[str, Any]:
    return lr_sweep(texts, params=LONG, sweep={"grid": {"learning_rate": [1e-3]}}, **keys)


@pytest.mark.slurm_alone
def test_a_training_to_which_everything_happens(login: LoginNode, tmp_path: Path) -> None:
    """Its losses and its weights are those of a training that was left alone, to the last bit."""
    texts = write_texts(tmp_path / "texts")
    here = Hpcml(tmp_path / "here")
    here("sweep", here.write("recipe.yaml", yaml.safe_dump(long(texts))), "--site", "local")
    recipe = login.write("recipe.yaml", yaml.safe_dump(long(texts, slurm={"partition": "preempt"})))
    for coming_back, fates in (
        ("requeue", ["time", "requeue", "preemption", "node"]),
        ("chain", ["time"]),
    ):
        login.site(coming_back=coming_back, links=len(fates) + 1)
        root = tmp_path / coming_back
        login("sweep", recipe, "--root", root)
        wait_until(lambda root=root: list(root.glob("*/*/cells/*/events.jsonl")))
        (events,) = root.glob("*/*/cells/*/events.jsonl")
        for number, fate in enumerate(fates, 1):
            what = f"attempt {number} after {fates[: number - 1]}"
            wait_until(lambda n=number, e=events: trains(e.parent, n), 300, what)
            befall(login, fate, starts(events)[-1])
        wait_until(lambda e=events: e.with_name("result.json").exists(), 400, "its end")
        assert steps(root) == steps(here.folder / "runs")
        assert final_weights(root) == final_weights(here.folder / "runs")
        assert len(starts(events)) == len(fates) + 1


def steps(runs: Path) -> list[dict[int, list[Any]]]:
    """The losses of each cell by step; the last line of a step counts."""
    return [{step: line for step, *line in lines} for lines in losses(runs).values()]


def starts(events: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, events.read_text().splitlines())
    return [event for event in lines if event["event"] == "started"]


def trains(cell: Path, attempt: int) -> bool:
    """Whether this attempt at the cell has made steps of its own."""
    metrics, began = cell / "metrics.jsonl", starts(cell / "events.jsonl")
    if len(began) < attempt or not metrics.exists():
        return False
    since = datetime.fromisoformat(began[-1]["time"]).timestamp()
    return metrics.stat().st_mtime > since


def befall(login: LoginNode, fate: str, started: dict[str, Any]) -> None:
    """Let something happen to the job of an attempt."""
    cluster, job, node = login.cluster, started["job"], started["host"]
    if fate == "time":  # what Slurm sends before the time limit, and not at a time
        cluster.run("scancel", "--batch", "--signal=USR1", job)
    elif fate == "requeue":
        cluster.run("scontrol", "requeue", job)
    elif fate == "preemption":
        cluster.submit("-w", node, "--exclusive", "-t1", script="true", folder=login.folder)
    else:
        cluster.set_node(node, "down")


def test_three_stages_with_one_command(login: LoginNode) -> None:
    """A sweep, its best cell trained longer, and the export: jobs that wait for each other."""
    data = {"data": {"files": [write_texts(login.folder / "texts")]}}
    longer = {name: TINY[name] for name in ("max_length", "max_steps", "save_steps")}
    recipe = {
        "name": "study",
        "resources": {"time": "10m"},
        "array": {"max_running": 2},
        "stages": {
            "explore": {
                "kind": "train",
                "params": TINY,
                "sweep": {"grid": {"learning_rate": [1e-4, 1e-2]}},
                "train": data,
            },
            "longer": {
                "needs": ["explore"],
                "kind": "train",
                "params": {
                    **longer,
                    "learning_rate": "{{ stages.explore.best.params.learning_rate }}",
                },
                "train": {**data, "model": "{{ stages.explore.best.checkpoint }}"},
            },
            "export": {
                "needs": ["longer"],
                "kind": "command",
                "command": {
                    "run": [
                        sys.executable,
                        "-m",
                        "hpcml",
                        "export",
                        "{{ stages.longer.run }}",
                        "best",
                        str(login.folder / "model"),
                    ]
                },
            },
        },
    }
    path = login.write("recipe.yaml", yaml.safe_dump(recipe, sort_keys=False))
    login("sweep", path, "--wait")
    (longer_cell,) = login.folder.glob("runs/study.longer/*/cells/*/cell.json")
    parameters = json.loads(longer_cell.read_text())["payload"]["parameters"]
    assert parameters["learning_rate"] == 1e-2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(login.folder / "model")
    assert model.config.hidden_size == TINY["hidden_size"]
    AutoTokenizer.from_pretrained(login.folder / "model")
