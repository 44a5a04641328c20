"""Trainings on a real Slurm: the same numbers as on one machine, whatever happens on the way."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY, Hpcml, write_texts
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
