"""`hpcml plan`: what is said, and what is not invented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcml import resources
from hpcml.errors import UserError
from tests.unit.cli.conftest import Invoke

SITE = """
name: big
scheduler: slurm
partitions:
  - {name: gpu, cpus: 64, memory: 500G, gpus: 8, gpu_type: h100, gpu_memory: 80G, max_time: 1-00:00}
  - {name: odd, cpus: 64, memory: 500G, gpus: 4, gpu_type: x9000}
storage: {write_speed: 2G, read_speed: 4G}
"""

RECIPE = """
name: seven
kind: train
params:
  hidden_size: 4096
  num_hidden_layers: 32
  num_attention_heads: 32
  intermediate_size: 11008
  vocab_size: 32000
  tie_word_embeddings: false
  max_length: 4096
  bf16: true
  global_batch_size: 128
  max_steps: 1000
sweep: {grid: {learning_rate: [1e-4, 3e-4, 1e-3]}}
train: {engine: megatron, data: {source: python-stdlib}}
resources: {nodes: 2, gpus: 8, time: 4h}
"""


@pytest.fixture
def written(tmp_path: Path, root: Path) -> tuple[Path, Path]:
    (tmp_path / "big.yaml").write_text(SITE)
    (tmp_path / "seven.yaml").write_text(RECIPE)
    return tmp_path / "seven.yaml", tmp_path / "big.yaml"


def documents(invoke: Invoke, *arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(invoke("plan", *arguments, "--json").output)
    return found


def test_a_sweep_over_the_learning_rate_has_one_answer(
    invoke: Invoke, written: tuple[Path, Path]
) -> None:
    recipe, site = written
    (document,) = documents(invoke, recipe, "--site", site)
    (estimate,) = document["estimates"]
    assert estimate["cells"] == [0, 1, 2]
    assert estimate["parameters"]["total"] == 6_738_415_616
    assert estimate["hardware"]["gpu"] == "H100"
    assert estimate["layout"]["data"] == 16
    assert estimate["fits"] is False
    # What is said to be the nearest layout that fits does, if the recipe has it.
    near = estimate["nearest"]["params"]
    settings = [f"--set=params.{name}={json.dumps(value)}" for name, value in near.items()]
    (other,) = documents(invoke, recipe, "--site", site, *settings)
    assert other["estimates"][0]["fits"] is True
    assert other["estimates"][0]["layout"]["params"] == near
    tokens = 128 * 4096
    seconds = estimate["step"]["flops"] / (16 * 989e12 * 0.4)
    assert estimate["step"]["tokens"] == tokens
    assert estimate["step"]["seconds"] == pytest.approx(seconds)
    assert estimate["training"]["gpu_hours"] == pytest.approx(seconds * 1000 * 16 / 3600)
    assert estimate["checkpoint"]["bytes"] == 14 * 6_738_415_616
    assert estimate["checkpoint"]["save"] == pytest.approx(14 * 6_738_415_616 / 2**31)
    assert {each["length"] for each in estimate["segments"]} >= {1800, 86400}


def test_tables(invoke: Invoke, written: tuple[Path, Path]) -> None:
    recipe, site = written
    output = invoke("plan", recipe, "--site", site).output
    assert "seven on big, partition gpu: 2 nodes of 8 GPUs (H100, 80.0 GiB); 3 cells" in output
    assert "6,738,415,616" in output
    assert "does not fit: needs" in output
    assert "the nearest that fits" in output
    assert "the recipe's resources.time" in output
    assert "40% of its 989 TFLOP/s" in output


def test_swept_models_have_a_line_each(invoke: Invoke, written: tuple[Path, Path]) -> None:
    recipe, site = written
    grid = "sweep.grid={num_hidden_layers: [8, 16, 24, 32], seed: [0, 1]}"
    output = invoke("plan", recipe, "--site", site, "--set", grid).output
    assert "8 cells, 4 models and layouts" in output
    assert output.count("num_hidden_layers=") == 4
    (document,) = documents(invoke, recipe, "--site", site, "--set", grid)
    cells = [estimate["cells"] for estimate in document["estimates"]]
    assert cells == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_gpu_that_nobody_knows(invoke: Invoke, written: tuple[Path, Path]) -> None:
    recipe, site = written
    settings = ("--set", "slurm.partition=odd", "--set", "resources.gpus=4")
    output = invoke("plan", recipe, "--site", site, *settings).output
    assert "the memory of its GPUs is not known" in output
    assert "how long is not known: the site does not say what GPU it is" in output
    (document,) = documents(invoke, recipe, "--site", site, *settings)
    (estimate,) = document["estimates"]
    assert estimate["fits"] is None
    assert estimate["step"]["seconds"] is None
    assert estimate["segments"] == []


def test_on_this_machine(invoke: Invoke) -> None:
    output = invoke("plan", resources.folder("recipes") / "lr_sweep.yaml", "--site", "local").output
    assert "8 cells" in output
    assert "how long is not known: it trains on CPUs" in output
    assert "tokens/s" not in output


def test_steps_that_the_data_decides(invoke: Invoke, written: tuple[Path, Path]) -> None:
    recipe, site = written
    settings = ("--set", "params.max_steps=null", "--set", "params.num_train_epochs=1")
    output = invoke("plan", recipe, "--site", site, *settings).output
    assert "the data decides how many steps there are" in output
    assert "GPU hours" not in output


def test_stages(invoke: Invoke) -> None:
    """Only trainings are planned; a model that an earlier stage makes is not known."""
    recipe = resources.folder("recipes") / "three_stages.yaml"
    explore, longer = documents(invoke, recipe, "--site", "local")
    assert explore["recipe"] == "three_stages.explore"
    assert len(explore["estimates"]) == 1
    assert longer["estimates"] == []
    assert "an earlier stage" in longer["unknown"]
    assert "an earlier stage" in invoke("plan", recipe, "--site", "local").output


def test_a_command_has_nothing_to_plan(invoke: Invoke) -> None:
    with pytest.raises(UserError, match="nothing to plan, since its kind is command"):
        invoke("plan", resources.folder("recipes") / "command_sweep.yaml")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "there is no|No such file"),
        ("{", "Expecting|config.json"),
        ('{"model_type": "mamba"}', "models of type 'mamba' can't be counted"),
        ('{"model_type": "llama"}', "has no 'num_attention_heads'"),
    ],
)
def test_a_model_that_can_not_be_counted(
    invoke: Invoke, written: tuple[Path, Path], config: str | None, message: str
) -> None:
    recipe, site = written
    folder = recipe.parent / "model"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    recipe.write_text(
        f"name: t\nkind: train\ntrain: {{model: {folder}, data: {{source: python-stdlib}}}}\n"
        "resources: {gpus: 1}\n"
    )
    (document,) = documents(invoke, recipe, "--site", site)
    assert document["estimates"] == []
    assert any(part in document["unknown"] for part in message.split("|"))


def test_models_whose_paths_are_swept(invoke: Invoke, written: tuple[Path, Path]) -> None:
    """The parameter in the path matters, though it would not by itself."""
    recipe, site = written
    for seed, layers in ((0, 2), (1, 2), (2, 4)):
        folder = recipe.parent / f"model{seed}"
        folder.mkdir()
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
        config = {"model_type": "llama", "vocab_size": 100, "num_hidden_layers": layers, **sizes}
        (folder / "config.json").write_text(json.dumps(config))
    recipe.write_text(
        "name: t\nkind: train\nsweep: {grid: {seed: [0, 1, 2], learning_rate: [1e-3, 1e-4]}}\n"
        "train: {model: 'model{{ params.seed }}', data: {source: python-stdlib}}\n"
    )
    (document,) = documents(invoke, recipe, "--site", site)
    cells = [estimate["cells"] for estimate in document["estimates"]]
    assert cells == [[0, 1], [2, 3], [4, 5]]
    assert [each["differs"] for each in document["estimates"]] == [{"seed": n} for n in range(3)]
    totals = [estimate["parameters"]["total"] for estimate in document["estimates"]]
    assert totals[0] == totals[1] < totals[2]


def test_a_tokenizer_decides_the_vocabulary(invoke: Invoke, written: tuple[Path, Path]) -> None:
    recipe, site = written
    folder = recipe.parent / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": 998}}, "added_tokens": [{"id": 999}]})
    )
    recipe.write_text(
        f"name: t\nkind: train\ntrain: {{data: {{source: python-stdlib, tokenizer: {folder}}}}}\n"
    )
    (document,) = documents(invoke, recipe, "--site", site)
    assert document["estimates"][0]["parameters"]["embedding"] == 1000 * 128


@pytest.mark.parametrize(
    ("setting", "said", "seconds"),
    [
        ("checkpoint.interval=auto", "checkpoint.interval: auto", 1800),
        ("checkpoint.interval=20m", "(checkpoint.interval)", 1200),
        ("params.save_steps=100", "save_steps 100", None),
    ],
)
def test_when_it_saves(
    invoke: Invoke, written: tuple[Path, Path], setting: str, said: str, seconds: int | None
) -> None:
    recipe, site = written
    assert said in invoke("plan", recipe, "--site", site, "--set", setting).output
    (document,) = documents(invoke, recipe, "--site", site, "--set", setting)
    (estimate,) = document["estimates"]
    seconds = seconds or 100 * estimate["step"]["seconds"]
    # Saving takes 44 s, and at the most a hundredth of the time.
    expected = max(seconds, 100 * estimate["checkpoint"]["save"]) if seconds == 1800 else seconds
    assert estimate["checkpoint"]["interval"] == pytest.approx(expected)


def test_the_page_shows_what_is_printed(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/plan.md is real output."""
    monkeypatch.setenv("COLUMNS", "88")
    monkeypatch.setenv("SCRATCH", "/scratch")
    recipe = resources.folder("recipes") / "pretrain_7b.yaml"
    site = resources.folder("site_configs") / "apptainer_cluster.yaml"
    printed = invoke("plan", recipe, "--site", site).output.partition("\nAssumed")[0]
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
    lines = "\n".join(line.rstrip() for line in printed.rstrip().split("\n"))
    assert lines in page
