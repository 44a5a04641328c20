"""What came out of an inference: its proof, what it took, and some of its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcml.files import plain_errors
from hpcml.runs.events import JsonLines, parse_time
from hpcml.runs.folder import RunFolder, workers


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of the output: its key, and its answer or why there is none."""

    key: str
    text: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Answers:
    """The merged answers of one cell.

    Attributes:
        proof: what ``merge.json`` says.
        worker_seconds: how long workers ran, all attempts together.
        wall_seconds: from the first start to the last end.
        workers: how many there were.
    """

    proof: dict[str, Any]
    worker_seconds: float
    wall_seconds: float
    workers: int

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of answers over the whole time, with the starts of engines in it."""
        return self.proof["output_tokens"] / self.wall_seconds if self.wall_seconds else None


def answers(run: RunFolder, cell_id: str) -> Answers | None:
    """The answers of a cell; None while they are not merged."""
    path = run.cell_dir(cell_id) / "merge.json"
    with plain_errors(f"read {path}"):
        try:
            proof = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
    spans = list(_attempts(run.cell_dir(cell_id)))
    begun = min((start for start, _ in spans), default=0.0)
    return Answers(
        proof,
        sum(end - start for start, end in spans),
        max((end for _, end in spans), default=0.0) - begun,
        len(workers(run.cell_dir(cell_id))),
    )


def samples(output: str, count: int) -> list[Sample]:
    """Rows from the beginning of an output, and the first that failed among many."""
    path = Path(output)
    if path.is_dir():
        path = min(path.glob("*.parquet"))
    with plain_errors(f"read {path}"):
        if path.suffix == ".jsonl":
            return [_of_line(line) for line in _lines(path, count)]
        import pyarrow.parquet as pq

        with pq.ParquetFile(path) as file:
            batch = next(file.iter_batches(count, columns=["key", "answer", "error"]), None)
        rows = [] if batch is None else batch.to_pylist()
    return [
        Sample(row["key"], row["error"] or _text(row["answer"]), row["error"] is not None)
        for row in rows
    ]


def _attempts(cell_dir: Path) -> Iterator[tuple[float, float]]:
    """Start and end of every attempt of every worker, as far as both are known."""
    for folder in workers(cell_dir):
        start: float | None = None
        for event in JsonLines(folder / "events.jsonl").read():
            if event.get("event") == "started":
                start = parse_time(event.get("time", ""))
            elif event.get("event") == "ended" and start is not None:
                yield start, parse_time(event.get("time", ""))
                start = None


def _lines(path: Path, count: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for _, line in zip(range(count), file, strict=False):
            yield line


def _of_line(line: bytes) -> Sample:
    record = json.loads(line)
    if record["error"] is not None:
        return Sample(record["custom_id"], record["error"]["message"], True)
    choices = record["response"]["body"]["choices"]
    found = [choice.get("text") or choice["message"]["content"] for choice in choices]
    return Sample(record["custom_id"], _text(found), False)


def _text(answer: Any) -> str:
    return " / ".join(map(str, answer)) if isinstance(answer, list) else str(answer)
