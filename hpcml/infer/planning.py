"""The plan of an inference: every row of the input, made ready, in shards. Written once."""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hpcml.infer import fingerprint, order, table
from hpcml.infer.failures import RowFailed
from hpcml.infer.job import InferenceError, InferenceJob, output_path
from hpcml.infer.prompt import Prompt, PromptMaker
from hpcml.infer.rounds import Plan, Round
from hpcml.infer.shard import answers_so_far
from hpcml.infer.source import Batch, Row, input_files, parquet_schema, read
from hpcml.worker.flush import flush_folder

_FEWEST, _MOST = 16, 8192
_SHARDS_PER_WORKER = 32
# Rows held while they are shared out to the files of their shards.
_HELD_BYTES = 64 * 1024**2
# Columns of the output that no column of the input may be called.
RESERVED = {
    "key", "answer", "finish_reason", "prompt_tokens", "output_tokens", "logprobs", "seconds",
    "cause", "error", "fingerprint",
}  # fmt: skip
_INT64 = range(-(2**63), 2**63)


def make_plan(job: InferenceJob, this: Round) -> Plan:
    """Read the whole input and write the plan; if another worker was faster, take its plan.

    Raises:
        InferenceError: the input or the model cannot be read, or changed in a way that the round
            does not accept.
    """
    target = output_path(job)
    if job.output.path is not None and target.exists():
        written = job.cell_dir / "merge.json"
        if not written.exists() or json.loads(written.read_text())["output"] != str(target):
            raise InferenceError(
                f"{target} is there already, and this run did not write it; move it away, or "
                "choose another infer.output.path"
            )
    building = this.path / f".planning-{uuid.uuid4().hex}"
    this.path.mkdir(parents=True, exist_ok=True)
    (building / "shards").mkdir(parents=True)
    (building / "carried").mkdir()
    try:
        plan = _Planning(job, this, building).run()
        with (building / "plan.json").open("w") as file:
            json.dump(asdict(plan), file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        for folder in ("shards", "carried", "."):
            flush_folder(building / folder)
        with suppress(OSError):  # another worker's is there; then that one counts
            os.rename(building, this.plan_dir)
        flush_folder(this.path)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    found = this.plan()
    assert found is not None
    return found


class _Planning:
    def __init__(self, job: InferenceJob, this: Round, building: Path) -> None:
        self._job = job
        self._round = this
        self._building = building
        self._digests = fingerprint.of_job(job)
        self._base = fingerprint.combined(self._digests)
        self._prompts = PromptMaker(job)
        self._kinds: dict[str, set[type]] = {}
        self._keys = 0
        # One entry for each row.
        self._levels = [array("Q") for _ in range(order.LEVELS)]
        self._lengths = array("q")
        self._fingerprints = array("Q")
        self._key_digests = array("Q")

    def run(self) -> Plan:
        job = self._job
        stamps = fingerprint.stamps(job)
        spool = self._building / "spool.arrow"
        parquet = job.input.format == "parquet"
        kept: pa.Schema | None = self._chosen(parquet_schema(job.input)) if parquet else None
        # Until all rows were seen, nobody knows what types the columns of text files have.
        columns = pa.struct(list(kept)) if kept is not None else pa.large_string()
        schema = pa.schema([*table.QUESTION, pa.field("columns", columns)])
        rows = table.write(spool, schema, self._questions(schema, kept))
        if kept is None:
            kept = self._found()
        taken = sorted(RESERVED.intersection(kept.names))
        if taken:
            raise InferenceError(
                f"the output has columns of its own called {', '.join(taken)}; name the columns of "
                "the input that it shall have by infer.output.columns"
            )
        duplicates = self._duplicates(spool)
        carried, files = self._carry(kept)
        sequence = self._sequence()
        sequence = sequence[~carried[sequence]]
        per_shard = job.shard_rows or _shard_rows(len(sequence), job.workers)
        self._share_out(spool, sequence, per_shard, kept, duplicates)
        spool.unlink()
        return Plan(
            rows=rows,
            asked=len(sequence),
            shards=-(-len(sequence) // per_shard),
            carried=files,
            digests=self._digests,
            input=fingerprint.of_files(input_files(job.input)),
            stamps=stamps,
            keys=self._keys % 2**64,
            in_order=not files and bool((sequence == np.arange(rows)).all()),
        )

    # -- first pass: the input, once --------------------------------------------------------------

    def _questions(self, schema: pa.Schema, kept: pa.Schema | None) -> Iterator[pa.RecordBatch]:
        number = 0
        for batch in read(self._job.input):
            yield self._batch(batch, number, schema, kept)
            number += len(batch.rows)

    def _batch(
        self, batch: Batch, first: int, schema: pa.Schema, kept: pa.Schema | None
    ) -> pa.RecordBatch:
        lists: dict[str, list[Any]] = {field.name: [] for field in table.QUESTION}
        columns = [self._as_text(row, kept) for row in batch.rows]
        for number, row, others in zip(count(first), batch.rows, columns, strict=False):
            key, prompt, failure = self._question(row, number)
            text = prompt.text if prompt else None
            parameters = prompt.parameters if prompt else None
            own = json.dumps(parameters, sort_keys=True) if parameters else None
            lists["row"].append(number)
            lists["key"].append(key)
            lists["prompt"].append(text)
            lists["is_chat"].append(bool(prompt and prompt.is_chat))
            lists["parameters"].append(own)
            # The key too: from it the row's seed is made.
            mark = order.digest64(f"{self._base}\0{key}\0{own}\0{others}\0{text}")
            lists["fingerprint"].append(mark)
            lists["cause"].append(failure.cause if failure else None)
            lists["error"].append(failure.message if failure else None)
            self._fingerprints.append(mark)
            self._key_digests.append(order.digest64(key))
            self._lengths.append(len(text or ""))
            for level, digest in zip(self._levels, order.beginnings(text or ""), strict=True):
                level.append(digest)
        arrays = [pa.array(lists[field.name], field.type) for field in table.QUESTION]
        self._keys += order.keys_digest(arrays[0], arrays[1])
        if kept is None:
            arrays.append(pa.array(columns, pa.large_string()))
        else:
            assert batch.table is not None
            arrays.append(_struct([batch.table.column(name) for name in kept.names], kept, batch))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _question(self, row: Row, number: int) -> tuple[str, Prompt | None, RowFailed | None]:
        key = str(number)
        name = self._job.input.key
        try:
            if name is not None:
                if isinstance(row.columns.get(name), (str, int)):
                    key = str(row.columns[name])
                elif row.failure is None:
                    raise RowFailed("missing", f"the key, {name}, is missing, or no text or number")
            if row.failure is not None:
                raise row.failure
            return key, self._prompts.prompt(row.columns), None
        except RowFailed as failure:
            return key, None, failure

    # -- columns ----------------------------------------------------------------------------------

    def _chosen(self, schema: pa.Schema) -> pa.Schema:
        wanted = self._job.output.columns
        if wanted is None:
            return schema
        missing = [name for name in wanted if name not in schema.names]
        if missing:
            raise InferenceError(
                f"the input has no column {', '.join(missing)}; it has {', '.join(schema.names)}"
            )
        return pa.schema([schema.field(name) for name in wanted])

    def _as_text(self, row: Row, kept: pa.Schema | None) -> str:
        """The wanted columns of a row as JSON; of a text file, their types are noted."""
        wanted = self._job.output.columns
        columns = row.columns
        if kept is not None:
            return json.dumps([columns.get(name) for name in kept.names], default=str)
        if wanted is not None:
            columns = {name: columns[name] for name in wanted if name in columns}
        for name, value in columns.items():
            if value is not None:
                kind = type(value)
                if kind is int and value not in _INT64:
                    kind = str
                self._kinds.setdefault(name, set()).add(kind)
        return json.dumps(columns)

    def _found(self) -> pa.Schema:
        """The columns of text files: those that were asked for, or all that any row had."""
        names = self._job.output.columns
        return pa.schema(
            [
                pa.field(name, _type(self._kinds.get(name, set())))
                for name in (names if names is not None else self._kinds)
            ]
        )

    # -- second pass: rows to their shards --------------------------------------------------------

    def _sequence(self) -> order.Array:
        """All row numbers in the order in which they are asked."""
        if self._job.engine == "transformers":
            return order.by_length(np.asarray(self._lengths, np.int64))
        return order.by_prefix([np.asarray(level, np.uint64) for level in self._levels])

    def _duplicates(self, spool: Path) -> set[int]:
        """Rows whose key an earlier row has."""
        digests = np.asarray(self._key_digests, np.uint64)
        values, counts = np.unique(digests, return_counts=True)
        if self._job.input.key is None or (counts < 2).all():
            return set()
        repeated = np.isin(digests, values[counts > 1])
        seen: set[str] = set()
        found: set[int] = set()
        position = 0
        for batch in table.read(spool):
            for index in np.flatnonzero(repeated[position : position + batch.num_rows]):
                key = batch.column("key")[int(index)].as_py()
                if key in seen:
                    found.add(position + int(index))
                seen.add(key)
            position += batch.num_rows
        return found

    def _share_out(
        self,
        spool: Path,
        sequence: order.Array,
        per_shard: int,
        kept: pa.Schema,
        duplicates: set[int],
    ) -> None:
        schema = table.question_schema(kept)
        place = np.full(len(self._lengths), -1, np.int64)
        place[sequence] = np.arange(len(sequence))
        held: dict[int, list[pa.RecordBatch]] = {}
        size = 0
        for batch in table.read(spool):
            batch = _typed(batch, schema, duplicates)
            places = place[batch.column("row").to_numpy()]
            shards = np.where(places < 0, -1, places // per_shard)
            for shard in np.unique(shards):
                if shard >= 0:
                    chosen = np.flatnonzero(shards == shard)
                    whole = len(chosen) == batch.num_rows
                    held.setdefault(int(shard), []).append(
                        batch if whole else batch.take(pa.array(chosen))
                    )
            size += batch.nbytes
            if size > _HELD_BYTES:
                self._flush(held)
                held, size = {}, 0
        self._flush(held)
        # Each file has its rows in the order of the input; in a shard they have their places.
        for number in range(-(-len(sequence) // per_shard)):
            path = self._building / "shards" / f"{number:06}.arrow"
            rows = pa.Table.from_batches(list(table.read(path)), schema)
            places = place[rows.column("row").to_numpy()]
            ordered = rows.take(pa.array(np.argsort(places))).combine_chunks()
            table.write(path, schema, ordered.to_batches())

    def _flush(self, held: dict[int, list[pa.RecordBatch]]) -> None:
        for shard, batches in held.items():
            path = self._building / "shards" / f"{shard:06}.arrow"
            table.append(path, pa.Table.from_batches(batches).combine_chunks())

    # -- what an earlier round has ----------------------------------------------------------------

    def _carry(self, kept: pa.Schema) -> tuple[np.ndarray[Any, np.dtype[np.bool_]], int]:
        """Take over the answers of the round before that are still valid.

        Returns:
            For each row whether it has its answer, and the number of files with answers.
        """
        carried = np.zeros(len(self._lengths), bool)
        before = Round(self._round.path.parent / str(self._round.number - 1))
        plan = before.plan()
        if plan is None or not len(carried):
            return carried, 0
        if not self._round.request.get("accept_changes"):
            changed = fingerprint.changes(self._job, plan.digests, plan.input)
            if changed:
                raise InferenceError(
                    f"{' and '.join(changed)} changed since the round before; give --rerun to ask "
                    "what is no longer valid again"
                )
        mine = np.asarray(self._fingerprints, np.uint64)
        by_mark = np.argsort(mine, kind="stable")
        sorted_marks = mine[by_mark]
        schema = table.answer_schema(kept)
        files = 0
        for source in _answers(before, plan):
            batches = []
            for batch in source:
                if not batch.schema.field("columns").type.equals(schema.field("columns").type):
                    continue  # the rows of the output have another form now
                marks = batch.column("fingerprint").to_numpy()
                at = np.minimum(np.searchsorted(sorted_marks, marks), len(mine) - 1)
                rows = by_mark[at]
                unfailed = pc.is_null(batch.column("cause")).to_numpy(zero_copy_only=False)
                good = np.flatnonzero((sorted_marks[at] == marks) & unfailed & ~carried[rows])
                if len(good):
                    carried[rows[good]] = True
                    batches.append(_renumbered(batch.take(pa.array(good)), rows[good], schema))
            if batches:
                table.write(self._building / "carried" / f"{files:06}.arrow", schema, batches)
                files += 1
        return carried, files


def _answers(before: Round, plan: Plan) -> Iterator[Iterable[pa.RecordBatch]]:
    """What an earlier round has: of every file, and of every shard that was left half done."""
    for path in before.answers(plan):
        if path.exists():
            yield table.read(path)
    done = before.done()
    for number in range(plan.shards):
        if number not in done:
            yield answers_so_far(before, number)


def _shard_rows(rows: int, workers: int) -> int:
    """So many that each worker takes many shards, and each shard is worth its files."""
    return min(_MOST, max(_FEWEST, math.ceil(rows / (workers * _SHARDS_PER_WORKER))))


def _struct(columns: list[pa.Array], kept: pa.Schema, batch: Batch) -> pa.StructArray:
    if not columns:
        return pa.array([{}] * len(batch.rows), pa.struct([]))
    return pa.StructArray.from_arrays(columns, fields=list(kept))


def _type(kinds: set[type]) -> pa.DataType:
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return pa.int64()
    if kinds and kinds <= {int, float}:
        return pa.float64()
    return pa.large_string()


def _typed(batch: pa.RecordBatch, schema: pa.Schema, duplicates: set[int]) -> pa.RecordBatch:
    """A batch of the spool with columns of their types, and duplicate keys marked."""
    arrays = {name: batch.column(name) for name in batch.schema.names}
    kept = schema.field("columns").type
    if not pa.types.is_struct(arrays["columns"].type):
        rows = [json.loads(text) for text in arrays["columns"].to_pylist()]
        fields = list(kept)
        columns = [
            pa.array([_fitting(row.get(field.name), field.type) for row in rows], field.type)
            for field in fields
        ]
        arrays["columns"] = (
            pa.StructArray.from_arrays(columns, fields=fields)
            if fields
            else pa.array([{}] * len(rows), kept)
        )
    if duplicates:
        numbers = batch.column("row").to_pylist()
        marked = [number in duplicates for number in numbers]
        if any(marked):
            mask = pa.array(marked)
            arrays["cause"] = pc.if_else(mask, "duplicate_key", arrays["cause"])
            arrays["error"] = pc.if_else(mask, "an earlier row has the same key", arrays["error"])
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)


def _fitting(value: Any, kind: pa.DataType) -> Any:
    if value is None or not pa.types.is_large_string(kind):
        return float(value) if value is not None and pa.types.is_floating(kind) else value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode(errors="replace").decode()


def _renumbered(
    batch: pa.RecordBatch, rows: np.ndarray[Any, np.dtype[np.int64]], schema: pa.Schema
) -> pa.RecordBatch:
    """Answers of an earlier round with the numbers that their rows have now."""
    arrays = {name: batch.column(name) for name in batch.schema.names}
    arrays["row"] = pa.array(rows, pa.int64())
    return pa.RecordBatch.from_arrays([arrays[name] for name in schema.names], schema=schema)
