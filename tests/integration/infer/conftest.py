"""A tiny random model, questions for it, and recipes that ask them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import Hpcml
from tests.infer_models import make_model, questions


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


class Asking:
    """The command line, and an inference of its own kind."""

    def __init__(self, hpcml: Hpcml, model: Path) -> None:
        self.hpcml = hpcml
        self.model = model
        hpcml.environment["OMP_NUM_THREADS"] = "1"

    def input(self, rows: int, name: str = "in.parquet") -> None:
        """Write questions."""
        texts = questions(rows)
        keys = [f"key{number}" for number in range(rows)]
        pq.write_table(pa.table({"id": keys, "question": texts}), self.hpcml.folder / name)

    def recipe(self, **changes: Any) -> Path:
        """Write the recipe; ``changes`` are keys of ``infer``, or ``params``."""
        params = changes.pop("params", {"temperature": 0, "max_tokens": 8})
        infer = {
            "model": str(self.model),
            "input": {"files": "in.parquet", "key": "id"},
            "prompt": "{{ question }}",
            "output": {"columns": ["question"]},
            "engine_args": {"dtype": "float32"},
            **changes,
        }
        infer = {name: value for name, value in infer.items() if value is not None}
        recipe = {"name": "ask", "kind": "infer", "params": params, "infer": infer}
        return self.hpcml.write("ask.yaml", json.dumps(recipe))

    def __call__(self, *arguments: str, code: int | None = 0) -> Any:
        return self.hpcml("infer", "--batch", "ask.yaml", *arguments, code=code)

    @property
    def cell(self) -> Path:
        (cell,) = self.hpcml.cell_dirs()
        return cell

    def merged(self) -> dict[str, Any]:
        proof: dict[str, Any] = json.loads((self.cell / "merge.json").read_text())
        return proof

    def output(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pq.read_table(self.cell / "output.parquet").to_pylist()
        return rows

    def answers(self) -> dict[str, Any]:
        """What must not depend on who answered when."""
        return {
            row["key"]: (row["question"], row["answer"], row["finish_reason"], row["output_tokens"])
            for row in self.output()
        }


@pytest.fixture
def asking(hpcml: Hpcml, model: Path) -> Asking:
    return Asking(hpcml, model)


@pytest.fixture
def new_asking(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Callable[[], Asking]:
    return lambda: Asking(Hpcml(tmp_path_factory.mktemp("asking")), model)
