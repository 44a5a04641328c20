"""`hpcml init`: with flags, and as a person answers it on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.recipe import expand, load_recipe

from .conftest import Invoke

SCRIPT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--data", required=True)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return Path("train.py")


def test_flags_are_enough(invoke: Invoke, script: Path) -> None:
    result = invoke(
        "init", script, "--param", "lr=0.1,1e-2", "--param", "data=a b", "--gpus", 2,
        "--time", "04:00:00", "--memory", "16G", "--metric", "loss", "--mode", "max",
    )  # fmt: skip
    assert "hpcml sweep train.yaml --dry-run" in result.output
    assert "note:" not in result.output
    loaded = load_recipe("train.yaml")
    assert [cell.payload["argv"] for cell in expand(loaded)] == [
        ["python3", "train.py", f"--lr={lr}", "--data=a b"] for lr in (0.1, 0.01)
    ]
    resources = loaded.recipe.resources
    assert (resources.gpus, resources.time, resources.memory) == (2, 4 * 3600, 16 * 1024**3)
    first = loaded.text.splitlines()[0]
    place = first.removeprefix("# yaml-language-server: $schema=file://")
    assert Path(place).is_file()
    for said in ("hpcml.report(", "USR1", "code 75", "slurm:"):
        assert said in loaded.text
    assert not list(Path().glob(".train*"))


def test_a_file_that_is_there_stays(invoke: Invoke, script: Path) -> None:
    Path("train.yaml").write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        invoke("init", script, "--cpus", 1)
    assert Path("train.yaml").read_text() == "mine"
    invoke("init", script, "--cpus", 1, "-o", "other.yaml")
    assert load_recipe("other.yaml").recipe.name == "train"
    result = invoke("init", script, "--param", "lrr=1", "--force")
    assert "no argument lrr; did you mean 'lr'?" in result.output
    assert "needs --data" in result.output
    assert load_recipe("train.yaml").recipe.params == {"lrr": 1}


def test_a_program_in_any_language(invoke: Invoke, script: Path) -> None:
    Path("run it").write_text("#!/bin/sh\n")
    assert "not executable" in invoke("init", "run it", "--param", "x=1").output
    Path("run it").chmod(0o755)
    assert "note" not in invoke("init", "run it", "--param", "x=1,2", "--force").output
    cells = expand(load_recipe("run-it.yaml"))
    assert cells[1].payload["argv"] == ["./run it", "--x=2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which script"),
        (["gone.py", "--cpus", "1"], "there is no file gone.py"),
        (["train.py", "--cpus", "0"], "cpus is at least 1"),
        (["train.py", "--gpus", "x"], "gpus is a whole number"),
        (["train.py", "--time", "soon"], "time: 'soon'"),
        (["train.py", "--memory", "much"], "memory: 'much'"),
        (["train.py", "--param", "lr=1", "--param", "lr=2"], "given twice"),
        (["train.py", "--cpus", "1", "-o", "no/x.yaml"], "there is no folder"),
        (["train.py", "--cpus", "1", "-o", "/proc/x.yaml"], "not in the project"),
    ],
)
def test_mistakes_leave_no_file(
    invoke: Invoke, script: Path, arguments: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        invoke("init", *arguments)
    assert os.listdir() == ["train.py"]


def test_a_person_answers_three_questions(script: Path) -> None:
    terminal, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "hpcml", "init"], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        os.write(terminal, b'train.py\nlr=1e-3, 1e-2 data="a b"\ncpus=2 time=4h\n')
        shown = b""
        try:
            while part := os.read(terminal, 4096):
                shown += part
        except OSError:  # the other side has closed it
            pass
    os.close(terminal)
    assert process.returncode == 0, shown
    assert b"It takes --lr (0.1), --data." in shown
    assert shown.count(b"?") == 3
    loaded = load_recipe("train.yaml")
    assert loaded.recipe.params == {"data": "a b"}
    assert loaded.recipe.sweep.grid == {"lr": [1e-3, 1e-2]}
    assert (loaded.recipe.resources.cpus, loaded.recipe.resources.time) == (2, 4 * 3600)
