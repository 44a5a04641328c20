"""The copy of the user's files that cells run from."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.plan.snapshot import Snapshot, project_root, take
from hpcml.runs.folder import RunFolder

LIMIT = 10 * 2**20


def files(snapshot: Snapshot) -> set[str]:
    return {name for name, _ in snapshot.files if name.startswith("project/")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "sub").mkdir(parents=True)
    (folder / "train.py").write_text("print(1)")
    (folder / "sub" / "ü module.py").write_text("x = 1")
    (folder / "ignored.bin").write_text("large")
    (folder / ".gitignore").write_text("ignored.bin\nruns/\n")
    return folder


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


def test_git_decides_what_is_copied(project: Path, tmp_path: Path) -> None:
    git(project, "init")
    git(project, "add", "train.py")
    snapshot = take(project, LIMIT, exclude=tmp_path / "runs")
    assert files(snapshot) == {
        "project/train.py",
        "project/sub/ü module.py",
        "project/.gitignore",
    }


def test_a_tracked_file_that_was_deleted_is_left_out(project: Path, tmp_path: Path) -> None:
    git(project, "init")
    git(project, "add", ".")
    (project / "train.py").unlink()
    assert "project/train.py" not in files(take(project, LIMIT, exclude=tmp_path))


def test_without_git_everything_that_is_not_hidden(project: Path, tmp_path: Path) -> None:
    snapshot = take(project, LIMIT, exclude=tmp_path / "runs")
    assert files(snapshot) == {
        "project/train.py",
        "project/sub/ü module.py",
        "project/ignored.bin",
    }


def test_the_runs_root_is_never_copied(project: Path) -> None:
    (project / "results").mkdir()
    (project / "results" / "big").write_text("x")
    git(project, "init")
    assert not any("results" in name for name in files(take(project, LIMIT, project / "results")))


@pytest.mark.parametrize("with_git", [True, False])
def test_other_runs_roots_are_not_copied_either(
    project: Path, tmp_path: Path, with_git: bool
) -> None:
    run = RunFolder.create(project / "elsewhere", "n", "i", {"digest": "d"}, "", "", [])
    (run.path / "left").write_text("by an earlier run")
    if with_git:
        git(project, "init")
    copied = files(take(project, LIMIT, exclude=tmp_path / "runs"))
    assert "project/train.py" in copied
    assert not any("elsewhere" in name for name in copied)


def test_the_project_is_the_work_tree_around_the_recipe(project: Path) -> None:
    git(project, "init")
    assert project_root(project / "sub") == project
    assert project_root(project.parent) == project.parent


@pytest.mark.parametrize("with_git", [True, False])
def test_a_recipe_in_a_snapshot_takes_that_snapshot(project: Path, with_git: bool) -> None:
    """A cell that starts a sweep itself: its folder lies in the runs root, below the project."""
    if with_git:
        (project / ".gitignore").write_text("runs\n")
        git(project, "init")
    runs = project / "runs"
    run = RunFolder.create(runs, "n", "i", {"digest": "d"}, "", "", [])
    copy = take(project, LIMIT, exclude=runs).write(run.code)
    (project / "later.py").write_text("not for this run")
    found = project_root(copy / "project" / "sub")
    assert found == copy / "project"
    again = files(take(found, LIMIT, exclude=runs))
    assert again >= {"project/train.py", "project/sub/ü module.py"}
    assert not any("later" in name or "runs" in name for name in again)


def test_what_commands_in_a_cell_need_is_copied(tmp_path: Path) -> None:
    names = {name for name, _ in take(None, LIMIT, exclude=tmp_path).files}
    assert names >= {"hpcml/templates/slurm/job.sh.j2", "hpcml/site_configs/local.yaml"}


def test_the_digest_follows_the_content(project: Path, tmp_path: Path) -> None:
    first = take(project, LIMIT, exclude=tmp_path / "runs")
    assert take(project, LIMIT, exclude=tmp_path / "runs").digest == first.digest
    (project / "train.py").write_text("print(2)")
    assert take(project, LIMIT, exclude=tmp_path / "runs").digest != first.digest


def test_the_copy_is_complete_and_made_once(project: Path, tmp_path: Path) -> None:
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / "link").symlink_to("train.py")
    (project / "sub" / "outside").symlink_to("../../elsewhere")
    (tmp_path / "elsewhere").write_text("data")
    snapshot = take(project, LIMIT, exclude=tmp_path / "runs")
    copy = snapshot.write(tmp_path / "code")
    assert (copy / "project" / "train.py").read_text() == "print(1)"
    assert (copy / "project" / "run.sh").stat().st_mode & 0o111
    assert (copy / "project" / "link").read_text() == "print(1)"
    assert (copy / "project" / "sub" / "outside").read_text() == "data"
    assert (copy / "hpcml" / "worker" / "task.py").exists()
    before = copy.stat().st_mtime_ns
    assert snapshot.write(tmp_path / "code") == copy
    assert copy.stat().st_mtime_ns == before
    assert list((tmp_path / "code").iterdir()) == [copy]


def test_too_large_is_explained(project: Path, tmp_path: Path) -> None:
    (project / "weights.bin").write_bytes(b"\0" * 3 * 2**20)
    with pytest.raises(UserError) as error:
        take(project, 2**20, exclude=tmp_path / "runs")
    message = str(error.value)
    assert "weights.bin" in message
    assert "the limit is 1M" in message
    assert "code.limit" in message


def test_a_train_recipe_copies_hpcml_alone(tmp_path: Path) -> None:
    snapshot = take(None, LIMIT, exclude=tmp_path)
    assert files(snapshot) == set()
    assert any(name == "hpcml/train/__init__.py" for name, _ in snapshot.files)


def refuse(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, ending: str, code: int
) -> None:
    """Let a function of the system fail for one path, as it does for a user who is not root."""
    real: Callable[..., object] = getattr(owner, name)

    def function(path: object, *rest: object, **more: object) -> object:
        if str(path).endswith(ending):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(owner, name, function)


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOENT, errno.EIO])
@pytest.mark.parametrize(("owner", "name"), [(Path, "read_bytes"), (Path, "lstat")])
def test_a_file_that_cannot_be_read_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, code: int
) -> None:
    refuse(monkeypatch, owner, name, "train.py", code)
    with pytest.raises(UserError, match=r"/train\.py: .*; a run copies"):
        take(project, LIMIT, exclude=project / "runs")


def test_a_folder_that_cannot_be_read_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, os, "scandir", "/sub", errno.EACCES)
    with pytest.raises(UserError, match="/sub: Permission denied"):
        take(project, LIMIT, exclude=project / "runs")


def test_a_folder_that_git_cannot_read_is_named(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(project, "init")
    run = subprocess.run

    def as_nobody(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        result = run(command, **options)  # type: ignore[call-overload]
        if "ls-files" in command:
            result.stderr = b"warning: could not open directory 'sub/': Permission denied\n"
        return result  # type: ignore[no-any-return]

    monkeypatch.setattr(subprocess, "run", as_nobody)
    with pytest.raises(UserError, match="/sub: Permission denied"):
        take(project, LIMIT, exclude=project / "runs")


def test_the_copy_is_on_the_disk_before_it_has_its_name(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "link").symlink_to("train.py")
    flushed: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def check(source: Path, target: Path) -> None:
        there = [path for path in source.rglob("*") if not path.is_symlink()]
        assert {str(path) for path in (source, *there)} == set(flushed)
        flushed.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", check)
    take(project, LIMIT, exclude=tmp_path / "runs").write(tmp_path / "code")
    assert flushed == [str(tmp_path / "code")]
