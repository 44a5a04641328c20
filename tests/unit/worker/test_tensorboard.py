"""Event files, read by TensorBoard itself."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tensorboard", reason="tensorboard is not installed")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

from hpcml.runs.anew import begin_anew
from hpcml.worker.tensorboard import EventFile, folder_of
from tests.unit.worker.worker_run import Run


def report(metrics: Path, *records: dict[str, Any]) -> None:
    with metrics.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def all_events(folder: Path) -> Iterable[Any]:
    for path in sorted(folder.iterdir()):
        for text in RawEventFileLoader(str(path)).Load():
            yield Event.FromString(text)


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "curves"
    file = EventFile(str(folder), str(metrics), 1)
    assert not file.follow()
    assert not folder.exists()  # nothing is made where nothing is reported
    report(metrics, {"step": 1, "total_steps": 300, "loss": 2.5, "ü b": 1})
    assert file.follow()
    assert not file.follow()
    report(metrics, {"step": 300, "loss": 0.5}, {"step": 300, "eval_loss": 1e300})
    file.close()
    assert curves(folder) == {
        "loss": [(1, 2.5), (300, 0.5)],
        "ü b": [(1, 1.0)],
        "eval_loss": [(300, math.inf)],
    }


def test_a_training_that_goes_back_shows_one_curve(tmp_path: Path) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "curves"
    for attempt, steps in enumerate((range(1, 8), range(5, 12), range(8, 15)), 1):
        file = EventFile(str(folder), str(metrics), attempt)
        report(metrics, *({"step": step, "loss": attempt} for step in steps))
        file.close()
    values = [1] * 4 + [2] * 3 + [3] * 7
    assert curves(folder) == {"loss": list(enumerate(map(float, values), 1))}


def test_what_was_not_drawn_before_a_kill_counts_once(tmp_path: Path) -> None:
    """The rest of the attempt before belongs to its own course, which the new one replaces."""
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "curves"
    EventFile(str(folder), str(metrics), 1)
    report(metrics, *({"step": step, "loss": 1} for step in range(1, 9)))  # and nothing was drawn
    file = EventFile(str(folder), str(metrics), 2)
    report(metrics, *({"step": step, "loss": 2} for step in range(4, 7)))
    file.close()
    assert curves(folder) == {"loss": [(step, 1.0 if step < 4 else 2.0) for step in range(1, 7)]}


@pytest.mark.parametrize("tail", [bytes(100), b"\xff" * 40, b"\x01" + bytes(30)])
def test_what_follows_a_torn_record_is_not_believed(tmp_path: Path, tail: bytes) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "curves"
    report(metrics, {"step": 1, "loss": 1})
    EventFile(str(folder), str(metrics), 1).close()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes() + tail)
    report(metrics, {"step": 2, "loss": 2})
    EventFile(str(folder), str(metrics), 2).close()
    assert [step for step, _ in curves(folder)["loss"]] == [1, 2]


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "curves"
    file = EventFile(str(folder), str(metrics), 1)
    report(metrics, {"step": 1, "loss": 1})
    write = os.write
    monkeypatch.setattr("os.write", lambda to, text: write(to, text[:20]))
    with pytest.raises(OSError, match="No space left"):
        file.follow()


def test_what_names_no_step_is_counted(tmp_path: Path) -> None:
    metrics, folder = tmp_path / "metrics.jsonl", tmp_path / "curves"
    for attempt in (1, 2):
        report(metrics, {"loss": 1.0}, {"loss": 2.0})
        EventFile(str(folder), str(metrics), attempt).close()
    assert [step for step, _ in curves(folder)["loss"]] == [0, 1, 2, 3]


LINES = st.one_of(
    st.dictionaries(
        st.text(min_size=1),
        st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text()),
    ).map(json.dumps),
    st.sampled_from(["", "no JSON", "[1]", '{"step": 1e999}', '{"step": -3, "loss": 1}']),
)


@given(st.lists(st.tuples(st.lists(LINES, max_size=6), st.integers(0, 200)), max_size=5))
def test_every_line_is_one_event_whatever_was_cut_off(
    attempts: list[tuple[list[str], int]],
) -> None:
    """Whatever a program writes, and however much of the last file a crash took along."""
    with tempfile.TemporaryDirectory() as name:
        metrics, folder = Path(name) / "metrics.jsonl", Path(name) / "curves"
        lines = 0
        for attempt, (texts, lost) in enumerate(attempts, 1):
            with metrics.open("a") as file:
                file.writelines(f"{text}\n" for text in texts)
            lines += len(texts)
            EventFile(str(folder), str(metrics), attempt).close()
            newest = max(folder.iterdir(), default=None) if folder.exists() else None
            if newest is not None:
                os.truncate(newest, max(newest.stat().st_size - lost, 0))
        EventFile(str(folder), str(metrics), len(attempts) + 1).close()
        events = list(all_events(folder)) if folder.exists() else []
        own = [
            e for e in events if not e.HasField("file_version") and not e.HasField("session_log")
        ]
        assert len(own) == lines


def test_the_folder_says_which_cell(tmp_path: Path) -> None:
    def name(params: dict[str, Any], *swept: str) -> str:
        folder = Path(folder_of(str(tmp_path), {"index": 7, "params": params}, swept))
        assert folder.parent == tmp_path / "tensorboard"
        return folder.name

    assert name({"lr": 0.1, "seed": 2, "fixed": 3}, "lr", "seed") == "7 lr=0.1 seed=2"
    assert name({}) == "7"
    assert name({"data": "../a\0/'b'\n"}, "data") == "7 data=.._a___b_"
    assert len(name({"text": "x" * 500}, "text")) == 120
    assert len(name({"text": "漢" * 500}, "text").encode()) <= 120


def test_the_worker_writes_them(tmp_path: Path) -> None:
    program = (
        "import os\n"
        "with open(os.environ['HPCML_METRICS'], 'a') as file:\n"
        '    file.write(\'{"step": 3, "loss": 0.5}\\n\')\n'
    )
    run = Run(tmp_path, [program, "pass"])
    assert run.run() == 0
    assert run.run(1) == 0
    (folder,) = (run.folder.path / "tensorboard").iterdir()
    assert folder.name == "0 x=0"
    assert curves(folder) == {"loss": [(3, 0.5)]}


def test_a_cell_that_begins_anew_has_new_curves(tmp_path: Path) -> None:
    program = "import hpcml\nfor step in range(5): hpcml.report(step=step, loss=step)"
    run = Run(tmp_path, [program])
    assert run.run() == 0
    begin_anew(run.folder, "cell0")
    assert not any((run.folder.path / "tensorboard").iterdir())
    run.submit()
    assert run.run(submission=2) == 0
    assert curves(run.folder.path / "tensorboard" / "0 x=0") == {
        "loss": [(step, float(step)) for step in range(5)]
    }
    aside = run.folder.cell_dir("cell0") / "set-aside-1" / "tensorboard" / "0 x=0"
    assert len(curves(aside)["loss"]) == 5


def test_no_place_for_them_is_no_failure(tmp_path: Path) -> None:
    run = Run(tmp_path, ["import hpcml; hpcml.report(loss=1)"])
    (run.folder.path / "tensorboard").write_text("in the way")
    assert run.run() == 0
