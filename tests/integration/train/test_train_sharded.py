"""Ranks that share a model: FSDP2 and ZeRO train as one process does, whatever happens to them."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.train import cells

pytest.importorskip("deepspeed", reason="the engine deepspeed is not installed")

from hpcml.train.checkpoint import CheckpointStore
from hpcml.train.export import export
from tests.integration.train import forked

MakeCell = Callable[..., Path]

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "torch"},
    "fsdp": {"engine": "torch", "fsdp": True},
    **{f"zero{stage}": {"engine": "deepspeed", "zero_stage": stage} for stage in range(4)},
}
SHARED = ("fsdp", "zero1", "zero2", "zero3")

CURVE = {
    "max_steps": 30, "eval_steps": 15, "save_steps": 10, "logging_steps": 1,
    # Each of these changes the curve, so none of them can be lost without being noticed.
    "global_batch_size": 8, "gradient_accumulation_steps": 2, "adam_beta1": 0.8,
    "adam_beta2": 0.9, "adam_epsilon": 1e-6, "weight_decay": 0.1, "layerwise_lr_decay": 0.8,
    "max_grad_norm": 0.5, "lr_scheduler_type": "cosine", "lr_end": 1e-4, "warmup_steps": 3,
    "label_smoothing_factor": 0.1, "loss_function": "z_loss", "z_loss_weight": 1e-3,
    "init_method": "xavier_uniform", "tie_word_embeddings": False, "num_key_value_heads": 1,
}  # fmt: skip


def of_kind(kind: str, parameters: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The arguments of a cell of a kind."""
    chosen = dict(KINDS[kind])
    engine = chosen.pop("engine")
    return {"engine": engine, "parameters": {**parameters, **chosen}, **options}


def change(cell: Path, **parameters: Any) -> None:
    """Give a cell another layout, as a later submission may."""
    content = json.loads((cell / "cell.json").read_text())
    content["payload"]["parameters"].update(parameters)
    (cell / "cell.json").write_text(json.dumps(content))


def assert_same_curve(cell: Path, reference: Path, relative: float = 1e-4) -> None:
    actual, expected = cells.metrics(cell), cells.metrics(reference)
    assert actual.keys() == expected.keys()
    for step, values in expected.items():
        for name in ("loss", "eval_loss", "grad_norm"):
            if name in values:
                assert actual[step][name] == pytest.approx(values[name], rel=relative), step


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, corpus: str, data_root: Path) -> Path:
    """The curve of one process, which all others are compared with."""
    cell = cells.write_cell(tmp_path_factory.mktemp("reference") / "cell", corpus, CURVE)
    assert cells.train(cell, data_root) == 0
    return cell


@pytest.mark.parametrize("kind", KINDS)
def test_all_train_as_one_process_does(
    make_cell: MakeCell, data_root: Path, reference: Path, kind: str
) -> None:
    cell = make_cell(**of_kind(kind, CURVE))
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    assert_same_curve(cell, reference)
    # It was really shared as it was asked to be.
    written = cell / "checkpoints" / "step-30"
    shards = [path.name for path in (written / "model").glob("*.safetensors")]
    assert len(shards) == (2 if kind in ("fsdp", "zero3") else 1)
    assert (written / "optimizer").is_dir() == (kind == "fsdp")
    if kind.startswith("zero"):
        import torch

        files = sorted((written / "deepspeed").glob("*_optim_states.pt"))
        stages = [torch.load(path, weights_only=False) for path in files]
        stages = [state["optimizer_state_dict"]["zero_stage"] for state in stages]
        assert stages == ([] if kind == "zero0" else [int(kind[-1])] * 2)


def test_a_shared_model_is_exported_as_any_other(
    make_cell: MakeCell, data_root: Path, reference: Path, tmp_path: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = AutoModelForCausalLM.from_pretrained(export(reference, tmp_path / "reference"))
    for kind in ("fsdp", "zero3"):
        cell = make_cell(kind, **of_kind(kind, CURVE))
        assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
        model = AutoModelForCausalLM.from_pretrained(export(cell, tmp_path / f"model.{kind}"))
        AutoTokenizer.from_pretrained(tmp_path / f"model.{kind}")
        assert model.config.to_dict() == {
            **expected.config.to_dict(),
            "_name_or_path": model.config._name_or_path,
        }
        for name, weight in expected.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-3, atol=1e-4)


def test_what_only_fsdp_has_of_clipping(make_cell: MakeCell, data_root: Path) -> None:
    parameters = {
        **CURVE, "max_steps": 8, "clip_grad_value": 1e-2, "grad_norm_type": float("inf"),
        "max_grad_norm": 5e-3, "gradient_checkpointing": True, "tie_word_embeddings": True,
    }  # fmt: skip
    one = make_cell("one", parameters=parameters)
    assert cells.train(one, data_root) == 0
    assert cells.metrics(one)[1]["grad_norm"] == pytest.approx(1e-2)
    cell = make_cell("cell", **of_kind("fsdp", parameters))
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    assert_same_curve(cell, one)


@pytest.mark.parametrize("kind", ["fsdp", "zero0", "zero2", "zero3"])
def test_half_precision(make_cell: MakeCell, data_root: Path, reference: Path, kind: str) -> None:
    import torch

    cell = make_cell("cell", **of_kind(kind, {**CURVE, "bf16": True}))
    assert forked.train(cell, data_root, 2, stop_after=8) == [75, 75], forked.log(cell)
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    halves, singles = cells.metrics(cell), cells.metrics(reference)
    assert halves[1]["loss"] != singles[1]["loss"]
    for step in singles:
        assert halves[step]["loss"] == pytest.approx(singles[step]["loss"], rel=0.02)
    # DeepSpeed's weights are in half precision themselves.
    kept = {weight.dtype for weight in stored(cell / "checkpoints" / "step-30" / "model").values()}
    assert kept == {torch.float32 if kind == "fsdp" else torch.bfloat16}


@pytest.mark.parametrize("kind", SHARED)
def test_the_best_checkpoint_is_taken(make_cell: MakeCell, data_root: Path, kind: str) -> None:
    # A rate that grows far too high: the best model is an early one.
    rising = {
        "lr_scheduler_type": "cyclic", "lr_step_size_up": 20, "learning_rate": 2.0,
        "max_steps": 20, "eval_steps": 1, "save_steps": 20, "logging_steps": 20,
        "load_best_model_at_end": True,
    }  # fmt: skip
    cell = make_cell("cell", **of_kind(kind, rising))
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    evaluated = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
    best = min(line["eval_loss"] for line in evaluated if "eval_loss" in line)
    assert evaluated[-1]["eval_loss"] == pytest.approx(best, rel=1e-6)
    assert evaluated[-1]["eval_loss"] < evaluated[-2]["eval_loss"]
    # The same once more, of a training that is finished.
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    again = json.loads((cell / "metrics.jsonl").read_text().splitlines()[-1])
    assert again["eval_loss"] == evaluated[-1]["eval_loss"]


@pytest.mark.parametrize(("offload", "stage"), [("optimizer", 2), ("all", 3)])
def test_offloading_changes_nothing(
    make_cell: MakeCell, data_root: Path, reference: Path, offload: str, stage: int
) -> None:
    parameters = {**CURVE, "zero_stage": stage, "offload": offload}
    cell = make_cell("cell", engine="deepspeed", parameters=parameters)
    assert forked.train(cell, data_root, 2, stop_after=8) == [75, 75], forked.log(cell)
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    assert_same_curve(cell, reference)


def test_deepspeed_gets_what_the_recipe_says(make_cell: MakeCell, data_root: Path) -> None:
    from hpcml.train.config import TrainingJob
    from hpcml.train.deepspeed_engine import settings

    own = {
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 1000},
        "train_batch_size": "auto",
        "wall_clock_breakdown": True,
    }
    cell = make_cell(
        engine="deepspeed", parameters={"zero_stage": 3, "offload": "all"}, deepspeed=own
    )
    job = TrainingJob.load(cell, cells.environment(cell, data_root))
    found = settings(job, (4, 1), universal=False)
    assert found["train_batch_size"] == 4
    assert found["wall_clock_breakdown"] is True
    zero = found["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (3, 1000)
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"
    assert forked.train(cell, data_root, 1) == [0], forked.log(cell)
    # What DeepSpeed does not know is said before anything is trained.
    content = json.loads((cell / "cell.json").read_text())
    content["payload"]["deepspeed"] = {"zero_optimization": {"no_such_key": 1}}
    (cell / "cell.json").write_text(json.dumps(content))
    assert forked.train(cell, data_root, 1) == [1]
    assert "no_such_key" in forked.log(cell).splitlines()[-1]


# -- kills ----------------------------------------------------------------------------------------

LONG = {"max_steps": 60, "eval_steps": 25, "save_steps": 4, "logging_steps": 1, "dropout": 0.1}
ROUNDS = int(os.environ.get("HPCML_TEST_KILLS", "3"))


def kill_somewhere(cell: Path, data_root: Path, how: str, chooser: random.Random) -> None:
    """Start the ranks, and kill some of them at a moment that the chooser draws."""

    def losses() -> int:
        path = cell / "metrics.jsonl"
        return path.read_bytes().count(b'"loss"') if path.exists() else 0

    before = losses()
    ranks = forked.start_all(cell, data_root, 2)
    try:
        end = time.monotonic() + 240
        while losses() < before + 2 or (
            how == "saving" and not any((cell / "checkpoints").glob(".writing-*"))
        ):
            if all(rank.exitcode == 0 for rank in ranks):
                return  # it ended before
            assert all(rank.exitcode in (None, 0) for rank in ranks), forked.log(cell)
            assert time.monotonic() < end, "it takes too long"
            time.sleep(0.001)
        time.sleep(chooser.uniform(0, 0.02 if how == "saving" else 0.2))
        victims = ranks if how == "all" else [chooser.choice(ranks)]
        for rank in victims:
            rank.kill()
        time.sleep(0.1)
    finally:
        for rank in ranks:  # the worker does that when one rank is gone
            rank.kill()
            rank.join()


@pytest.mark.parametrize("kind", SHARED)
def test_kills_cost_nothing_but_time(make_cell: MakeCell, data_root: Path, kind: str) -> None:
    """A rank, all ranks, and during a save; the end is that of a training without any kill."""
    whole = make_cell("whole", **of_kind(kind, LONG))
    assert forked.train(whole, data_root, 2) == [0, 0], forked.log(whole)
    cell = make_cell("cell", **of_kind(kind, LONG))
    chooser = random.Random(kind)
    for number in range(ROUNDS):
        kill_somewhere(cell, data_root, ("one", "saving", "all")[number % 3], chooser)
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    assert not list((cell / "checkpoints").glob(".*"))
    assert cells.events(cell, "damaged") == []
    assert cells.metrics(cell) == cells.metrics(whole)
    assert cells.weights(cell) == cells.weights(whole)


# -- damage ---------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped byte": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("kind", ["fsdp", "zero3"])
def test_the_checkpoint_before_a_damaged_one_is_used(
    make_cell: MakeCell, data_root: Path, reference: Path, tmp_path: Path, kind: str
) -> None:
    cell = make_cell("cell", **of_kind(kind, CURVE))
    assert forked.train(cell, data_root, 2, stop_after=13) == [75, 75], forked.log(cell)
    newest = cell / "checkpoints" / "step-13"
    parts = [path for path in newest.rglob("*") if path.is_file() and path.name != "manifest.json"]
    others = [path for path in parts if "1" in path.name.replace("step-13", "")]
    assert len(others) >= 3  # of the second rank: weights, optimizer, and what is its own
    for path in parts:
        for name, damage in DAMAGES.items():
            copy = tmp_path / "copy"
            shutil.copytree(cell / "checkpoints", copy)
            damage(copy / path.relative_to(cell / "checkpoints"))
            events = tmp_path / "events.jsonl"
            found = CheckpointStore(copy, {}, events).load_latest()
            assert found is not None
            assert found.step == 10, (path, name)
            assert path.name in events.read_text()
            shutil.rmtree(copy)
            events.unlink()
    (cell / "checkpoints" / "latest").write_text("step-99\n")
    flip(others[0])
    assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
    (damaged,) = cells.events(cell, "damaged")
    assert "damaged-step-13-1" in damaged["path"]
    assert_same_curve(cell, reference)


# -- other layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([("fsdp", 2), ("fsdp", 4), ("fsdp", 1), ("fsdp", 2)], id="fsdp"),
        pytest.param([("ddp", 2), ("fsdp", 2), ("ddp", 1)], id="ddp and fsdp"),
        pytest.param([("zero1", 2), ("zero2", 4), ("zero1", 1)], id="zero1 and zero2"),
        pytest.param([("zero0", 2), ("zero0", 1)], id="zero0"),
    ],
)
def test_another_layout_goes_on(
    make_cell: MakeCell, data_root: Path, reference: Path, layouts: list[tuple[str, int]]
) -> None:
    cell = make_cell(**of_kind(layouts[0][0], CURVE))
    for number, (kind, ranks) in enumerate(layouts):
        layout = {key: value for key, value in KINDS[kind].items() if key != "engine"}
        change(cell, **{"fsdp": False, **layout})
        last = number == len(layouts) - 1
        codes = forked.train(cell, data_root, ranks, None if last else 8)
        assert codes == [0 if last else 75] * ranks, forked.log(cell)
    assert not list((cell / "checkpoints").glob(".*"))
    assert_same_curve(cell, reference)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({"zero_stage": 0}, {"zero_stage": 1}, "can't go on with 1, only with 0"),
        ({"zero_stage": 2}, {"zero_stage": 3}, "can't go on with 3, only with 1 or 2"),
        ({"zero_stage": 1, "optim": "sgd"}, {"zero_stage": 2}, "reshards adam and adamw"),
    ],
)
def test_a_layout_that_can_not_go_on_is_refused(
    make_cell: MakeCell, data_root: Path, before: dict[str, Any], after: dict[str, Any], says: str
) -> None:
    cell = make_cell(engine="deepspeed", parameters=before)
    assert forked.train(cell, data_root, 1, stop_after=3) == [75], forked.log(cell)
    change(cell, **after)
    assert forked.train(cell, data_root, 1) == [1]
    assert says in forked.log(cell).splitlines()[-1]


# -- fine-tuning ----------------------------------------------------------------------------------

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"bias": "none"},
    "adapter": {},
    "prompt_tuning": {},
    "freeze": {"num_frozen_layers": 1},
    "top": {"num_top_layers": 1},
}


def test_zero3_goes_on_with_as_many_processes_only(make_cell: MakeCell, data_root: Path) -> None:
    cell = make_cell(**of_kind("zero3", {}))
    assert forked.train(cell, data_root, 2, stop_after=3) == [75, 75], forked.log(cell)
    assert forked.train(cell, data_root, 1) == [1]
    assert "can only go on with as many processes, 2" in forked.log(cell).splitlines()[-1]


@pytest.mark.parametrize("method", METHODS)
def test_fine_tuning_is_the_same(
    make_cell: MakeCell, data_root: Path, base_model: Path, tmp_path: Path, method: str
) -> None:
    parameters = {"fine_tuning_method": method, **METHODS[method]}
    merge = method != "prompt_tuning"
    one = make_cell("one", parameters=parameters, model=base_model)
    assert cells.train(one, data_root) == 0
    expected = stored(export(one, tmp_path / "one.model", merge=merge))
    # Virtual tokens need whole weights.
    for kind in ("zero2",) if method == "prompt_tuning" else ("fsdp", "zero3"):
        cell = make_cell(kind, **of_kind(kind, parameters, model=base_model))
        assert forked.train(cell, data_root, 2, stop_after=6) == [75, 75], forked.log(cell)
        assert forked.train(cell, data_root, 2) == [0, 0], forked.log(cell)
        assert_same_curve(cell, one)
        found = stored(export(cell, tmp_path / f"{kind}.model", merge=merge))
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            assert found[name].shape == weight.shape
            assert (found[name] - weight).abs().max() < 1e-3, (kind, name)


def stored(folder: Path) -> dict[str, Any]:
    from hpcml.train.finetune import stored_weights

    return stored_weights(folder)
