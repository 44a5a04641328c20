"""Whether what a recipe names is looked for before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.plan import Plan, compile_plan
from hpcml.plan.plan import runs_root
from hpcml.recipe import load_recipe
from hpcml.site.schema import Site
from hpcml.site.search import find_site

COMMAND = "name: t\nkind: command\ncommand: {run: [echo, hello], directory: %s}\n"


def plan(folder: Path, directory: str, *settings: str) -> Plan:
    path = folder / "recipe.yaml"
    path.write_text(COMMAND % directory)
    return compile_plan(load_recipe(path, settings), find_site("local"), folder / "runs")


def test_the_directory_of_a_command(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").touch()
    for directory in ("sub", ".", str(tmp_path), "'{{ cell.index }}'"):
        plan(tmp_path, directory)
    for directory in ("absent", "file", "sub/absent", "/absent/folder"):
        with pytest.raises(UserError, match=r"recipe.yaml:3: command.directory: there is no fold"):
            plan(tmp_path, directory)


def test_a_runs_root_with_a_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HPCML_RUNS", raising=False)
    monkeypatch.delenv("ABSENT", raising=False)
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    site = Site(name="heron", scheduler="local", runs="$SCRATCH/r")
    assert runs_root(site, None) == tmp_path / "r"
    with pytest.raises(UserError, match=r"site heron: runs: \$ABSENT/r: \$ABSENT is not set"):
        runs_root(site.model_copy(update={"runs": "$ABSENT/r"}), None)
    monkeypatch.setenv("HPCML_RUNS", "${ABSENT}/r")
    with pytest.raises(UserError, match=r"\$HPCML_RUNS: .*\$ABSENT is not set"):
        runs_root(site, None)
    assert runs_root(site, Path("$ABSENT")) == Path.cwd() / "$ABSENT"
