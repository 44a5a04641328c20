"""Small cells to train in tests: in this process, or as the worker starts them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcml.train.config import TrainingJob
from hpcml.train.stop import StopRequest

ROOT = Path(__file__).parents[3]

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 320,
    "max_length": 16,
    "global_batch_size": 4,
    "max_steps": 12,
    "eval_steps": 5,
    "save_steps": 5,
    "logging_steps": 4,
    "learning_rate": 1e-2,
}
MODEL_ONLY = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


class StopAfter(StopRequest):
    """Asks to stop after a number of steps, as a signal at that moment would."""

    def __init__(self, steps: int | None = None) -> None:
        super().__init__(None)
        self._left = steps

    @property
    def requested(self) -> bool:
        if self._left is not None:
            self._left -= 1
        return self._left is not None and self._left <= 0


def write_corpus(folder: Path, files: int = 40) -> str:
    """A corpus of simple sentences; returns its glob pattern."""
    folder.mkdir(parents=True)
    chooser = random.Random(7)
    nouns = ["cat", "dog", "house", "tree", "river", "stone", "light", "cloud", "road", "bird"]
    verbs = ["sees", "finds", "likes", "follows", "leaves"]
    for number in range(files):
        lines = []
        for _ in range(chooser.randint(5, 60)):
            subject, thing = chooser.choice(nouns), chooser.choice(nouns)
            lines.append(f"the {subject} {chooser.choice(verbs)} the {thing}.\n")
        (folder / f"text{number:03}.txt").write_text("".join(lines))
    return str(folder / "*.txt")


def write_cell(
    cell_dir: Path,
    pattern: str,
    parameters: Mapping[str, Any] | None = None,
    model: Path | None = None,
    packing: bool = True,
    keep: int = 2,
    interval: float | str = "auto",
    data: Mapping[str, Any] | None = None,
    objective: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
    engine: str = "torch",
    deepspeed: Mapping[str, Any] | None = None,
) -> Path:
    """A cell's folder with its ``cell.json``; ``parameters`` go on top of ``TINY``."""
    cell_dir.mkdir(parents=True)
    chosen = {**TINY, **(parameters or {})}
    if model is not None:
        chosen = {name: value for name, value in chosen.items() if name not in MODEL_ONLY}
    payload = {
        "engine": engine,
        "model": str(model) if model else None,
        "data": {
            "source": None,
            "files": [pattern],
            "tokenizer": None,
            "eval_fraction": 0.1,
            "packing": packing,
            **(data or {}),
        },
        "checkpoint": {"interval": interval, "keep": keep},
        "objective": objective or {"metric": "eval_loss", "mode": "min"},
        "parameters": chosen,
        "deepspeed": deepspeed or {},
    }
    cell = {"id": "tiny", "index": 0, "params": given or {}, "payload": payload}
    (cell_dir / "cell.json").write_text(json.dumps(cell))
    return cell_dir


def environment(cell_dir: Path, data_root: Path) -> dict[str, str]:
    """What the worker tells a payload of one rank."""
    return {
        "HPCML_CELL_DIR": str(cell_dir),
        "HPCML_DATA_ROOT": str(data_root),
        "HPCML_METRICS": str(cell_dir / "metrics.jsonl"),
        "HPCML_STOP_FILE": str(cell_dir / "stop"),
    }


def train(
    cell_dir: Path,
    data_root: Path,
    stop_after: int | None = None,
    more: Mapping[str, str] | None = None,
) -> int:
    """Train a cell in this process; returns the exit code. ``more`` is environment."""
    job = TrainingJob.load(cell_dir, {**environment(cell_dir, data_root), **(more or {})})
    if job.engine == "megatron":
        from hpcml.train.megatron import engine
    elif job.engine == "deepspeed":
        from deepspeed.utils import groups
        from torch.distributed.distributed_c10d import _world

        from hpcml.train import deepspeed_engine as engine

        forget()
        if groups._WORLD_GROUP not in _world.pg_map:
            # DeepSpeed keeps it for a process's life; a training of megatron has ended it since.
            groups._release_process_group_references()
    else:
        from hpcml.train import torch_engine as engine
    return engine.run(job, StopAfter(stop_after))


def forget() -> None:
    """accelerate keeps the precision of a process's first training, and whose it was."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    unset_hf_deepspeed_config()
    for name in ("ACCELERATE_USE_DEEPSPEED", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)


def start(
    cell_dir: Path, data_root: Path, rank: int = 0, world_size: int = 1, port: int = 0
) -> subprocess.Popen[bytes]:
    """Start a rank as the worker does."""
    log = open(cell_dir / f"log.{rank}", "ab")  # noqa: SIM115
    return subprocess.Popen(
        [sys.executable, "-m", "hpcml.train"],
        env={
            **os.environ,
            **environment(cell_dir, data_root),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        },
        stdout=log,
        stderr=log,
    )


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


class Job(NamedTuple):
    """A training that some processes do together.

    Attributes:
        cell: the cell's folder.
        processes: how many.
        stop_after: the steps after which they are asked to stop.
        parameters: those that are others than the cell says, as a submission may have it.
    """

    cell: Path
    processes: int
    stop_after: int | None = None
    parameters: Mapping[str, Any] = {}


def train_in_turn(folder: Path, data_root: Path, jobs: Sequence[Job]) -> list[list[int]]:
    """Train several cells, each with some of the same processes.

    Args:
        folder: for the logs of the processes.
        data_root: where tokenized data lies.
        jobs: one after the other.

    Returns:
        For each cell the exit codes of its processes.
    """
    folder.mkdir(parents=True)
    described = [
        {
            **job._asdict(),
            "cell": str(job.cell),
            "data_root": str(data_root),
        }
        for job in jobs
    ]
    (folder / "jobs.json").write_text(json.dumps(described))
    count = max(job.processes for job in jobs)
    script = Path(__file__).with_name("ranks.py")
    processes = []
    for rank in range(count):
        log = open(folder / f"log.{rank}", "ab")  # noqa: SIM115
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), str(folder / "jobs.json"), str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                stdout=log,
                stderr=log,
            )
        )
    try:
        # One that fails leaves the others waiting.
        while None in (codes := [process.poll() for process in processes]) and not any(codes):
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((folder / f"log.{rank}").read_text()[-2000:] for rank in range(count))
    assert not any(codes), logs
    each = [json.loads((folder / f"codes.{rank}.json").read_text()) for rank in range(count)]
    return [[codes[number] for codes in each[: job.processes]] for number, job in enumerate(jobs)]


def metrics(cell_dir: Path) -> dict[int, dict[str, float]]:
    """The reproducible metrics by step; a later line replaces an earlier one."""
    merged: dict[int, dict[str, float]] = {}
    for line in (cell_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        record.pop("tokens_per_second", None)
        merged.setdefault(record.pop("step"), {}).update(record)
    return merged


def events(cell_dir: Path, name: str) -> list[dict[str, Any]]:
    """The cell's events of one kind."""
    path = cell_dir / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == name]


def weights(cell_dir: Path) -> str:
    """A digest of the newest checkpoint's weights."""
    name = (cell_dir / "checkpoints" / "latest").read_text().strip()
    digest = hashlib.sha256()
    if (cell_dir / "checkpoints" / name / "megatron").is_dir():
        from transformers import LlamaConfig

        from hpcml.train.megatron.weights import of_checkpoint

        folder = cell_dir / "checkpoints" / name / "model"
        for tensor_name, tensor in of_checkpoint(folder, LlamaConfig.from_pretrained(folder)):
            digest.update(tensor_name.encode() + tensor.contiguous().numpy().tobytes())
    for file in sorted((cell_dir / "checkpoints" / name / "model").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
