"""A shard in the hands of a worker: its questions, and the answers so far."""

from __future__ import annotations

import collections
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from hpcml.infer import table
from hpcml.infer.claims import Claim
from hpcml.infer.engine import Answer, Request, row_seed
from hpcml.infer.rounds import Round

Parameters = dict[str, Any]


class Shard:
    """Questions of a shard, and its journal.

    The journal has a line for each finished row. It is this claim's alone; those of earlier claims
    are read and go on to count.

    Args:
        this: the round.
        number: of the shard.
        claim: what makes it ours.
        parameters: the recipe's generation parameters.
        batch: rows that are asked together; see :class:`hpcml.infer.engine.Engine`.

    Raises:
        FileNotFoundError: somebody else has finished it.
    """

    def __init__(
        self, this: Round, number: int, claim: Claim, parameters: Parameters, batch: int
    ) -> None:
        self.number = number
        self.claim = claim
        self._round = this
        batches = list(table.read(this.shard(number)))
        self._schema = batches[0].schema
        self._questions = pa.Table.from_batches(batches, self._schema)
        self._answers: dict[int, dict[str, Any]] = {}
        for earlier in range(1, claim.number):
            _read_journal(this.journal(number, earlier), self._answers)
        this.journals.mkdir(exist_ok=True)
        self._journal = this.journal(number, claim.number).open("ab")
        self._unwritten = False
        self.waiting: collections.deque[list[Request]] = collections.deque()
        self._read_questions(parameters, batch)

    @property
    def complete(self) -> bool:
        """Whether every row has its answer."""
        return len(self._answers) == int(self._questions.num_rows)

    def take(self, answers: Sequence[Answer]) -> list[Answer]:
        """Write answers down; returns those that are new."""
        new = [answer for answer in answers if answer.row not in self._answers]
        lines = []
        for answer in new:
            record = dict(vars(answer))
            self._answers[answer.row] = record
            lines.append(json.dumps(record, ensure_ascii=False).encode(errors="replace") + b"\n")
        if lines:
            # One write for a whole batch: a kill leaves all of it or nothing.
            self._journal.write(b"".join(lines))
            self._journal.flush()
            self._unwritten = True
        return new

    def flush(self) -> None:
        """See to it that answers survive a crash of the machine."""
        if self._unwritten:
            os.fsync(self._journal.fileno())
            self._unwritten = False

    def close(self) -> None:
        """Leave the shard to others, with what was answered."""
        self.flush()
        self._journal.close()

    def publish(self) -> bool:
        """Write the part; returns whether nobody else had."""
        self._journal.close()
        batch = _answered(self._questions, self._answers)
        self._round.parts.mkdir(exist_ok=True)
        first = table.publish(
            self._round.part(self.number), batch.schema, batch.to_batches(), str(self.claim.number)
        )
        # All of it is in the part now.
        for claim in range(1, self.claim.number + 1):
            with suppress(FileNotFoundError):
                self._round.journal(self.number, claim).unlink()
        with suppress(FileNotFoundError):
            self._round.shard(self.number).unlink()
        return first

    def _read_questions(self, parameters: Parameters, size: int) -> None:
        requests: list[Request] = []
        failed: list[Answer] = []
        names = ("row", "key", "prompt", "is_chat", "parameters", "cause", "error")
        for record in self._questions.select(names).to_pylist():
            if record["cause"] is not None:
                failed.append(Answer(record["row"], cause=record["cause"], error=record["error"]))
                continue
            own = parameters
            if record["parameters"] is not None:
                own = {**parameters, **json.loads(record["parameters"])}
            requests.append(
                Request(
                    record["row"],
                    record["prompt"],
                    record["is_chat"],
                    own,
                    row_seed(own.get("seed") or 0, record["key"]),
                )
            )
        self.take(failed)
        for first in range(0, len(requests), size):
            chunk = requests[first : first + size]
            # Where rows are answered together, they are asked together again: their answers must
            # not depend on where a kill struck.
            if any(request.row not in self._answers for request in chunk):
                self.waiting.append(chunk)


def answers_so_far(this: Round, number: int) -> list[pa.RecordBatch]:
    """What was answered of a shard that nobody has now; nothing where its part is there."""
    try:
        questions = pa.Table.from_batches(list(table.read(this.shard(number))))
        journals = [
            path for path in this.journals.iterdir() if path.name.startswith(f"{number:06}.")
        ]
    except FileNotFoundError:
        return []
    answers: dict[int, dict[str, Any]] = {}
    for path in journals:
        _read_journal(path, answers)
    return list(_answered(questions, answers).to_batches())


def _answered(questions: pa.Table, answers: dict[int, dict[str, Any]]) -> pa.Table:
    """The answers with what the output needs of their questions, by row number."""
    columns = questions.schema.field("columns").type
    schema = table.answer_schema(pa.schema(list(columns)))
    rows = questions.filter(pa.array([n in answers for n in questions.column("row").to_pylist()]))
    rows = rows.sort_by("row")
    found = [answers[row] for row in rows.column("row").to_pylist()]
    arrays = []
    for field in schema:
        if field.name in ("cause", "error") or field.name not in rows.column_names:
            arrays.append(pa.array([answer[field.name] for answer in found], field.type))
        else:
            arrays.append(rows.column(field.name).combine_chunks())
    return pa.Table.from_arrays(arrays, schema=schema).combine_chunks()


def _read_journal(path: Path, answers: dict[int, dict[str, Any]]) -> None:
    """Add the records of a journal; a last line that a crash cut off does not count."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    for line in data.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            answers.setdefault(record["row"], record)
