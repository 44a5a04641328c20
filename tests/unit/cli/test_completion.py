"""Completion, by a bash that reads the script."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.runs.fakes import FakeRun, make_cells

from .conftest import Invoke

REPOSITORY = Path(__file__).parents[3]
# What readline does when somebody presses the tabulator.
PRESS = """
eval "$(hpcml completion bash)"
complete -p hpcml >&2
compopt() { echo "let the shell complete: $2"; }
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
    COMPREPLY=()
    _hpcml_completion hpcml
    echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture
def press(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Complete lines in a bash, which stands in the folder of the test."""
    command = tmp_path / "bin" / "hpcml"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hpcml "$@"\n')
    command.chmod(0o755)
    monkeypatch.chdir(tmp_path)

    def call(*lines: str) -> list[list[str]]:
        done = subprocess.run(
            ["bash", "--norc", "-c", PRESS],
            input="\n".join(lines) + "\n",
            env={
                **os.environ,
                "PATH": f"{command.parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(REPOSITORY),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == "complete -o nosort -F _hpcml_completion hpcml\n"
        answers = done.stdout.splitlines()
        return [answer.split() for answer in answers]

    return call


def test_bash(press: Invoke, root: Path, tmp_path: Path) -> None:
    run = FakeRun(root, make_cells(12)).folder
    for name in ("a.yaml", "b.yml", "c.txt", "my/d.yaml", "my/site.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    ids = sorted(run.ids)
    found = press(
        "hpcml st",
        "hpcml status ",
        f"hpcml status {run.name}/",
        f"hpcml status {run.run_id[:5]}",
        f"hpcml logs {run.name} ",
        f"hpcml why {run.name} 1",
        f"hpcml rerun {run.name} --cell b",
        f"hpcml cancel {run.name} 0 11",
        "hpcml why nothing ",
        "hpcml sweep --site lo",
        "hpcml site show dev",
        "hpcml sweep ",
        "hpcml plan my/",
        "hpcml infer --batch a",
        "hpcml sweep --dry",
        "hpcml completion f",
    )
    assert found == [
        ["status"],
        [run.name],
        [f"{run.name}/{run.run_id}"],
        [run.run_id],
        ["best", *map(str, range(12))],
        ["1", "10", "11"],
        ["best"],
        ["11"],
        [],
        ["local"],
        ["devcluster"],
        ["a.yaml", "b.yml"],
        ["my/d.yaml"],
        ["a.yaml"],
        ["--dry-run"],
        ["fish"],
    ]
    letter = next(each for each in ids if not each[:3].isdecimal() and each[0] != "b")
    assert press(f"hpcml why {run.name} {letter[:6]}") == [[letter]]


def test_a_path_is_left_to_the_shell(press: Invoke, root: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for line, kind in (
        ("hpcml sweep fol", "dirnames"),
        ("hpcml status ./fol", "dirnames"),
        ("hpcml sweep --site ./fol", "default"),
    ):
        assert press(line)[0] == ["let", "the", "shell", "complete:", kind]


def test_the_scripts_of_other_shells(invoke: Invoke) -> None:
    assert invoke("completion", "zsh").output.startswith("#compdef hpcml")
    assert "complete --no-files --command hpcml" in invoke("completion", "fish").output


def test_a_root_that_cannot_be_read_completes_nothing(press: Invoke, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    assert press("hpcml logs x ")[0] == []
