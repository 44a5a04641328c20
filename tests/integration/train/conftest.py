from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the engine torch is not installed")
pytest.importorskip("transformers", reason="the engine torch is not installed")

from tests.integration.train import cells


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cells.write_corpus(tmp_path_factory.mktemp("corpus") / "files")


@pytest.fixture(scope="session")
def data_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_state_between_trainings() -> Iterator[None]:
    yield
    cells.forget()


@pytest.fixture
def make_cell(tmp_path: Path, corpus: str) -> Callable[..., Path]:
    def make(name: str = "cell", **arguments: Any) -> Path:
        return cells.write_cell(tmp_path / name, corpus, **arguments)

    return make


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory, corpus: str, data_root: Path) -> Path:
    """A model folder, made by training and exporting."""
    from hpcml.train.export import export

    folder = tmp_path_factory.mktemp("base")
    cell = cells.write_cell(folder / "cell", corpus, {"max_steps": 30})
    assert cells.train(cell, data_root) == 0
    return export(cell, folder / "model")
