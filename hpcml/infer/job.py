"""What to ask which model: the payload of a cell as typed values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class InferenceError(Exception):
    """The inference can't start or go on; the message, one line, says why and what to do."""


@dataclass(frozen=True)
class Input:
    """Where the rows come from.

    Attributes:
        files: paths or patterns, absolute.
        format: ``parquet``, ``jsonl``, ``csv`` or ``openai``.
        key: the column that names a row, or None for its number.
    """

    files: tuple[str, ...]
    format: str
    key: str | None = None


@dataclass(frozen=True)
class Output:
    """Where the answers go.

    Attributes:
        path: a file, or a folder with ``rows_per_file``; None is a file in the cell's folder.
        format: ``parquet`` or ``openai``.
        columns: columns of the input that the output has too; None is all.
        rows_per_file: rows of each file of the folder; None makes one file.
    """

    path: Path | None = None
    format: str = "parquet"
    columns: tuple[str, ...] | None = ()
    rows_per_file: int | None = None


@dataclass(frozen=True)
class InferenceJob:
    """One cell, which several workers share.

    Attributes:
        cell_id, cell_index, params: what the cell is, for its result.
        cell_dir: the folder that all workers share.
        worker: the number of this worker.
        workers: how many there were when the cell was submitted.
        engine: ``transformers``, ``vllm`` or ``sglang``.
        model: the model's folder.
        adapter: the folder of a LoRA adapter, or None.
        parameters: complete generation parameters by canonical name.
        arguments: further arguments of the engine.
        input, output: where rows come from and go to.
        prompt, system: templates over the columns of a row, or None.
        messages: the column of chat messages, or None.
        chat: whether the prompt becomes a message of a chat.
        chat_template: a Jinja template instead of the tokenizer's own, or None.
        shard_rows: rows of a shard; None decides by their number.
        max_failed: the part of the rows that may fail.
        metrics: the file for metrics lines, or None.
    """

    cell_dir: Path
    engine: str
    model: Path
    parameters: Mapping[str, Any]
    input: Input
    output: Output = Output()
    cell_id: str = "cell"
    cell_index: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    worker: int = 0
    workers: int = 1
    adapter: Path | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    system: str | None = None
    messages: str | None = None
    chat: bool = False
    chat_template: str | None = None
    shard_rows: int | None = None
    max_failed: float = 0.01
    metrics: Path | None = None

    @property
    def worker_dir(self) -> Path:
        """The folder of this worker, or of another one after a change of the number."""
        return self.dir_of(self.worker)

    def dir_of(self, worker: int) -> Path:
        """The folder of a worker."""
        return self.cell_dir / "workers" / str(worker)

    @classmethod
    def load(cls, worker_dir: Path, environment: Mapping[str, str]) -> InferenceJob:
        """Read ``cell.json``.

        Args:
            worker_dir: the worker's folder, ``cells/<id>/workers/<number>``.
            environment: with ``HPCML_METRICS`` and ``HPCML_WORKERS``, where they are set.

        Raises:
            InferenceError: the file or a value is missing or wrong.
        """
        path = worker_dir / "cell.json"
        try:
            cell = json.loads(path.read_text())
            payload = cell["payload"]
            source, output = payload["input"], payload["output"]
            columns = output["columns"]
            return cls(
                cell_dir=worker_dir.parent.parent,
                cell_id=cell["id"],
                cell_index=cell["index"],
                params=cell["params"],
                worker=int(worker_dir.name),
                workers=int(environment.get("HPCML_WORKERS", "1")),
                engine=payload["engine"],
                model=_model(payload["model"]),
                adapter=_path(payload["adapter"]),
                parameters=payload["parameters"],
                arguments=payload["engine_args"],
                input=Input(tuple(source["files"]), source["format"], source["key"]),
                output=Output(
                    _path(output["path"]),
                    output["format"],
                    None if columns is None else tuple(columns),
                    output["rows_per_file"],
                ),
                prompt=payload["prompt"],
                system=payload["system"],
                messages=payload["messages"],
                chat=payload["chat"],
                chat_template=payload["chat_template"],
                shard_rows=payload["shard_rows"],
                max_failed=payload["max_failed"],
                metrics=_path(environment.get("HPCML_METRICS")),
            )
        except FileNotFoundError as error:
            raise InferenceError(f"{path} is missing: the worker writes it") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InferenceError(f"{path} is no cell of an inference: {error!r}") from error


def output_path(job: InferenceJob) -> Path:
    """Where the output of a cell is."""
    if job.output.path is not None:
        return job.output.path
    if job.output.format == "openai":
        return job.cell_dir / "output.jsonl"
    return job.cell_dir / ("output" if job.output.rows_per_file else "output.parquet")


def _model(value: str) -> Path:
    """A model's folder; of a checkpoint of hpcml, the folder of the model in it."""
    path = Path(value)
    return path / "model" if (path / "model" / "config.json").is_file() else path


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None
