"""Run folders as the login node, the worker and the payload would leave them."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpcml.runs.folder import RunFolder

START = 1_800_000_000.0


def at(seconds: float) -> str:
    """An event's time, this many seconds after the fake run's beginning."""
    moment = datetime.fromtimestamp(START + seconds, timezone.utc)
    return moment.isoformat(timespec="milliseconds")


def make_cells(count: int, **columns: Any) -> list[dict[str, Any]]:
    """Cells with a learning rate and a seed, and further parameters as lists of values."""
    return [
        {
            "index": index,
            "id": f"c{index:05x}",
            "params": {
                "learning_rate": 0.001 * (index + 1),
                "seed": index % 3,
                **{name: values[index] for name, values in columns.items()},
            },
            "payload": {"argv": ["true"]},
        }
        for index in range(count)
    ]


def lines(cells: Iterable[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Cells as a run folder is given them."""
    for cell in cells:
        rest = {key: value for key, value in cell.items() if key not in ("index", "id")}
        yield cell["id"], json.dumps(rest)[1:-1]


class FakeRun:
    """A run folder, and methods that do what the worker and the payload do."""

    def __init__(
        self,
        root: Path,
        cells: list[dict[str, Any]],
        *,
        name: str = "toy",
        run_id: str = "abc123",
        objective: dict[str, str] | None = None,
        kind: str = "command",
    ) -> None:
        varying = {
            key
            for cell in cells
            for key in cell["params"]
            if cell["params"][key] != cells[0]["params"].get(key)
        }
        plan = {
            "digest": f"digest-of-{run_id}",
            "name": name,
            "run_id": run_id,
            "kind": kind,
            "objective": objective,
            "swept": sorted(varying),
            "cells": len(cells),
            "scheduler": "local",
        }
        self.cells = cells
        self.folder = RunFolder.create(root, name, run_id, plan, "name: toy\n", "", lines(cells))

    def dir(self, index: int) -> Path:
        """The folder of a cell, created if absent."""
        path = self.folder.cell_dir(self.cells[index]["id"])
        path.mkdir(exist_ok=True)
        return path

    def event(self, index: int, kind: str, seconds: float = 0.0, **fields: Any) -> None:
        """Append an event."""
        self.append(index, "events.jsonl", {"time": at(seconds), "event": kind, **fields})

    def append(self, index: int, file: str, record: object) -> None:
        """Append a JSON line to one of a cell's files."""
        with (self.dir(index) / file).open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def start(self, index: int, seconds: float = 0.0, attempt: int = 1, **fields: Any) -> None:
        """The worker starts an attempt. By default it is dead: nobody holds the lock."""
        record = {"attempt": attempt, "host": socket.gethostname(), "pid": os.getpid(), **fields}
        self.event(index, "started", seconds, **record)

    def metrics(self, index: int, *records: dict[str, Any]) -> None:
        """The payload reports metrics."""
        with (self.dir(index) / "metrics.jsonl").open("a") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records)

    def end(
        self, index: int, cause: str, seconds: float = 10.0, reason: str = "", attempt: int = 1
    ) -> None:
        """The worker ends an attempt."""
        code = {"done": 0, "stopped": 75}.get(cause, 1)
        self.event(
            index, "ended", seconds, attempt=attempt, code=code, cause=cause, reason=reason or cause
        )

    def done(self, index: int, seconds: float = 10.0, **metrics: float) -> None:
        """A whole life that went well."""
        self.start(index)
        self.metrics(index, {"step": 10, "total_steps": 10, **metrics})
        self.end(index, "done", seconds)

    def failed(self, index: int, reason: str = "exit code 1: boom", **metrics: float) -> None:
        """A whole life that went badly."""
        self.start(index)
        if metrics:
            self.metrics(index, metrics)
        self.end(index, "application", reason=reason)

    def checkpoint(self, index: int, step: int, *, pointer: str = "latest") -> Path:
        """A checkpoint, and the pointer to it."""
        folder = self.dir(index) / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder.parent / pointer).write_text(folder.name + "\n")
        self.event(index, "checkpoint", step=step, path=str(folder), seconds_taken=0.1)
        return folder

    @contextmanager
    def alive(self, index: int) -> Iterator[None]:
        """Hold the lock of a cell, as a living attempt does."""
        with (self.dir(index) / "events.jsonl").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
