"""Reading inputs and planning: every row is in one shard, whatever it looks like."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcml.infer import table
from hpcml.infer.job import InferenceError, InferenceJob, Input
from hpcml.infer.planning import make_plan
from hpcml.infer.rounds import Plan, current_round

from .jobs import Output, make_job, write_input


def planned(job: InferenceJob) -> tuple[Plan, list[list[dict[str, Any]]]]:
    this = current_round(job.cell_dir)
    plan = make_plan(job, this)
    shards = []
    for number in range(plan.shards):
        batches = list(table.read(this.shard(number)))
        shards.append([row for batch in batches for row in batch.to_pylist()])
    return plan, shards


texts = st.lists(st.one_of(st.none(), st.text(max_size=20), st.just("same beginning " * 30)))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=texts, shard_rows=st.integers(1, 10), engine=st.sampled_from(["vllm", "transformers"]))
def test_every_row_is_in_one_shard(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str | None],
    shard_rows: int,
    engine: str,
) -> None:
    folder = tmp_path_factory.mktemp("planning")
    write_input(folder, texts)
    job = make_job(folder, shard_rows=shard_rows, engine=engine, output=Output(columns=("text",)))
    plan, shards = planned(job)
    rows = {row["row"]: row for shard in shards for row in shard}
    assert plan.rows == plan.asked == len(texts) == sum(map(len, shards))
    assert sorted(rows) == list(range(len(texts)))
    assert all(len(shard) == shard_rows for shard in shards[:-1])
    for number, text in enumerate(texts):
        assert rows[number]["key"] == f"k{number}"
        assert rows[number]["columns"] == {"text": text}
        if text is not None and text.strip():
            assert (rows[number]["prompt"], rows[number]["cause"]) == (text, None)
        else:
            assert rows[number]["cause"] == ("missing" if text is None else "empty")
    marks = [row["fingerprint"] for row in rows.values()]
    assert len(set(marks)) == len(marks)


def test_all_formats_say_the_same(tmp_path: Path) -> None:
    rows = [{"id": f"k{n}", "text": f"naïve — {n}\n\u2028,\"'", "n": n} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    lines = "".join(json.dumps(row, ensure_ascii=n % 2 == 0) + "\n" for n, row in enumerate(rows))
    (tmp_path / "in.jsonl").write_text(lines)
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text", "n"])
        writer.writeheader()
        writer.writerows(rows)
    found = {}
    for name in ("parquet", "jsonl", "csv"):
        job = make_job(
            tmp_path / name,
            input=Input((str(tmp_path / f"in.{name}"),), name, "id"),
            output=Output(columns=("n",)),
        )
        _, (shard, *_) = planned(job)
        found[name] = [(row["key"], row["prompt"], int(row["columns"]["n"])) for row in shard]
    assert found["parquet"] == found["jsonl"] == found["csv"]


def test_folders_and_patterns(tmp_path: Path) -> None:
    for number in range(3):
        write_input(tmp_path / f"part{number}", [f"{number}"] * 4)
    for pattern in (str(tmp_path), str(tmp_path / "part*" / "*.parquet")):
        job = make_job(tmp_path / f"job{len(pattern)}", input=Input((pattern,), "parquet"))
        plan, shards = planned(job)
        assert plan.rows == 12
        prompts = [row["prompt"] for shard in shards for row in shard]
        assert prompts == ["0"] * 4 + ["1"] * 4 + ["2"] * 4
    with pytest.raises(InferenceError, match="no input file matches"):
        planned(make_job(tmp_path / "none", input=Input(("nothing*",), "parquet")))


def test_columns_of_mixed_types_become_text(tmp_path: Path) -> None:
    lines = [
        {"text": "a", "key": 1, "i": 1, "f": 1, "m": 1, "b": True, "l": [1, 2]},
        {"text": "a", "i": 2, "f": 1.5, "m": "x", "b": None, "l": {"k": None}},
        {"text": "a", "i": None, "extra": 2**70},
    ]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = make_job(
        tmp_path, input=Input((str(path),), "jsonl"), output=Output(columns=None), shard_rows=10
    )
    with pytest.raises(InferenceError, match="called key"):
        planned(job)
    job = make_job(
        tmp_path,
        input=Input((str(path),), "jsonl"),
        output=Output(columns=("i", "f", "m", "b", "l", "extra", "absent")),
    )
    _, (shard,) = planned(job)
    rest = {"extra": None, "absent": None}
    assert [row["columns"] for row in shard] == [
        {"i": 1, "f": 1.0, "m": "1", "b": True, "l": "[1, 2]", **rest},
        {"i": 2, "f": 1.5, "m": "x", "b": None, "l": '{"k": null}', **rest},
        {
            "i": None,
            "f": None,
            "m": None,
            "b": None,
            "l": None,
            "extra": str(2**70),
            "absent": None,
        },
    ]


def test_templates_see_the_row_and_nothing_else(tmp_path: Path) -> None:
    write_input(tmp_path, ["a"], secret=["{{ 7 * 7 }}"])
    job = make_job(tmp_path, prompt="{{ text.upper() }} {{ secret }} {{ secret | length }}")
    _, ((row,),) = planned(job)
    assert row["prompt"] == "A {{ 7 * 7 }} 11"
    for number, text in enumerate(
        ("{{ text.__class__.__mro__ }}", "{{ ''.__class__.__base__.__subclasses__() }}")
    ):
        job = make_job(tmp_path / str(number), prompt=text, input=job.input)
        _, ((row,),) = planned(job)
        assert row["cause"] in ("template", "missing")
    with pytest.raises(InferenceError, match="no template"):
        planned(make_job(tmp_path / "x", prompt="{{ text", input=job.input))


def test_bytes_that_are_no_text_in_parquet(tmp_path: Path) -> None:
    column = pa.array([b"good", b"caf\xe9", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "in.parquet")
    source = Input((str(tmp_path / "in.parquet"),), "parquet")
    job = make_job(tmp_path, input=source, output=Output(columns=("text",)))
    _, (shard,) = planned(job)
    assert [row["cause"] for row in shard] == [None, "invalid_utf8", None]
    assert [row["columns"]["text"] for row in shard] == ["good", "caf\ufffd", "fine"]


def test_messages(tmp_path: Path) -> None:
    good = [{"role": "user", "content": "hello"}]
    values = [json.dumps(good), "no json", "[]", json.dumps([{"role": 1}]), None]
    values.append(json.dumps([{"role": "user", "content": ""}]))
    write_input(tmp_path, ["a"] * len(values), chat=values)
    job = make_job(tmp_path, prompt=None, messages="chat")
    _, (shard,) = planned(job)
    assert [row["cause"] for row in shard] == [
        None, "wrong_type", "empty", "wrong_type", "missing", "empty",
    ]  # fmt: skip
    assert json.loads(shard[0]["prompt"]) == good
    # A column of lists of structs, as pandas and datasets write it.
    nested = tmp_path / "nested.parquet"
    pq.write_table(pa.table({"chat": [good, good]}), nested)
    job = make_job(tmp_path / "nested", input=Input((str(nested),), "parquet"), messages="chat")
    _, (shard,) = planned(job)
    assert [json.loads(row["prompt"]) for row in shard] == [good, good]
