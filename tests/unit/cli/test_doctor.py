"""`hpcml doctor`: what works here, and what a recipe lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcml.site import check, engines

from .conftest import Invoke

COMMAND = "name: t\nkind: command\ncommand: {run: [echo, x]}\n"
TRAIN = "name: t\nkind: train\ntrain: {data: {source: python-stdlib}}\n"


@pytest.fixture
def doctor(invoke: Invoke, tmp_path: Path, root: Path) -> Any:
    def call(recipe: str | None, site: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
        (tmp_path / "here.yaml").write_text(f"name: here\nscheduler: local\n{site}")
        arguments = ["--json", "--site", tmp_path / "here.yaml"]
        if recipe is not None:
            (tmp_path / "recipe.yaml").write_text(recipe)
            arguments.insert(0, tmp_path / "recipe.yaml")
        result = invoke("doctor", *arguments)
        found = json.loads(result.stdout)
        code = int(result.return_value or 0)
        assert found["good"] == (code == 0)
        return code, {each["name"]: each for each in found["checks"]}

    return call


def test_a_recipe_needs_only_its_own(doctor: Any, root: Path) -> None:
    code, checks = doctor(COMMAND)
    assert code == 0
    assert {name for name in checks if " " in name} == {"runs root", "setup lines"}
    assert checks["command"]["good"] is True
    assert "sweep.search" not in checks
    assert not list(root.glob(".check*"))


def test_a_recipe_that_asks_for_gpus(doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for count, code in ((1, 0), (2, 1)):
        found, checks = doctor(f"{COMMAND}resources: {{gpus: {count}}}\n")
        assert found == code
        assert checks["GPUs of a cell"]["seen"] == f"a cell asks for {count}, and there are 1"
    assert "GPUs of a cell" not in doctor(COMMAND)[1]


def test_a_python_without_packages(doctor: Any, tmp_path: Path) -> None:
    """A Python as a person has it before anything is installed."""
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.base_prefix}/bin/python3 -S "$@"\n')
    bare.chmod(0o755)
    code, checks = doctor(TRAIN, f"python: {bare}\n")
    assert code == 1
    assert checks["train torch"]["good"] is False
    assert "it has no torch 2.6 or newer" in checks["train torch"]["seen"]
    assert f"pip install 'hpcml[torch]' (with {bare})" in checks["train torch"]["seen"]
    code, checks = doctor(None, f"python: {bare}\n")
    assert code == 0
    kinds = {name: checks[name]["good"] for name in ("command", *engines.EXTRAS)}
    assert kinds == {name: True if name == "command" else None for name in kinds}
    for name, extra in engines.EXTRAS.items():
        assert f"'hpcml[{extra}]'" in checks[name]["seen"]


def test_a_python_that_breaks_off(doctor: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(
        f'#!/bin/sh\ncase "$1" in -m) echo "illegal instruction" >&2; exit 132;; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    broken.chmod(0o755)
    code, checks = doctor(TRAIN, f"python: {broken}\n")
    assert code == 1
    assert "broke off when it imported them: illegal instruction" in checks["train torch"]["seen"]


def test_what_is_in_an_image_is_told(doctor: Any) -> None:
    container = "container: {runtime: singularity}\n"
    code, checks = doctor(TRAIN + "container: {image: /x.sif}\n", container)
    assert "hpcml container check" in checks["train torch"]["seen"]
    assert code == (0 if checks["containers"]["good"] else 1)
    assert "containers" not in doctor(COMMAND, container)[1]


def test_every_extra_is_one_of_setup_cfg() -> None:
    text = (Path(__file__).parents[3] / "setup.cfg").read_text()
    for extras in engines.EXTRAS.values():
        for extra in extras.split(","):
            assert f"\n{extra} =\n" in text
    assert {"command", *engines.EXTRAS} == {*engines.NEEDS}


def test_a_filesystem_that_has_no_room_for_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "files free" in check._root(tmp_path)
    monkeypatch.setattr(check, "_FEW_FILES", 10**15)
    with pytest.raises(ValueError, match=r"more files fit; remove some"):
        check._root(tmp_path)


def test_lines_that_are_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_APPEND", check._APPEND.replace("os.O_APPEND", "0"))
    with pytest.raises(ValueError, match="two processes append are not whole"):
        check._append_from_two(tmp_path / "lines")
