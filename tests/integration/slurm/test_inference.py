"""Batch inference on a real Slurm: every row once, whatever is killed, taken away or cancelled."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import Hpcml, kill, of_folder, wait_until
from tests.infer_models import make_model, questions
from tests.integration.slurm.conftest import LoginNode

pytest.importorskip("torch", reason="the engine transformers is not installed")

ROWS = 1200
KILLS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


def recipe(here: Hpcml, model: Path, **changes: Any) -> Path:
    texts = questions(ROWS)
    keys = [f"key{number}" for number in range(ROWS)]
    pq.write_table(pa.table({"id": keys, "question": texts}), here.folder / "in.parquet")
    document = {
        "name": "ask",
        "kind": "infer",
        "params": {"temperature": 0, "max_tokens": 16},
        "resources": {"time": "10m"},
        "retry": {"killed": 50, "application": 50},
        "infer": {
            "model": str(model),
            "input": {"files": "in.parquet", "key": "id"},
            "prompt": "{{ question }}",
            "engine_args": {"dtype": "float32"},
            "shard_rows": 48,
            "workers": 4,
            **changes,
        },
    }
    return here.write("ask.yaml", json.dumps(document))


def answers(here: Hpcml) -> list[tuple[Any, ...]]:
    (cell,) = here.cell_dirs()
    rows = pq.read_table(cell / "output.parquet").to_pylist()
    return [(row["key"], row["answer"], row["output_tokens"]) for row in rows]


def parts(here: Hpcml) -> int:
    return len(list(here.folder.glob("runs/*/*/cells/*/rounds/1/parts/*.arrow")))


@pytest.mark.slurm_alone
def test_killed_taken_away_cancelled(
    login: LoginNode, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    here = Hpcml(tmp_path_factory.mktemp("undisturbed"))
    here("infer", "--batch", recipe(here, model, workers=1), "--site", "local")

    asked = recipe(login, model)
    login("infer", "--batch", asked)
    chooser = random.Random(2)
    wait_until(lambda: parts(login) >= 1, 120)
    kills = 0
    # Slurm may hold a job that comes back to a node which has not got rid of it yet: then nothing
    # is left to kill, and the others go on below.
    end = time.monotonic() + 60
    while kills < KILLS and parts(login) < ROWS // 48 // 2 and time.monotonic() < end:
        word = chooser.choice(["hpcml.infer.process", "hpcml.infer", "hpcml.worker"])
        if victims := of_folder(login.folder, word):
            kill(chooser.choice(victims))
            kills += 1
        time.sleep(chooser.uniform(0.5, 2))
    assert kills >= 2
    nodes = {entry["nodes"] for entry in login.cluster.squeue() if entry["state"] == "RUNNING"}
    if nodes:
        login.cluster.set_node(min(nodes), "down")
    assert parts(login) < ROWS // 48
    login("cancel", "ask", "0")
    wait_until(lambda: not login.queue(), 120)
    (cell,) = login.cell_dirs()
    assert not (cell / "result.json").exists()
    before = parts(login)

    login("infer", "--batch", asked, "--wait", timeout=400)
    proof = json.loads((cell / "merge.json").read_text())
    assert (proof["rows_in"], proof["rows_out"], proof["duplicates"]) == (ROWS, ROWS, 0)
    assert answers(login) == answers(here)
    assert before < ROWS // 48


def test_workers_are_added_while_it_runs(login: LoginNode, model: Path) -> None:
    asked = recipe(login, model, workers=1)
    login("infer", "--batch", asked)
    wait_until(lambda: parts(login) >= 1, 120)
    # The first one has to wait for the others, or it might be done before they are there.
    (engine,) = of_folder(login.folder, "hpcml.infer.process")
    os.kill(engine, signal.SIGSTOP)
    assert "submitted" in login("infer", "--batch", asked, "--more", "2").stdout
    (cell,) = login.cell_dirs()
    wait_until(lambda: len(list((cell / "workers").iterdir())) == 3, 120)
    os.kill(engine, signal.SIGCONT)
    wait_until(lambda: (cell / "result.json").exists(), 200)
    assert sorted(path.name for path in (cell / "workers").iterdir()) == ["0", "1", "2"]
    # The result is there before the last worker has said its last word.
    wait_until(lambda: login.status()["cells"][0]["state"] != "running", 60)
    shown = login.status()["cells"][0]
    assert (shown["state"], shown["step"]) == ("done", ROWS)
    assert len(set(answers(login))) == ROWS
    text = login("results", "ask").stdout
    assert f"{ROWS:,} rows of {ROWS:,}, each once" in text
    # A worker that came too late to find anything is done as well.
    wait_until(lambda: not login.queue(), 60)
    for job in login.jobs():
        login.cluster.wait_until(
            lambda job=job: {entry["State"] for entry in login.cluster.sacct(job)} == {"COMPLETED"},
            30,
        )
