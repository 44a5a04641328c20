"""One output from all parts, in the order of the input, and the proof that it is complete.

Memory does not grow with the output: where the parts are not in the order of the input already,
rows go through files of the temporary folder, each a range of row numbers that fits into memory.
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hpcml.infer import openai, table
from hpcml.infer.job import InferenceError, InferenceJob, output_path
from hpcml.infer.order import keys_digest
from hpcml.infer.rounds import Plan, Round
from hpcml.worker import events
from hpcml.worker.flush import flush_folder

# Rows of one range, and those held while they are shared out, in bytes.
_RANGE_BYTES = 96 * 1024**2
_HELD_BYTES = 64 * 1024**2
_ROW_GROUP = 65_536


@dataclass(frozen=True)
class Proof:
    """What ``merge.json`` begins with.

    Attributes:
        output: the file or folder.
        rows: its rows, each row of the input once.
        failed: those without an answer.
        accepted: whether no more failed than may.
    """

    output: Path
    rows: int
    failed: int
    accepted: bool


def merged(job: InferenceJob, this: Round) -> Proof | None:
    """The proof of a round that was merged, if it was."""
    try:
        found = json.loads((job.cell_dir / "merge.json").read_text())
    except FileNotFoundError:
        return None
    if found["round"] != this.number or not os.path.exists(found["output"]):
        return None
    accepted = found["failed"] <= job.max_failed * found["rows_out"]
    if accepted and not (job.cell_dir / "result.json").exists():
        _write_result(job, found)
    return Proof(Path(found["output"]), found["rows_out"], found["failed"], accepted)


def merge(job: InferenceJob, this: Round, plan: Plan) -> Proof:
    """Write the output, ``merge.json`` and, if not too many rows failed, ``result.json``.

    Raises:
        InferenceError: a row is missing or there twice, or the output cannot be written.
    """
    begun = time.monotonic()
    target = output_path(job)
    counts = _Counts()
    token = uuid.uuid4().hex[:8]
    scratch = this.path / f".merging-{token}"
    aside = target.with_name(f".{target.name}.{token}")
    try:
        scratch.mkdir()
        target.parent.mkdir(parents=True, exist_ok=True)
        batches = counts.watch(_checked(_in_order(this, plan, scratch), plan.rows))
        _write(job, plan, batches, aside)
        if counts.keys != plan.keys:
            raise InferenceError("the keys of the output are not those of the input")
        if target.is_dir():
            target.rename(aside.with_name(f"{aside.name}.old"))
        aside.rename(target)
        flush_folder(target.parent)
    except OSError as error:
        where = error.filename or target
        raise InferenceError(f"cannot write {where}: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        for left in target.parent.glob(f"{aside.name}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    seconds = time.monotonic() - begun
    failed = sum(counts.causes.values())
    proof = Proof(target, plan.rows, failed, failed <= job.max_failed * plan.rows)
    document = {
        "output": str(target),
        "rows_in": plan.rows,
        "rows_out": counts.rows,
        "duplicates": 0,
        "missing": 0,
        "answered": counts.rows - failed,
        "failed": failed,
        "accepted": proof.accepted,
        "max_failed": job.max_failed,
        "errors": dict(counts.causes.most_common()),
        "prompt_tokens": counts.prompt_tokens,
        "output_tokens": counts.output_tokens,
        "output_lengths": counts.histogram(),
        "keys": f"{plan.keys:016x}",
        "fingerprints": {**plan.digests, "input": plan.input},
        "round": this.number,
        "carried": plan.rows - plan.asked,
        "seconds": round(seconds, 3),
    }
    events.write_json(str(job.cell_dir / "merge.json"), document)
    if proof.accepted:
        _write_result(job, document)
    return proof


# -- reading --------------------------------------------------------------------------------------


def _in_order(this: Round, plan: Plan, scratch: Path) -> Iterator[pa.RecordBatch]:
    """All answers by row number."""
    files = this.answers(plan)
    if plan.in_order:
        for path in files:
            yield from table.read(path)
        return
    size = sum(batch.nbytes for path in files for batch in table.read(path))
    ranges = max(1, min(plan.rows, -(-size // _RANGE_BYTES)))
    bounds = np.arange(1, ranges) * plan.rows // ranges
    held: dict[int, list[pa.RecordBatch]] = collections.defaultdict(list)
    holding = 0
    for path in files:
        for batch in table.read(path):
            rows = batch.column("row").to_numpy()
            cuts = [0, *np.searchsorted(rows, bounds), len(rows)]
            for number in range(ranges):
                if cuts[number] < cuts[number + 1]:
                    held[number].append(batch.slice(cuts[number], cuts[number + 1] - cuts[number]))
            holding += batch.nbytes
            if holding > _HELD_BYTES and ranges > 1:
                _put_away(held, scratch)
                holding = 0
    for number in range(ranges):
        batches = held.pop(number, [])
        path = scratch / f"{number}.arrow"
        if path.exists():
            batches = [*table.read(path), *batches]
            path.unlink()
        if batches:
            rows = pa.Table.from_batches(batches)
            order = np.argsort(rows.column("row").to_numpy(), kind="stable")
            yield from rows.take(pa.array(order)).combine_chunks().to_batches(_ROW_GROUP)


def _put_away(held: dict[int, list[pa.RecordBatch]], scratch: Path) -> None:
    for number, batches in held.items():
        table.append(scratch / f"{number}.arrow", pa.Table.from_batches(batches))
    held.clear()


def _checked(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The batches, proved to have the row numbers from 0 on, each once.

    Raises:
        InferenceError: they have not.
    """
    expected = 0
    for batch in batches:
        found = batch.column("row").to_numpy()
        if not np.array_equal(found, np.arange(expected, expected + len(found))):
            wrong = int(np.flatnonzero(found != np.arange(expected, expected + len(found)))[0])
            twice = found[wrong] < expected + wrong
            what = f"row {found[wrong]} is there twice" if twice else f"no row {expected + wrong}"
            raise InferenceError(f"the parts are damaged: {what}")
        expected += len(found)
        yield batch
    if expected != rows:
        raise InferenceError(f"the parts are damaged: {expected} rows of {rows}")


class _Counts:
    """What is counted while rows pass."""

    def __init__(self) -> None:
        self.rows = 0
        self.keys = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.causes: collections.Counter[str] = collections.Counter()
        self._lengths: collections.Counter[int] = collections.Counter()

    def watch(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches."""
        for batch in batches:
            self.rows += batch.num_rows
            self.keys = (self.keys + keys_digest(batch.column("row"), batch.column("key"))) % 2**64
            self.prompt_tokens += pc.sum(batch.column("prompt_tokens")).as_py() or 0
            lengths = pc.list_flatten(batch.column("output_tokens")).to_numpy()
            self.output_tokens += int(lengths.sum())
            powers, counts = np.unique(
                np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), return_counts=True
            )
            self._lengths.update(dict(zip(powers.tolist(), counts.tolist(), strict=True)))
            for entry in pc.value_counts(batch.column("cause").drop_null()).to_pylist():
                self.causes[entry["values"]] += entry["counts"]
            yield batch

    def histogram(self) -> dict[str, int]:
        """Answers by their length in tokens: each entry counts those up to its length."""
        return {str(2**power): self._lengths[power] for power in sorted(self._lengths)}


# -- writing --------------------------------------------------------------------------------------


def _write(job: InferenceJob, plan: Plan, batches: Iterator[pa.RecordBatch], path: Path) -> None:
    if job.output.format == "openai":
        _write_openai(job, batches, path)
    elif job.output.rows_per_file is None:
        _write_parquet(job, plan, batches, path)
    else:
        path.mkdir()
        files = _cut(batches, job.output.rows_per_file)
        for number, pieces in enumerate(files):
            _write_parquet(job, plan, pieces, path / f"part-{number:05}.parquet")
        flush_folder(path)


def _cut(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[Iterator[pa.RecordBatch]]:
    """The rows in runs of ``rows``; each run must be read to its end before the next."""
    rest: list[pa.RecordBatch] = []

    def run() -> Iterator[pa.RecordBatch]:
        left = rows
        while left:
            batch = rest.pop() if rest else next(batches, None)
            if batch is None:
                return
            if batch.num_rows > left:
                rest.append(batch.slice(left))
                batch = batch.slice(0, left)
            left -= batch.num_rows
            yield batch

    while True:
        first = rest.pop() if rest else next(batches, None)
        if first is None:
            return
        rest.append(first)
        yield run()


def _write_parquet(
    job: InferenceJob, plan: Plan, batches: Iterable[pa.RecordBatch], path: Path
) -> None:
    writer = None
    with path.open("wb") as file:
        for batch in batches:
            rows = _output(job, batch)
            if writer is None:
                writer = pq.ParquetWriter(file, rows.schema)
            writer.write_table(rows, row_group_size=_ROW_GROUP)
        if writer is None:
            empty = pa.RecordBatch.from_pylist([], table.answer_schema(pa.schema([])))
            writer = pq.ParquetWriter(file, _output(job, empty).schema)
        writer.close()
        file.flush()
        os.fsync(file.fileno())


def _output(job: InferenceJob, batch: pa.RecordBatch) -> pa.Table:
    """The columns of the output, in their order."""
    kept = batch.column("columns")
    columns: dict[str, pa.Array] = {"key": batch.column("key")}
    columns |= {field.name: pc.struct_field(kept, index) for index, field in enumerate(kept.type)}
    names = ["text", "finish_reason", "prompt_tokens", "output_tokens"]
    if job.parameters.get("logprobs"):
        names.append("logprobs")
    for name in names:
        column = batch.column(name)
        if name != "prompt_tokens" and (job.parameters.get("n") or 1) == 1:
            column = (
                pc.list_element(column, 0) if len(column) else pa.array([], column.type.value_type)
            )
        columns["answer" if name == "text" else name] = column
    columns |= {name: batch.column(name) for name in ("seconds", "cause", "error", "fingerprint")}
    return pa.table(columns)


def _write_openai(job: InferenceJob, batches: Iterable[pa.RecordBatch], path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for batch in batches:
            for record in batch.to_pylist():
                line = openai.result(record, is_chat=record["is_chat"], model=job.model.name)
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_result(job: InferenceJob, document: dict[str, Any]) -> None:
    """The result of the cell, which says that it is done."""
    started = [
        event
        for event in events.read(str(job.worker_dir / "events.jsonl"))
        if event.get("event") == "started"
    ]
    metrics = {
        "rows": document["rows_out"],
        "failed": document["failed"],
        "prompt_tokens": document["prompt_tokens"],
        "output_tokens": document["output_tokens"],
    }
    events.write_json(
        str(job.cell_dir / "result.json"),
        {
            "id": job.cell_id,
            "index": job.cell_index,
            "params": dict(job.params),
            "metrics": metrics,
            "step": document["rows_out"],
            "attempts": len(started),
            "code": started[-1].get("code") if started else None,
            "time": events.now(),
        },
    )
