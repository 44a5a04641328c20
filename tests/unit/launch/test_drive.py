"""Being the only command at a run."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.launch.drive import only_driver
from tests.unit.runs.fakes import FakeRun, make_cells


def test_another_command_is_named_and_how_to_watch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCML_RUNS", str(tmp_path / "runs"))
    for root, name in ((tmp_path / "runs", "toy/abc123"), (tmp_path / "x", f"{tmp_path}/x/toy")):
        run = FakeRun(root, make_cells(1)).folder
        with (
            only_driver(run),
            pytest.raises(UserError, match=f"{os.getpid()}.*: hpcml watch {name}"),
            only_driver(run),
        ):
            pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_filesystem_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    run = FakeRun(tmp_path, make_cells(1)).folder
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"cannot lock .*/driver: "), only_driver(run):
        pass
