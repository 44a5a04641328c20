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
        manifest = json.loads((pointer.parent / pointer.read_text() / "manifest.json").read_text())
        digests += [entry["sha256"] for name, entry in manifest["files"].items() if "model" in name]
    assert digests
    return digests


LONG = {**TINY, "max_steps": 3000, "eval_steps": 1000, "save_steps": 500, "dropout": 0.1}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Hpcml:
    """A training on this machine that nothing happens to."""
    here = Hpcml(tmp_path_factory.mktemp("undisturbed"))
    texts = write_texts(here.folder / "texts")
    here("sweep", here.write("recipe.yaml", yaml.safe_dump(long(texts))), "--site", "local")
    return here


def long(texts: str, **keys: Any) -> dict[str, Any]:
    return lr_sweep(texts, params=LONG, sweep={"grid": {"learning_rate": [1e-3]}}, **keys)


@pytest.mark.slurm_alone
@pytest.mark.parametrize(
    ("coming_back", "fates"),
    [("requeue", ["time", "requeue", "preemption", "node"]), ("chain", ["time"])],
)
def test_a_training_to_which_everything_happens(
    login: LoginNode, undisturbed: Hpcml, coming_back: str, fates: list[str]
) -> None:
    """Its losses and its weights are those of a training that was left alone, to the last bit."""
    login.site(coming_back=coming_back, links=len(fates) + 1)
    texts = write_texts(login.folder / "texts")
    recipe = long(texts, slurm={"partition": "preempt"})
    login("sweep", login.write("recipe.yaml", yaml.safe_dump(recipe)))
    (cell,) = login.status()["cells"]
    folder = login.run_folder() / "cells" / cell["id"]
    for number, fate in enumerate(fates, 1):
        wait_until(lambda n=number: trains(folder, n), 300, f"attempt {number}")
        started = login.events("started")[cell["id"]][-1]
        befall(login, fate, started["job"], started["host"])
    wait_until(lambda: (folder / "result.json").exists(), 400, "its end")
    got, expected = (
        [{step: line for step, *line in lines} for lines in losses(folder / "runs").values()]
        for folder in (login.folder, undisturbed.folder)
    )
    assert got == expected
    assert final_weights(login.folder / "runs") == final_weights(undisturbed.folder / "runs")
    assert len(login.events("started")[cell["id"]]) == len(fates) + 1


def trains(cell: Path, attempt: int) -> bool:
    """Whether this attempt at the cell has made steps of its own."""
    events, metrics = cell / "events.jsonl", cell / "metrics.jsonl"
    if not metrics.exists() or events.read_text().count('"event":"started"') < attempt:
        return False
    began = [json.loads(line) for line in events.read_text().splitlines()]
    since = datetime.fromisoformat([e["time"] for e in began if e["event"] == "started"][-1])
    return metrics.stat().st_mtime > since.timestamp()


def befall(login: LoginNode, fate: str, job: str, node: str) -> None:
    """Let something happen to a job."""
    cluster = login.cluster
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
