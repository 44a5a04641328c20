"""What is answered, and what comes of rows that cannot be."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.infer_models import questions

from .conftest import Asking


def test_the_answers_are_those_of_the_model(asking: Asking) -> None:
    asking.input(60)
    asking.recipe(params={"temperature": 0, "max_tokens": 12, "logprobs": True})
    asking()
    tokenizer = AutoTokenizer.from_pretrained(asking.model)
    model = AutoModelForCausalLM.from_pretrained(asking.model).eval()
    for row, question in zip(asking.output(), questions(60), strict=True):
        inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
            logits = model(tokens).logits[0]
        new = tokens[0, inputs["input_ids"].shape[1] :]
        assert row["question"] == question
        assert row["answer"] == tokenizer.decode(new, skip_special_tokens=True)
        assert row["output_tokens"] == len(new)
        assert row["prompt_tokens"] == inputs["input_ids"].shape[1]
        before = torch.log_softmax(logits[-len(new) - 1 : -1], -1)
        expected = before.gather(1, new[:, None])[:, 0]
        assert torch.allclose(torch.tensor(row["logprobs"]), expected, atol=1e-4)


def test_a_draw_depends_on_the_row_alone(asking: Asking) -> None:
    """The same rows in another order, in other batches, by other workers: the same answers."""
    asking.input(40)
    params = {"temperature": 1.0, "top_k": 50, "max_tokens": 10, "n": 2, "seed": 4}
    asking.recipe(params=params)
    asking()
    first = asking.answers()
    assert len({str(texts) for _, texts, *_ in first.values()}) > 30
    table = pq.read_table(asking.hpcml.folder / "in.parquet")
    pq.write_table(table.take(pa.array(range(39, -1, -1))), asking.hpcml.folder / "in.parquet")
    other = {"dtype": "float32", "batch_size": 7}
    asking.recipe(params=params, workers=2, shard_rows=9, engine_args=other)
    asking("--root", "other")
    (output,) = asking.hpcml.folder.glob("other/*/*/cells/*/output.parquet")
    second = {row["key"]: row["answer"] for row in pq.read_table(output).to_pylist()}
    assert second == {key: texts for key, (_, texts, *_) in first.items()}


def test_bad_rows_cost_no_others(asking: Asking) -> None:
    lines = [
        b'{"id": "good", "question": "what is the capital?"}',
        b'{"id": "empty", "question": "  "}',
        b'{"id": "null", "question": null}',
        b'{"id": "absent"}',
        b'{"id": "long", "question": "' + b"river " * 5000 + b'"}',
        b'{"id": "latin", "question": "caf\xe9"}',
        b'{"id": "number", "question": 17}',
        b'{"id": "good", "question": "the same key again"}',
        b'{"id": "torn", "question": ',
        b"[1, 2]",
        b'{"question": "no key"}',
        b'{"id": {"a": 1}, "question": "no key"}',
        b'{"id": "last", "question": "seven plus seven"}',
    ]
    asking.hpcml.folder.joinpath("in.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    asking.recipe(input={"files": "in.jsonl", "key": "id"}, max_failed=0.9)
    asking()
    rows = asking.output()
    causes = [row["cause"] for row in rows]
    assert causes == [
        None, "empty", "missing", "missing", "too_long", "invalid_utf8", None, "duplicate_key",
        "malformed", "malformed", "missing", "missing", None,
    ]  # fmt: skip
    assert all((row["answer"] is None) == (row["cause"] is not None) for row in rows)
    assert all((row["error"] is None) == (row["cause"] is None) for row in rows)
    proof = asking.merged()
    assert proof["rows_out"] == len(lines)
    assert proof["failed"] == 10
    assert sum(proof["errors"].values()) == 10


def test_too_many_failed_rows_fail_the_cell_and_can_be_asked_again(asking: Asking) -> None:
    lines = [{"id": str(number), "question": "red house"} for number in range(20)]
    lines[3]["question"] = lines[4]["question"] = ""
    path = asking.hpcml.folder / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asking.recipe(input={"files": "in.jsonl", "key": "id"}, max_failed=0.05)
    asking(code=1)
    assert (asking.cell / "output.parquet").exists()
    assert not (asking.cell / "result.json").exists()
    answered = asking.answers()
    # One of them is put right: that is another input than the one that was planned for.
    lines[3]["question"] = "red house"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused = asking("--only-errors", code=1)
    assert "the input changed" in refused.stdout + refused.stderr
    asking("--rerun")
    proof = asking.merged()
    assert (proof["rows_out"], proof["failed"], proof["carried"]) == (20, 1, 18)
    now = asking.answers()
    assert now.pop("3")[1] == answered["5"][1]
    answered.pop("3")
    assert now == answered
    asking("--only-errors")
    assert asking.merged()["carried"] == 19


def test_an_empty_input_is_done(asking: Asking) -> None:
    asking.input(0)
    asking.recipe(workers=2)
    asking()
    assert asking.output() == []
    assert asking.merged()["rows_out"] == 0
    assert "1 done" in asking().stdout


def test_the_output_must_not_be_the_input(asking: Asking) -> None:
    asking.input(3)
    asking.recipe(output={"path": "in.parquet"})
    refused = asking(code=2)
    assert "infer.output.path" in refused.stderr
    assert not (asking.hpcml.folder / "runs").exists()


def test_a_batch_file_of_openai(asking: Asking) -> None:
    def line(key: str, url: str = "/v1/chat/completions", **body: object) -> str:
        return json.dumps({"custom_id": key, "method": "POST", "url": url, "body": body}) + "\n"

    chat = [{"role": "user", "content": "what is red?"}]
    asking.hpcml.folder.joinpath("batch.jsonl").write_text(
        line("a", model="x", messages=chat, max_tokens=5)
        + line("b", "/v1/completions", prompt="seven plus", max_tokens=3, n=2, temperature=1)
        + line("c", messages=chat, tools=[{"type": "function"}])
        + line("d", "/v1/embeddings", input="x")
    )
    asking.recipe(
        input={"files": "batch.jsonl", "format": "openai"},
        prompt=None,
        output={"format": "openai"},
        max_failed=0.5,
    )
    asking()
    text = asking.cell.joinpath("output.jsonl").read_text()
    first, second, third, fourth = map(json.loads, text.splitlines())
    assert first["custom_id"] == "a"
    body = first["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["usage"]["completion_tokens"] <= 5
    assert len(second["response"]["body"]["choices"]) == 2
    assert third["error"]["code"] == "unsupported"
    assert "tools" in third["error"]["message"]
    assert fourth["response"] is None
