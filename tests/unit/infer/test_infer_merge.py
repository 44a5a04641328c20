"""Merging parts: in order, complete, or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hpcml.infer import merge as merging
from hpcml.infer import table
from hpcml.infer.job import InferenceError, InferenceJob
from hpcml.infer.merge import merge
from hpcml.infer.rounds import Plan, Round, current_round
from hpcml.infer.runner import DONE

from .jobs import Output, make_job, proof, write_input
from .test_infer_runner import run


def answered(folder: Path, **changes: object) -> tuple[InferenceJob, Round, Plan]:
    chooser = random.Random(1)
    prefixes = ["first " * 60, "second " * 60, ""]
    write_input(folder, [f"{chooser.choice(prefixes)}{number}" for number in range(500)])
    job = make_job(folder, shard_rows=13, **changes)
    assert run(job) == DONE
    this = current_round(job.cell_dir)
    plan = this.plan()
    assert plan is not None
    return job, this, plan


def test_in_ranges_that_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, this, plan = answered(tmp_path)
    whole = pq.read_table(job.cell_dir / "output.parquet")
    assert not plan.in_order
    monkeypatch.setattr(merging, "_RANGE_BYTES", 20_000)
    monkeypatch.setattr(merging, "_HELD_BYTES", 30_000)
    merge(job, this, plan)
    assert pq.read_table(job.cell_dir / "output.parquet").equals(whole)
    assert not list(this.path.glob(".merging*"))
    assert not list(job.cell_dir.glob(".output*"))


def test_into_a_folder(tmp_path: Path) -> None:
    job, *_ = answered(tmp_path, output=Output(path=tmp_path / "answers", rows_per_file=150))
    files = sorted((tmp_path / "answers").iterdir())
    assert [pq.read_metadata(file).num_rows for file in files] == [150, 150, 150, 50]
    keys = pq.read_table(tmp_path / "answers").column("key").to_pylist()
    assert keys == [f"k{number}" for number in range(500)]
    assert proof(job)["output"] == str(tmp_path / "answers")


@pytest.mark.parametrize("damage", ["lost", "twice", "other key"])
def test_damaged_parts_are_refused(tmp_path: Path, damage: str) -> None:
    job, this, plan = answered(tmp_path)
    before = (job.cell_dir / "output.parquet").read_bytes()
    path = this.part(3)
    (batch,) = table.read(path)
    batches = [batch]
    if damage == "lost":
        batches = [batch.slice(1)]
    elif damage == "twice":
        batches = [batch, batch.slice(0, 1)]
    else:
        columns = batch.columns
        columns[1] = columns[1].take([1, 0, *range(2, len(batch))])
        batches = [batch.from_arrays(columns, schema=batch.schema)]
    table.write(path, batch.schema, batches)
    with pytest.raises(InferenceError, match=r"damaged|keys of the output"):
        merge(job, this, plan)
    assert (job.cell_dir / "output.parquet").read_bytes() == before
