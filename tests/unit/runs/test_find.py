"""Naming runs and cells."""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.runs.find import find_cell, find_run, known_roots, reference
from tests.unit.runs.fakes import FakeRun, make_cells


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


@pytest.fixture
def two_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The default root, and that of a site."""
    monkeypatch.delenv("HPCML_RUNS", raising=False)
    monkeypatch.delenv("ABSENT", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "here" / "site_configs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for name, runs in (("mine", tmp_path / "shared"), ("other", "$ABSENT/runs")):
        (tmp_path / "here" / "site_configs" / f"{name}.yaml").write_text(
            f"name: {name}\nscheduler: local\nruns: {runs}\n"
        )
    return tmp_path / "here" / "runs", tmp_path / "shared"


def test_a_name_in_several_roots(two_roots: tuple[Path, Path]) -> None:
    for age, root in enumerate(two_roots):  # the site's is the newer one
        for run_id in ("ab1", "ab2"):
            run = FakeRun(root, make_cells(1), name="lora", run_id=run_id).folder
            os.utime(run.plan_file, (1000 + age, 1000 + age))
    FakeRun(two_roots[1], make_cells(1), name="there", run_id="cd1")
    for spec in ("lora", "lora/ab1", "ab1", "lora/"):
        if spec != "lora/":
            assert find_run(spec).path.parents[1] == two_roots[1]
        with pytest.raises(UserError, match=f"is in {two_roots[0]} and in {two_roots[1]}"):
            find_run(spec, certain=True)
        assert find_run(spec, two_roots[1], certain=True).path.parents[1] == two_roots[1]
    assert find_run("there", certain=True).path.parents[1] == two_roots[1]
    with pytest.raises(UserError, match=r"several runs: lora/ab., lora/ab.$"):
        find_run("ab")


def test_two_names_of_a_root_are_one(two_roots: tuple[Path, Path]) -> None:
    run = FakeRun(two_roots[0], make_cells(1)).folder
    two_roots[1].symlink_to(two_roots[0])
    assert known_roots()[0] == two_roots[0]
    assert two_roots[1] not in known_roots()
    assert find_run("toy", certain=True).path == run.path


def test_how_to_name_a_run(two_roots: tuple[Path, Path], tmp_path: Path) -> None:
    """Whatever is named, it is found by that."""
    shared = FakeRun(two_roots[1], make_cells(1)).folder
    assert reference(shared) == "toy/abc123"
    # Of two runs of one name the newest counts, which may be the other one tomorrow.
    mine = FakeRun(two_roots[0], make_cells(1)).folder
    assert reference(mine) == "runs/toy/abc123"
    assert reference(shared) == str(shared.path)
    elsewhere = FakeRun(tmp_path / "my runs", make_cells(1), run_id="x").folder
    assert reference(elsewhere) == f"'{elsewhere.path}'"
    below = FakeRun(tmp_path / "here" / "my runs", make_cells(1), run_id="y").folder
    assert reference(below) == "'my runs/toy/y'"
    for run in (shared, mine, elsewhere, below):
        assert find_run(shlex.split(reference(run))[0]).path == run.path


def test_an_unset_variable_is_no_folder(two_roots: tuple[Path, Path]) -> None:
    assert not any("$" in str(root) for root in known_roots())


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_path_that_cannot_be_looked_at(
    root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(path: object, **_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError, match=r"cannot look at locked/sub/plan\.json"):
        find_run("locked/sub", root)


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


def test_a_number_is_no_beginning_of_an_id(tmp_path: Path) -> None:
    cells = make_cells(3)
    cells[1]["id"] = "9123456789ab"
    run = FakeRun(tmp_path, cells).folder
    for spec in ("9", "9123456"):
        with pytest.raises(UserError, match="0 to 2"):
            find_cell(run, spec)
    assert find_cell(run, "91234567")["index"] == 1


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
