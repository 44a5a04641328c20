"""Jobs and engines for tests of the core, without any model."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hpcml.infer.engine import Answer, Request
from hpcml.infer.job import InferenceJob, Input, Output
from hpcml.infer.process import EngineDied

PARAMETERS = {"temperature": 0, "max_tokens": 8, "n": 1, "seed": 0}


def make_job(folder: Path, **changes: Any) -> InferenceJob:
    """A job in ``folder``, for the engine vllm unless ``changes`` say otherwise."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    settings: dict[str, Any] = {
        "cell_dir": folder / "cell",
        "engine": "vllm",
        "model": model,
        "parameters": PARAMETERS,
        "input": Input((str(folder / "in.parquet"),), "parquet", "id"),
        "prompt": "{{ text }}",
        **changes,
    }
    job = InferenceJob(**settings)
    job.worker_dir.mkdir(parents=True, exist_ok=True)
    (job.worker_dir / "events.jsonl").touch()
    return job


def write_input(folder: Path, texts: Sequence[str | None], **columns: list[Any]) -> None:
    """A Parquet file with a key and a text in each row."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = [f"k{number}" for number in range(len(texts))]
    table = pa.table({"id": pa.array(keys, pa.string()), "text": pa.array(texts, pa.string())})
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, folder / "in.parquet")


def hold(job: InferenceJob) -> int:
    """The lock that the worker of a job holds."""
    descriptor = os.open(job.worker_dir / "events.jsonl", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


class Never:
    """Nobody asks to leave."""

    requested = False


class StandIn:
    """Answers each row with its text backwards.

    Args:
        limit: rows at a time.
        each: called with every request; it may raise :class:`EngineDied`.
    """

    def __init__(self, limit: int = 8, each: Callable[[Request], None] | None = None) -> None:
        self.ready = False
        self.limit = limit
        self._each = each
        self._open: list[Request] = []

    def poll(self, timeout: float) -> list[Answer]:
        self.ready = True
        requests, self._open = self._open, []
        for request in requests:
            if self._each is not None:
                self._each(request)
        return [
            Answer(
                request.row,
                text=[request.text[::-1]],
                finish_reason=["stop"],
                prompt_tokens=len(request.text),
                output_tokens=[len(request.text)],
                seconds=0.0,
            )
            for request in requests
        ]

    def send(self, requests: Sequence[Request]) -> None:
        self._open += requests

    def close(self) -> None:
        pass


def output(job: InferenceJob) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(job.cell_dir / "output.parquet").to_pylist()
    return rows


def proof(job: InferenceJob) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.cell_dir / "merge.json").read_text())
    return found


__all__ = [
    "PARAMETERS", "EngineDied", "Never", "Output", "StandIn", "hold", "make_job", "output", "proof",
    "write_input",
]  # fmt: skip
