"""Recipes of the kind infer: what is right, what is refused, what a cell's id depends on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.plan.inputs import check_inputs
from hpcml.recipe import expand, load_recipe
from hpcml.site.schema import Site

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "in.jsonl").write_text("{}\n")
    return tmp_path


def write(folder: Path, infer: dict[str, Any] | None = None, **keys: Any) -> Path:
    block = {"model": "model", "input": {"files": "data/in.jsonl"}, "prompt": "{{ q }}"}
    block = {k: v for k, v in {**block, **(infer or {})}.items() if v is not None}
    path = folder / "ask.yaml"
    path.write_text(json.dumps({"name": "ask", "kind": "infer", "infer": block, **keys}))
    return path


def cells(folder: Path, infer: dict[str, Any] | None = None, **keys: Any) -> list[Any]:
    return expand(load_recipe(write(folder, infer, **keys)))


def test_a_cell_has_all_that_the_payload_needs(folder: Path) -> None:
    (cell,) = cells(folder, params={"max_new_tokens": 7, "temperature": 0})
    payload = cell.payload
    assert payload["engine"] == "transformers"
    assert payload["model"] == str(folder / "model")
    assert payload["input"] == {
        "files": [str(folder / "data" / "in.jsonl")], "format": "jsonl", "key": None
    }  # fmt: skip
    assert payload["parameters"]["max_tokens"] == 7
    assert payload["parameters"]["num_beams"] == 1
    assert "presence_penalty" not in payload["parameters"]
    assert payload["output"]["columns"] == []
    (cell,) = cells(folder, {"output": {"columns": ["*"]}})
    assert cell.payload["output"]["columns"] is None


def test_the_id_depends_on_what_decides_the_answers(folder: Path) -> None:
    (base,) = cells(folder)
    for same in ({"workers": 9}, {"shard_rows": 5}, {"max_failed": 0.5}):
        assert cells(folder, same)[0].id == base.id
    assert cells(folder, resources={"cpus": 4})[0].id == base.id
    assert cells(folder, params={"max_tokens": 256})[0].id == base.id  # the default
    for other in ({"prompt": "{{ r }}"}, {"engine": "vllm"}, {"engine_args": {"dtype": "float16"}}):
        assert cells(folder, other)[0].id != base.id
    assert cells(folder, params={"max_tokens": 255})[0].id != base.id


def test_a_sweep_over_parameters_has_an_output_each(folder: Path) -> None:
    sweep = {"grid": {"temperature": [0.5, 1.0]}}
    found = cells(folder, {"output": {"path": "out-{{ params.temperature }}.parquet"}}, sweep=sweep)
    assert [cell.payload["output"]["path"] for cell in found] == [
        str(folder / "out-0.5.parquet"), str(folder / "out-1.0.parquet")
    ]  # fmt: skip
    with pytest.raises(UserError, match=r"infer\.output\.path: several cells would write"):
        cells(folder, {"output": {"path": "out.parquet"}}, sweep=sweep)


@pytest.mark.parametrize(
    ("infer", "keys", "message"),
    [
        ({"prompt": None}, {}, "exactly one of prompt, messages"),
        ({"messages": "m"}, {}, "exactly one of prompt, messages"),
        ({"prompt": "{{ q"}, {}, "infer.prompt: it is not a template of Jinja: unexpected end"),
        ({"prompt": "a\n{% if q %}"}, {}, "(line 2 of it)"),
        ({"prompt": "{{ q | uper }}"}, {}, "No filter named 'uper'"),
        ({"system": "{{ }}", "chat": True}, {}, "infer.system: it is not a template of Jinja"),
        ({"system": "s"}, {}, "infer.system: it needs chat: true"),
        ({"prompt": None, "messages": "m", "chat": True}, {}, "infer.chat"),
        ({"engine": "vlm"}, {}, "did you mean 'vllm'"),
        ({"workers": 0}, {}, "infer.workers"),
        ({}, {"params": {"learning_rate": 1}}, "the engine transformers would ignore it"),
        ({}, {"params": {"presence_penalty": 1}}, "engines that use it: vllm, sglang"),
        ({}, {"params": {"n": 3, "temperature": 0}}, "params.n: with temperature 0"),
        ({}, {"params": {"num_beams": 2, "n": 3}}, "params.n: a beam search of 2"),
        ({}, {"params": {"num_beams": 2, "top_p": 0.5}}, "params.top_p: it would be ignored"),
        ({}, {"params": {"min_tokens": 300}}, "params.min_tokens: it is above max_tokens"),
        ({"engine": "vllm"}, {"params": {"regex": "a", "choice": ["b"]}}, "one form"),
        ({"engine": "vllm"}, {"resources": {"gpus": 2}}, "tensor_parallel_size"),
        ({}, {"resources": {"nodes": 2}}, "resources.nodes: a worker of an inference"),
        ({}, {"array": {"pack": 2}}, "array.pack"),
        ({}, {"objective": {"metric": "x"}}, "objective: answers have no metric"),
        ({}, {"train": {"data": {"source": "python-stdlib"}}}, "train: the kind is infer"),
        ({"chat_template": "none.jinja"}, {}, "infer.chat_template: cannot read"),
    ],
)
def test_what_does_not_go_together_is_refused(
    folder: Path, infer: dict[str, Any], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        cells(folder, infer, **keys)
    assert message in str(caught.value)


def inputs(folder: Path, infer: dict[str, Any]) -> None:
    loaded = load_recipe(write(folder, infer))
    check_inputs(loaded, expand(loaded), Site(name="s", scheduler="local"))


@pytest.mark.parametrize(
    ("infer", "message"),
    [
        ({"model": "data"}, "infer.model: .* is no model folder"),
        ({"adapter": "data"}, "infer.adapter: .* is no adapter"),
        ({"input": {"files": "data/*.parquet"}}, "infer.input.files: no file matches"),
        ({"output": {"path": "data/in.jsonl"}}, "infer.output.path: .* is the input"),
        ({"output": {"path": "./data/../data/in.jsonl"}}, "is the input"),
        ({"output": {"path": "data"}}, "is the input"),
        (
            {"input": {"files": "data/*.jsonl"}, "output": {"path": "data/out.jsonl"}},
            "is the input",
        ),
        ({"input": {"files": "data"}, "output": {"path": "data/deep/out"}}, "is the input"),
    ],
)
def test_what_is_not_there_or_would_be_overwritten(
    folder: Path, infer: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        inputs(folder, infer)


def test_an_output_beside_the_input_is_fine(folder: Path) -> None:
    inputs(folder, {"output": {"path": "data/out.parquet"}})
    (folder / "link.parquet").symlink_to(folder / "data" / "in.jsonl")
    with pytest.raises(UserError, match="is the input"):
        inputs(folder, {"output": {"path": "link.parquet"}})


@pytest.mark.parametrize("name", ["infer_demo.yaml", "infer_sweep_best.yaml"])
def test_the_recipes_are_right(name: str) -> None:
    (cell,) = expand(load_recipe(ROOT / "recipes" / name))
    assert cell.payload["input"]["key"] == "id"
