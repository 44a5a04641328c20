"""Before a training is submitted it is said whether it fits, and refused where it can't."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.plan import Plan, compile_plan
from hpcml.recipe.load import load_recipe
from hpcml.site.search import load_site

RECIPE = """
name: t
kind: train
params: {hidden_size: 2048, num_hidden_layers: LAYERS, num_attention_heads: 16, bf16: true}
sweep: {grid: {seed: [0, 1]}}
train: {data: {source: python-stdlib}}
resources: {gpus: 8, time: 1h}
"""


def compiled(folder: Path, layers: int | str, gpu: str = "gpu_memory: 80G") -> Plan:
    site, recipe = folder / "s.yaml", folder / "r.yaml"
    line = f"{{name: gpu, cpus: 64, memory: 500G, gpus: 8, {gpu}}}"
    site.write_text(f"name: s\nscheduler: slurm\npartitions: [{line}]\n")
    recipe.write_text(RECIPE.replace("LAYERS", str(layers)))
    return compile_plan(load_recipe(recipe), load_site(site), folder / "runs")


def test_fits(tmp_path: Path) -> None:
    assert any(
        note.startswith("memory fits: needs ") and "of 80.0 GiB per GPU" in note
        for note in compiled(tmp_path, 4).notes
    )


def test_does_not_fit(tmp_path: Path) -> None:
    """The states of 4 B weights have 64 GiB, and the buckets of the gradients as much as they."""
    notes = compiled(tmp_path, 80).notes
    assert any(note.startswith("memory does not fit: needs ") for note in notes)


def test_can_not_fit(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"r\.yaml:6: train: torch \(ddp 8\) needs .* alone"):
        compiled(tmp_path, 200)


def test_swept_models(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    compiled(tmp_path, 4)
    text = recipe.read_text().replace("seed: [0, 1]", "num_hidden_layers: [2, 4, 200]")
    recipe.write_text(text.replace("num_hidden_layers: 4, ", ""))
    with pytest.raises(UserError, match="in the cell with num_hidden_layers=200"):
        compile_plan(load_recipe(recipe), load_site(tmp_path / "s.yaml"), tmp_path / "runs")


def test_nothing_is_said_where_the_site_does_not(tmp_path: Path) -> None:
    assert compiled(tmp_path, 200, "gpu_type: h100").notes == ()
