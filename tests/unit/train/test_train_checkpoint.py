from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from hpcml.train.checkpoint import Checkpoint, CheckpointError, CheckpointStore

OWNER = {"cell": "c", "engine": "torch"}


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", OWNER, tmp_path / "events.jsonl", keep=2)


def save(store: CheckpointStore, step: int, best: bool = False, content: str = "state") -> None:
    with store.saving(step, best) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_text(f"weights of {step}")
        (folder / "state").write_text(content)


def names(store: CheckpointStore) -> set[str]:
    return {path.name for path in store.folder.iterdir()}


def events(store: CheckpointStore) -> list[dict[str, object]]:
    lines = (store.folder.parent / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_newest_is_loaded(store: CheckpointStore) -> None:
    assert store.load_latest() is None
    for step in (5, 10):
        save(store, step)
    assert store.load_latest() == Checkpoint(10, store.folder / "step-10")
    assert (store.folder / "latest").read_text() == "step-10\n"
    first, second = events(store)
    assert (first["event"], first["step"]) == ("checkpoint", 5)
    assert second["path"] == str(store.folder / "step-10")
    assert isinstance(second["seconds"], float)


def test_the_manifest_describes_every_file(store: CheckpointStore) -> None:
    save(store, 5)
    manifest = json.loads((store.folder / "step-5" / "manifest.json").read_text())
    assert manifest["step"] == 5
    assert manifest["belongs_to"] == OWNER
    assert set(manifest["files"]) == {"model/weights", "state"}
    assert manifest["files"]["state"]["size"] == 5


def test_older_ones_are_removed_but_never_the_best(store: CheckpointStore) -> None:
    for step in (1, 2, 3, 4, 5):
        save(store, step, best=step == 2)
    assert names(store) == {"step-2", "step-4", "step-5", "latest", "best"}
    assert store.best() == Checkpoint(2, store.folder / "step-2")
    assert store.find("best").step == 2
    assert store.find("latest").step == 5
    assert store.find(4).step == 4
    save(store, 6, best=True)
    assert names(store) == {"step-5", "step-6", "latest", "best"}


def test_without_a_best_the_latest_is_found(store: CheckpointStore) -> None:
    save(store, 1)
    assert store.best() is None
    assert store.find("best").step == 1
    with pytest.raises(CheckpointError, match=r"no checkpoint 7 .* steps there: 1"):
        store.find(7)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "state").write_text("Xtate"), "another content"),
        (lambda path: (path / "state").write_text("stat"), "4 bytes instead of 5"),
        (lambda path: (path / "model" / "weights").unlink(), "weights is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: (path / "manifest.json").write_text("{"), "unreadable"),
        (lambda path: (path / "manifest.json").write_text("[]"), "unreadable"),
        (lambda path: os.truncate(path / "manifest.json", 0), "unreadable"),
    ],
)
def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(
    store: CheckpointStore, damage: object, reason: str
) -> None:
    save(store, 1)
    save(store, 2, best=True)
    damage(store.folder / "step-2")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="is damaged"):
        store.find("latest")
    assert store.load_latest() == Checkpoint(1, store.folder / "step-1")
    assert names(store) == {"step-1", "damaged-step-2-1", "latest"}
    assert (store.folder / "latest").read_text() == "step-1\n"
    last = events(store)[-1]
    assert last["event"] == "damaged"
    assert reason in str(last["reason"])


def test_the_same_step_can_be_damaged_twice(store: CheckpointStore) -> None:
    for _ in range(2):
        save(store, 3)
        (store.folder / "step-3" / "state").unlink()
        assert store.load_latest() is None
    assert names(store) == {"damaged-step-3-1", "damaged-step-3-2"}


def test_leftovers_of_a_kill_are_removed(store: CheckpointStore) -> None:
    save(store, 1)
    for name in (".writing-2-123", ".removing-step-0"):
        (store.folder / name / "model").mkdir(parents=True)
    assert store.load_latest() == Checkpoint(1, store.folder / "step-1")
    assert names(store) == {"step-1", "latest"}


def test_a_kill_between_the_rename_and_the_pointer_loses_nothing(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2)
    (store.folder / "latest").write_text("step-1\n")
    assert store.load_latest() == Checkpoint(2, store.folder / "step-2")
    assert (store.folder / "latest").read_text() == "step-2\n"


def test_a_pointer_to_nothing_is_put_right(store: CheckpointStore) -> None:
    save(store, 1)
    (store.folder / "latest").write_text("step-9\n")
    (store.folder / "best").write_text("step-9\n")
    assert store.find("best").step == 1
    assert store.load_latest() == Checkpoint(1, store.folder / "step-1")
    assert names(store) == {"step-1", "latest"}


def test_an_error_while_writing_leaves_everything_as_it_was(store: CheckpointStore) -> None:
    save(store, 1)
    with pytest.raises(RuntimeError, match="mine"), store.saving(2):
        raise RuntimeError("mine")
    assert names(store) == {"step-1", "latest"}


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("[enforce fail at inline_container.cc] . unexpected pos 640 vs 540"),
    ],
)
def test_a_full_disk_is_told_plainly(store: CheckpointStore, error: Exception) -> None:
    save(store, 1)

    def fill() -> None:
        with store.saving(2) as folder:
            (folder / "half").write_text("x")
            raise error

    with pytest.raises(CheckpointError, match="no space left for the checkpoint of step 2"):
        fill()
    assert store.load_latest() == Checkpoint(1, store.folder / "step-1")
    assert names(store) == {"step-1", "latest"}


def test_one_of_another_cell_is_refused(store: CheckpointStore) -> None:
    save(store, 1)
    other = CheckpointStore(store.folder, {**OWNER, "cell": "d"})
    with pytest.raises(CheckpointError, match="is of another cell"):
        other.load_latest()
    assert names(store) == {"step-1", "latest"}


def test_who_asks_about_less_gets_it_all_the_same(store: CheckpointStore) -> None:
    save(store, 1)
    assert CheckpointStore(store.folder, {"cell": OWNER["cell"]}).find("latest").step == 1


@pytest.mark.parametrize("left", [".writing-3-77", ".removing-step-1", ".best-77", ".latest-77"])
def test_what_a_kill_left_half_made_is_removed(store: CheckpointStore, left: str) -> None:
    save(store, 1)
    if left.startswith((".writing", ".removing")):
        (store.folder / left).mkdir()
    else:
        (store.folder / left).write_text("step-")
    assert store.load_latest() == Checkpoint(1, store.folder / "step-1")
    assert not list(store.folder.glob(".*"))


def test_the_final_one_is_what_the_result_is_of(store: CheckpointStore) -> None:
    save(store, 1)
    save(store, 2)
    assert store.find("final").step == 2
    store.mark("final", 1)
    assert store.find("final").step == 1


def test_the_same_step_again_replaces_it(store: CheckpointStore) -> None:
    save(store, 1, content="old")
    save(store, 1, content="new")
    assert (store.find(1).path / "state").read_text() == "new"
    assert names(store) == {"step-1", "latest"}
