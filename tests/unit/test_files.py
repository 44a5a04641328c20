"""Looking at the filesystem: what an operating system may answer, a person can read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.files import expanded, is_dir, is_file


def test_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert is_file(tmp_path / "file")
    assert not is_dir(tmp_path / "file")
    assert is_dir(tmp_path)
    assert not is_file(tmp_path)
    for absent in (tmp_path / "absent" / "x", tmp_path / "file" / "x", Path("a\0b")):
        assert not is_file(absent)
        assert not is_dir(absent)


@pytest.mark.parametrize("look", [is_file, is_dir])
@pytest.mark.parametrize("code", [errno.EACCES, errno.ENAMETOOLONG, errno.EIO, errno.ELOOP])
def test_what_cannot_be_told_is_a_message(
    look: object, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, **_: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    assert callable(look)
    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UserError, match="cannot look at /some/where: "):
        look(Path("/some/where"))


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too long"):
        is_file(tmp_path / ("x" * 300))


def test_variables_in_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/fast/$5")
    monkeypatch.delenv("ABSENT", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/runs", "here") == Path("/home/me/runs")
    assert expanded("$SCRATCH/${SCRATCH}/a$", "here") == Path("/fast/$5//fast/$5/a$")
    for text in ("$ABSENT/runs", "${ABSENT}/runs", "$SCRATCH/$ABSENT"):
        with pytest.raises(UserError, match=r"^here: .*: \$ABSENT is not set"):
            expanded(text, "here")
