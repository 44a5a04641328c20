"""`hpcml sweep` of a training: killed again and again, it ends as if it had been left alone."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Hpcml, kill, of_folder, write_texts

pytest.importorskip("torch", reason="the engine torch is not installed")

KILLS = 20
RECIPE = {
    "name": "training",
    "kind": "train",
    "params": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 400,
        "max_length": 32,
        "max_steps": 4000,
        "eval_steps": 500,
        "save_steps": 25,
        "logging_steps": 20,
        "dropout": 0.1,
    },
    "sweep": {"grid": {"learning_rate": [1e-3, 1e-2]}},
}


def write(hpcml: Hpcml, texts: str) -> Path:
    train = {"data": {"files": [texts]}}
    return hpcml.write("recipe.yaml", yaml.safe_dump({**RECIPE, "train": train}))


def losses(hpcml: Hpcml) -> dict[str, dict[int, dict[str, Any]]]:
    """All metrics but the speed, by cell and step; what a continued training repeats is merged."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in hpcml.cell_dirs():
        by_step = found.setdefault(cell.name, {})
        for line in map(json.loads, (cell / "metrics.jsonl").read_text().splitlines()):
            line.pop("tokens_per_second", None)
            by_step.setdefault(line["step"], {}).update(line)
    return found


def test_killed_at_random_moments_it_ends_the_same(hpcml: Hpcml, tmp_path: Path) -> None:
    """The command, a worker or a payload gets SIGKILL, also while it saves, 20 times."""
    calm = Hpcml(tmp_path / "calm")
    calm.folder.mkdir()
    texts = write_texts(tmp_path / "texts")
    calm("sweep", write(calm, texts))
    chance = random.Random(20261130)
    recipe = write(hpcml, texts)
    saving = 0
    for number in range(KILLS):
        sweep = hpcml.start("sweep", recipe)
        # Half of them at any time, half while a checkpoint is being written.
        moment = time.monotonic() + chance.uniform(1.0, 9.0)
        if number % 2:
            moment += 10
            while not any(hpcml.folder.glob("runs/*/*/cells/*/checkpoints/.writing-*")):
                if sweep.poll() is not None or time.monotonic() > moment:
                    break
                time.sleep(0.0005)
            else:
                saving += 1
        time.sleep(0 if number % 2 else max(0.0, moment - time.monotonic()))
        victim = chance.choice(["command", "hpcml.worker", "hpcml.train"])
        victims = of_folder(hpcml.folder, victim) if victim != "command" else [sweep.pid]
        for pid in victims:
            kill(pid)
        sweep.kill()
        sweep.communicate()
        if sweep.returncode == 0:
            break
    hpcml("sweep", recipe)
    assert losses(hpcml) == losses(calm)
    attempts = sum(cell["attempts"] for cell in hpcml.status()["cells"])
    assert attempts > 6, "it was done before it could be killed"
    assert saving, "no kill came while a checkpoint was written"


def test_the_best_cell_is_exported(hpcml: Hpcml) -> None:
    recipe = write(hpcml, write_texts(hpcml.folder / "texts"))
    hpcml("sweep", recipe, "--set", "params.max_steps=60")
    hpcml("export", "training", "best", hpcml.folder / "model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(hpcml.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(hpcml.folder / "model")
    inputs = tokenizer("import os", return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=5).shape[1] > inputs["input_ids"].shape[1]
