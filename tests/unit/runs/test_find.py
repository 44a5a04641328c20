"""Naming runs and cells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.runs.find import find_cell, find_run
from runs.fakes import FakeRun, make_cells


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for age, (name, run_id) in enumerate([("lora", "aa11"), ("lora", "ab22"), ("sweep", "aa33")]):
        run = FakeRun(tmp_path, make_cells(1), name=name, run_id=run_id).folder
        os.utime(run.plan_file, (1000 - age, 1000 - age))
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (None, "aa11"),
        ("lora", "aa11"),
        ("sweep", "aa33"),
        ("sweep/", "aa33"),
        ("ab22", "ab22"),
        ("ab", "ab22"),
        ("lora/ab22", "ab22"),
        ("lora/aa", "aa11"),
        ("sweep/a", "aa33"),
    ],
)
def test_what_a_run_may_be_called(root: Path, spec: str | None, found: str) -> None:
    assert find_run(spec, root).run_id == found


def test_a_path_names_a_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_run(str(root / "lora" / "ab22"), Path("/nowhere")).run_id == "ab22"
    monkeypatch.chdir(root / "lora" / "ab22")
    assert find_run(".", Path("/nowhere")).run_id == "ab22"


def test_the_newest_run_is_the_one_whose_command_was_given_last(root: Path) -> None:
    find_run("aa33", root).journal("submitting")
    assert find_run(None, root).run_id == "aa33"


def test_an_ambiguous_name_lists_what_it_can_mean(root: Path) -> None:
    with pytest.raises(UserError, match="lora/aa11, sweep/aa33"):
        find_run("aa", root)


@pytest.mark.parametrize("spec", ["swep", "zzz", "lora/zz", "", "/", "lora/aa11/x", "\0"])
def test_an_unknown_name_lists_the_known_ones(root: Path, spec: str) -> None:
    with pytest.raises(UserError, match="lora/aa11"):
        find_run(spec, root)


def test_a_misspelt_name_gets_the_nearest(root: Path) -> None:
    with pytest.raises(UserError, match="Did you mean 'sweep'"):
        find_run("swep", root)


def test_an_empty_root_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs in"):
        find_run(None, tmp_path / "absent")


def test_temporary_folders_are_no_runs(root: Path) -> None:
    building = root / "lora" / ".creating-x"
    building.mkdir()
    (building / "plan.json").write_text("{}")
    with pytest.raises(UserError) as error:
        find_run("nothing", root)
    assert "creating" not in str(error.value)


def test_what_a_cell_may_be_called(tmp_path: Path) -> None:
    cells = make_cells(20)
    cells[7]["id"] = "3"
    run = FakeRun(tmp_path, cells).folder
    assert find_cell(run, "4")["index"] == 4
    assert find_cell(run, "c00005")["index"] == 5
    assert find_cell(run, "c00013")["index"] == 19
    assert find_cell(run, "c00006")["index"] == 6
    # An id that reads like an index is still an id.
    assert find_cell(run, "3")["index"] == 7
    with pytest.raises(UserError, match="several cells"):
        find_cell(run, "c0000")
    for spec in ("20", "x", "", "-1", "²"):
        with pytest.raises(UserError, match="0 to 19"):
            find_cell(run, spec)


def test_the_best_cell(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, make_cells(3), objective={"metric": "loss", "mode": "min"})
    with pytest.raises(UserError, match="'loss' yet"):
        find_cell(fake.folder, "best")
    fake.done(0, loss=2.0)
    fake.done(1, loss=1.0)
    assert find_cell(fake.folder, "best")["index"] == 1
    plain = FakeRun(tmp_path, make_cells(1), run_id="plain")
    with pytest.raises(UserError, match="names no objective"):
        find_cell(plain.folder, "best")
