"""Megatron over several nodes, in containers, whose jobs end again and again."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import REPOSITORY, Hpcml, wait_until, write_texts
from tests.integration.slurm.conftest import SITE, LoginNode
from tests.integration.slurm.test_training import befall, final_weights, starts, steps, trains

pytest.importorskip("megatron.core", reason="the engine megatron is not installed")

#: On as many nodes, and this many copies of the model; four processes share each copy.
NODES = int(os.environ.get("HPCML_TEST_NODES", "2"))
COPIES = int(os.environ.get("HPCML_TEST_COPIES", "1"))


def training(texts: str, **keys: Any) -> dict[str, Any]:
    return {
        "name": "nodes",
        "kind": "train",
        "parallel": {"tp": 2, "pp": 2},
        "params": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "vocab_size": 400,
            "max_length": 32,
            "global_batch_size": 8,
            "max_steps": int(os.environ.get("HPCML_TEST_STEPS", "400")),
            "eval_steps": 100,
            "save_steps": 50,
            "logging_steps": 5,
            "dropout": 0.1,
        },
        "train": {"engine": "megatron", "data": {"files": [texts]}},
        **keys,
    }


@pytest.mark.slurm_alone
def test_a_chain_of_jobs_on_several_nodes(
    login: LoginNode, apptainer: Path, tmp_path: Path
) -> None:
    """Its time is over, a node goes down: the weights are those of one uninterrupted training."""
    texts = write_texts(tmp_path / "texts")
    here = Hpcml(tmp_path / "here")
    alone = training(texts, resources={"processes": 4 * COPIES})
    here("sweep", here.write("recipe.yaml", yaml.safe_dump(alone)), "--site", "local")

    folders = sorted({sys.prefix, sys.base_prefix, str(REPOSITORY)} - {"/usr"})
    binds = [f"{folder}:{folder}:ro" for folder in folders]
    container = {"image": str(apptainer), "binds": binds, "python": sys.executable}
    site = {
        **SITE,
        "container": {"runtime": "apptainer"},
        "slurm": {"coming_back": "chain", "links": 8},
    }
    login.write("site_configs/cluster.yaml", yaml.safe_dump(site))
    resources = {"nodes": NODES, "gpus": 4 * COPIES // NODES, "time": "10m"}
    recipe = training(texts, resources=resources, container=container)
    login("sweep", login.write("recipe.yaml", yaml.safe_dump(recipe)))

    runs = login.folder / "runs"
    wait_until(lambda: list(runs.glob("*/*/cells/*/events.jsonl")), 120, "its start")
    (events,) = runs.glob("*/*/cells/*/events.jsonl")
    for number, fate in enumerate(["time", "node"], 1):
        wait_until(lambda n=number: trains(events.parent, n), 200, f"attempt {number}")
        befall(login, fate, starts(events)[-1])
    wait_until(events.with_name("result.json").exists, 300, "its end")
    assert steps(runs) == steps(here.folder / "runs")
    assert final_weights(runs) == final_weights(here.folder / "runs")
    assert len(starts(events)) == 3
