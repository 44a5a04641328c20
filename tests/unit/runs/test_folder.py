"""The run folder is complete or absent, whatever happens while it is written."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.files import plain_errors
from hpcml.runs import folder as folder_module
from hpcml.runs.folder import RunFolder, default_root
from tests.unit.runs.fakes import FakeRun, lines, make_cells

PLAN = {"digest": "d" * 64, "name": "toy", "swept": ["seed"], "objective": None}


def create(root: Path, cells: Any, plan: dict[str, Any] = PLAN) -> RunFolder:
    return RunFolder.create(root, "toy", "abc", plan, "name: toy\n", "site: x\n", lines(cells))


def everything_in(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_new_run_holds_what_was_given(tmp_path: Path) -> None:
    cells = make_cells(5, text=["ü\n", "\u2028", '"id":"x"', "\ud800", ""])
    run = create(tmp_path / "runs", iter(cells))
    assert run.path == tmp_path / "runs" / "toy" / "abc"
    assert run.plan == PLAN
    assert run.recipe_file.read_text() == "name: toy\n"
    assert run.site_file.read_text() == "site: x\n"
    assert list(run.cells()) == cells
    assert [run.cell(index) for index in range(5)] == cells
    assert run.ids == {cell["id"]: cell["index"] for cell in cells}
    assert len(run) == 5
    assert everything_in(tmp_path / "runs" / "toy")[0] == "abc"
    assert not list(run.path.glob("owner"))


def test_the_index_is_what_the_worker_reads(tmp_path: Path) -> None:
    run = create(tmp_path, make_cells(3))
    data = run.cells_index.read_bytes()
    offset = int.from_bytes(data[16:24], "little")
    assert json.loads(run.cells_file.read_bytes()[offset:])["index"] == 2
    assert len(data) == 24


def test_the_same_run_again_is_opened(tmp_path: Path) -> None:
    first = create(tmp_path, make_cells(2))
    (first.path / "mark").touch()
    assert (create(tmp_path, make_cells(2)).path / "mark").exists()


def test_another_plan_in_its_place_is_refused(tmp_path: Path) -> None:
    create(tmp_path, make_cells(2))
    with pytest.raises(UserError, match="another plan"):
        create(tmp_path, make_cells(2), {**PLAN, "digest": "e" * 64})


def test_two_commands_at_once_get_the_same_run(tmp_path: Path) -> None:
    def cells() -> Iterator[dict[str, Any]]:
        yield from make_cells(2)
        create(tmp_path, make_cells(2))

    assert create(tmp_path, cells()).plan == PLAN
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["abc"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_failing_disk_leaves_nothing(tmp_path: Path, code: int) -> None:
    def cells() -> Iterator[dict[str, Any]]:
        yield from make_cells(3)
        raise OSError(code, os.strerror(code))

    with pytest.raises(UserError, match="cannot write the run folder"):
        create(tmp_path / "new" / "root", cells())
    assert everything_in(tmp_path) == []


def test_a_folder_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Path.mkdir

    def until_the_quota(path: Path, *rest: Any, **more: Any) -> None:
        if path.name == "toy" and path.parent.exists():
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        make(path, *rest, **more)

    monkeypatch.setattr(Path, "mkdir", until_the_quota)
    with pytest.raises(UserError, match="quota"):
        create(tmp_path / "new" / "root", make_cells(1))
    monkeypatch.undo()
    assert everything_in(tmp_path) == []


def test_a_journal_that_is_cut_short_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path, make_cells(1))
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(UserError, match="the disk is full"):
        run.journal("submitting")


def test_a_mistake_in_the_cells_leaves_nothing(tmp_path: Path) -> None:
    cells = make_cells(2)
    cells[1]["id"] = "../escape"
    with pytest.raises(ValueError, match="escape"):
        create(tmp_path, cells)
    assert everything_in(tmp_path) == []


def test_a_root_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match="is a file, not a folder"):
        create(tmp_path / "runs", make_cells(1))


def test_a_root_without_permission_is_said() -> None:
    # Root may write everywhere, so it is nobody for the moment; pytest's folders are closed to it.
    folder = Path(tempfile.mkdtemp(prefix="hpcml-locked-"))
    folder.chmod(0o555)
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="no permission"):
            create(folder / "runs", make_cells(1))
    finally:
        os.seteuid(me)
        folder.chmod(0o755)
        folder.rmdir()


def test_a_place_where_nothing_can_be_made_is_said() -> None:
    if not Path("/proc/self").exists():
        pytest.skip("needs a folder that nobody may write to")
    with pytest.raises(UserError, match="cannot write the run folder"):
        create(Path("/proc/hpcml"), make_cells(1))


_KILLED = """
import os, signal, sys
from pathlib import Path
from hpcml.runs.folder import RunFolder
def cells():
    for index in range(50):
        yield f"c{index}", '"params":{},"payload":{}'
    print("half", flush=True)
    signal.pause()
RunFolder.create(Path(sys.argv[1]), "toy", "abc", {"digest": "d"}, "", "", cells())
"""


def test_a_killed_command_leaves_no_run_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"half\n"
        # While it lives, another command leaves its folder alone.
        other = RunFolder.create(tmp_path, "toy", "other", PLAN, "", "", lines(make_cells(1)))
        assert len(list((tmp_path / "toy").glob(".creating-*"))) == 1
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "toy" / "abc").exists()
    create(tmp_path, make_cells(2))
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["abc", other.run_id]


def test_a_temporary_folder_without_a_lock_is_kept_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = tmp_path / "toy" / ".creating-fresh"
    fresh.mkdir(parents=True)
    create(tmp_path, make_cells(1))
    assert fresh.exists()
    later = time.time() + folder_module._UNLOCKED_IS_ABANDONED + 1
    monkeypatch.setattr(time, "time", lambda: later)
    RunFolder.create(tmp_path, "toy", "next", PLAN, "", "", lines(make_cells(1)))
    assert not fresh.exists()


def test_opening_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run folder"):
        RunFolder.open(tmp_path)
    for content in ("{", "[]", "{}"):
        (tmp_path / "plan.json").write_text(content)
        with pytest.raises(UserError, match=r"plan\.json"):
            RunFolder.open(tmp_path)


def test_submissions_count_up_and_are_never_overwritten(tmp_path: Path) -> None:
    run = create(tmp_path, make_cells(1))
    assert run.next_submission() == 1
    assert run.write_submission({"cells": [[0, 0]]}) == 1
    # Another command has reserved the next number, and was killed.
    (run.submissions / "002.json").touch()
    assert run.write_submission({"cells": [[1, 1]]}) == 3
    assert run.read_submission(1)["cells"] == [[0, 0]]
    run.journal("submitting", submission=1)
    run.journal("submitted", submission=1, jobs=["a"])
    events = [json.loads(line)["event"] for line in run.journal_file.read_text().splitlines()]
    assert events == ["submitting", "submitted"]


def test_cells_with_a_result_are_done(tmp_path: Path) -> None:
    run = create(tmp_path, make_cells(3))
    for name in ("c00001", "c00002", "stranger"):
        run.cell_dir(name).mkdir()
    for name in ("c00001", "stranger"):
        (run.cell_dir(name) / "result.json").touch()
    assert run.done() == {"c00001"}


def test_the_root_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCML_RUNS", "/scratch/me")
    assert default_root() == Path("/scratch/me")
    monkeypatch.delenv("HPCML_RUNS")
    assert default_root() == Path.cwd() / "runs"


def test_a_reader_that_has_enough_is_no_trouble_of_the_disk() -> None:
    with pytest.raises(BrokenPipeError), plain_errors("read the file"):
        raise BrokenPipeError


def test_a_cell_of_a_search_has_what_is_proposed_for_it_and_else_no_such_parameter(
    tmp_path: Path,
) -> None:
    token = "\0\0search.lr\0"
    cells = make_cells(3)
    for cell in cells:
        cell["params"] = {"lr": token, "width": 8}
        cell["payload"] = {"argv": ["run", token], "parameters": {"lr": token, "seed": 0}}
    fake = FakeRun(tmp_path, cells)
    fake.folder.plan["search"] = {"cells": [2, 1], "params": {"lr": {"uniform": [0, 1]}}}
    rounds = fake.folder.path / "rounds"
    rounds.mkdir()
    (rounds / "1.json").write_text('{"cells": [{"lr": 0.5}, {"lr": 0.25}]}')
    found = list(fake.folder.cells())
    assert [cell["params"] for cell in found] == [
        {"lr": 0.5, "width": 8},
        {"lr": 0.25, "width": 8},
        {"width": 8},
    ]
    assert found[1]["payload"] == {"argv": ["run", "0.25"], "parameters": {"lr": 0.25, "seed": 0}}
    assert found[2]["payload"]["parameters"] == {"seed": 0}
    (rounds / "2.json").write_text('{"cells": [{"lr": 0.125}]}')
    assert fake.folder.cell(2)["params"]["lr"] == 0.125
