"""The rounds of a cell: what each has to do, and where what is done of it lies."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What a round has to do.

    Attributes:
        rows: rows of the input.
        asked: rows of the shards; the others have their answer from an earlier round.
        shards: how many shards there are, numbered from 0.
        carried: how many files in ``carried`` hold the answers of an earlier round.
        digests: what determines answers: see :mod:`hpcml.infer.fingerprint`.
        input: a digest of the content of the input's files.
        stamps: how files looked when the plan was made.
        keys: sum, modulo 2**64, of a digest of number and key over all rows: the proof that the
            output has the rows of the input.
        in_order: whether the shards, one after another, are the input in its order.
    """

    rows: int
    asked: int
    shards: int
    carried: int
    digests: dict[str, str]
    input: str
    stamps: dict[str, str]
    keys: int
    in_order: bool


class Round:
    """One round of a cell: a plan and what has been done of it.

    Args:
        path: its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_dir = path / "plan"
        self.parts = path / "parts"
        self.journals = path / "journals"
        self.claims = path / "claims"

    @property
    def number(self) -> int:
        """Counts from 1."""
        return int(self.path.name)

    @property
    def request(self) -> dict[str, Any]:
        """Why it was begun: ``{}``, or ``{"accept_changes": …}``."""
        try:
            found: dict[str, Any] = json.loads((self.path / "request.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def plan(self) -> Plan | None:
        """The plan, or None while there is none."""
        try:
            return Plan(**json.loads((self.plan_dir / "plan.json").read_text()))
        except FileNotFoundError:
            return None

    def shard(self, number: int) -> Path:
        """The questions of a shard; absent once the part is there."""
        return self.plan_dir / "shards" / f"{number:06}.arrow"

    def part(self, number: int) -> Path:
        """The answers of a shard, complete."""
        return self.parts / f"{number:06}.arrow"

    def journal(self, number: int, claim: int) -> Path:
        """The answers so far of one claim of a shard."""
        return self.journals / f"{number:06}.{claim}.jsonl"

    def done(self) -> set[int]:
        """The shards whose parts are there."""
        try:
            names = os.listdir(self.parts)
        except FileNotFoundError:
            return set()
        return {int(name.split(".")[0]) for name in names if not name.startswith(".")}

    def answers(self, plan: Plan) -> list[Path]:
        """The files with all answers, once every part is there."""
        carried = [self.plan_dir / "carried" / f"{n:06}.arrow" for n in range(plan.carried)]
        return carried + [self.part(number) for number in range(plan.shards)]


def current_round(cell_dir: Path) -> Round:
    """The newest round of a cell."""
    rounds = cell_dir / "rounds"
    try:
        numbers = [int(name) for name in os.listdir(rounds) if name.isdecimal()]
    except FileNotFoundError:
        numbers = []
    return Round(rounds / str(max(numbers, default=1)))
