"""The commands that change something: cancel, export."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.runs.status import collect
from hpcml.train.export import ExportError
from tests.unit.cli.conftest import Invoke
from tests.unit.runs.fakes import FakeRun, make_cells


def events(fake: FakeRun, index: int) -> list[str]:
    lines = (fake.dir(index) / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


class TestCancel:
    def test_chosen_cells(self, fake: FakeRun, invoke: Invoke) -> None:
        fake.start(3, attempt=2)
        with fake.alive(3):
            out = invoke("cancel", "toy", "3", "c00004", "0").output
        assert out.splitlines() == [
            "cell 0 (learning_rate=0.001, seed=0): done already",
            "cell 3 (learning_rate=0.004, seed=0): asked to save and stop",
            "cell 4 (learning_rate=0.005, seed=1): will not be started (pending)",
        ]
        assert (fake.dir(3) / "stop").exists()
        assert (fake.dir(4) / "stop").exists()
        assert events(fake, 3)[-1] == "cancelled"
        assert events(fake, 4) == ["cancelled"]
        assert events(fake, 0)[-1] == "ended"

    def test_all_that_is_left(self, fake: FakeRun, invoke: Invoke) -> None:
        invoke("cancel", "toy")
        found = collect(fake.folder)
        assert found.counts() == {"stopped": 2, "failed": 1, "done": 2}
        assert [cell.index for cell in found.cells.values() if cell.cancelled] == [3, 4]
        assert "nothing to cancel" in invoke("cancel", "toy").output
        assert "cancelled already" in invoke("cancel", "toy", "4").output
        assert events(fake, 4) == ["cancelled"]

    def test_many_cells_are_counted(self, root: Path, invoke: Invoke) -> None:
        run = FakeRun(root, make_cells(30))
        out = invoke("cancel", "toy").output
        assert "and 20 more will not be started" in out
        assert len(out.splitlines()) == 11
        assert collect(run.folder).counts() == {"stopped": 30}

    def test_an_unknown_cell_cancels_nothing(self, fake: FakeRun, invoke: Invoke) -> None:
        with pytest.raises(UserError, match="no cell is named '9'"):
            invoke("cancel", "toy", "4", "9")
        assert not fake.folder.cell_dir("c00004").exists()

    def test_a_name_that_can_mean_two_runs_cancels_nothing(
        self, fake: FakeRun, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        other = FakeRun(tmp_path / "other", make_cells(5))
        roots = [fake.folder.path.parents[1], other.folder.path.parents[1]]
        monkeypatch.setattr("hpcml.runs.find.known_roots", lambda: roots)
        with pytest.raises(UserError, match="say which one by --root"):
            invoke("cancel", "toy", "4")
        invoke("cancel", other.folder.path, "4")
        assert not fake.folder.cell_dir("c00004").exists()
        assert events(other, 4) == ["cancelled"]


class TestExport:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[object]:
        calls: list[object] = []

        def export(cell_dir: Path, target: Path, which: str, merge: bool) -> None:
            if target.exists():
                raise ExportError(f"{target} is not empty")
            calls.append((cell_dir, target, which, merge))

        monkeypatch.setattr("hpcml.train.export.export", export)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        return calls

    def test_the_best_cell(
        self, fake: FakeRun, invoke: Invoke, calls: list[object], tmp_path: Path
    ) -> None:
        fake.checkpoint(1, 10)
        out = invoke("export", "toy", "best", tmp_path / "model").output
        assert "step-10" in out
        assert "the best of toy may still change:" in out
        out = invoke("export", "toy", "1", tmp_path / "model", "--unmerged").output
        assert "may still change" not in out
        assert calls == [
            (fake.dir(1), tmp_path / "model", "final", True),
            (fake.dir(1), tmp_path / "model", "final", False),
        ]

    def test_a_folder_that_is_in_use(
        self, fake: FakeRun, invoke: Invoke, calls: list[object], tmp_path: Path
    ) -> None:
        fake.checkpoint(1, 10)
        with pytest.raises(UserError, match="is not empty"):
            invoke("export", "toy", "best", tmp_path)

    def test_without_a_checkpoint(
        self, fake: FakeRun, invoke: Invoke, calls: list[object], tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match="no checkpoint"):
            invoke("export", "toy", "1", tmp_path / "model")
        assert calls == []

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
    def test_a_checkpoint_that_cannot_be_read(
        self, fake: FakeRun, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        fake.checkpoint(1, 10)

        read = Path.open

        def refuse(path: Path, *rest: Any, **more: Any) -> Any:
            if "checkpoints" in str(path):
                raise OSError(code, os.strerror(code), str(path))
            return read(path, *rest, **more)

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(UserError, match=r"cannot read .*checkpoints/latest"):
            invoke("export", "toy", "1", "model")

    def test_without_torch(
        self, fake: FakeRun, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        fake.checkpoint(1, 10)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match=r"pip install 'hpcml\[torch\]'"):
            invoke("export", "toy", "1", tmp_path / "model")
