"""What is said before cells run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcml.cli.preview import describe
from hpcml.errors import UserError
from hpcml.launch.submit import create_run, next_submission, next_submissions
from hpcml.plan import Plan, compile_plan
from hpcml.recipe import load_recipe
from hpcml.site.search import find_site

from .conftest import Invoke


def test_changed_code_is_said_when_cells_are_done(tmp_path: Path) -> None:
    def compiled() -> Plan:
        return compile_plan(load_recipe(folder / "r.yaml"), find_site("local"), tmp_path / "runs")

    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "r.yaml").write_text(
        "name: t\nkind: command\nsweep: {grid: {a: [1, 2]}}\ncommand: {run: [sh, x.sh]}\n"
    )
    (folder / "x.sh").write_text("true\n")
    plan = compiled()
    first = next_submission(plan)
    assert "code has changed" not in describe(first)
    run = create_run(plan)
    run.write_submission(first.record())
    (run.submissions / "002.json").touch()  # another command is about to write it
    cell = run.cell_dir(plan.cells[0].id)
    cell.mkdir()
    (cell / "result.json").write_text("{}")
    assert "1 done before, 1 left" in describe(next_submission(compiled()))
    assert "code has changed" not in describe(next_submission(compiled()))
    (folder / "x.sh").write_text("false\n")
    assert "the code has changed since; what is done stays done" in describe(
        next_submission(compiled())
    )


def test_the_rungs_that_are_left_have_the_numbers_that_they_will_get(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: t\nkind: command\nsweep: {grid: {a: [1, 2, 3, 4]}, "
        "halving: {metric: loss, factor: 2, rungs: 3, steps: 8}}\ncommand: {run: ['true']}\n"
    )
    plan = compile_plan(load_recipe(tmp_path / "r.yaml"), find_site("local"), tmp_path / "runs")

    def left() -> list[tuple[int | None, int, int]]:
        return [(each.rung, each.number, len(each.indices)) for each in next_submissions(plan)]

    assert left() == [(1, 1, 4), (2, 2, 2), (3, 3, 1)]
    run = create_run(plan)
    run.write_submission(next_submissions(plan)[0].record())
    for cell in plan.cells:
        path = run.cell_dir(cell.id) / "rungs" / "1.json"
        path.parent.mkdir(parents=True)
        path.write_text('{"metrics": {"loss": 1.0}}')
    assert left() == [(2, 2, 2), (3, 3, 1)]


@pytest.mark.parametrize(
    ("recipe", "site", "said"),
    [
        ("resources: {time: 90m}", "scheduler: local", "at most 6 core hours for one attempt"),
        ("resources: {time: 1h, cpus: 3, processes: 2}\narray: {pack: 2}", "scheduler: local",
         "at most 24 core hours for one attempt"),
        ("resources: {time: 15m}", "scheduler: local", "at most 1 core hour for one attempt"),
        ("resources: {time: 10h, gpus: 8, nodes: 2}", "scheduler: slurm",
         "at most 640 GPU hours for one attempt"),
        ("resources: {time: 10h, gpus: 8, nodes: 2}",
         "scheduler: slurm\nslurm: {coming_back: chain, links: 3}",
         "at most 1,920 GPU hours, if every chain needs its 3 jobs"),
        ("resources: {time: 1h}\n#", "scheduler: local", "at most 4 core hours"),
    ],
)  # fmt: skip
def test_what_it_may_take(tmp_path: Path, recipe: str, site: str, said: str) -> None:
    (tmp_path / "s.yaml").write_text(f"name: s\n{site}\n")
    (tmp_path / "r.yaml").write_text(
        "name: t\nkind: command\nsweep: {grid: {a: [1, 2], b: [x, y]}}\n"
        f"command: {{run: [echo]}}\n{recipe}\n"
    )
    found = find_site(str(tmp_path / "s.yaml"))
    plan = compile_plan(load_recipe(tmp_path / "r.yaml"), found, tmp_path / "runs")
    assert f"  {said}" in describe(next_submission(plan))


def test_rungs_take_less(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: t\nkind: command\nsweep: {grid: {a: [1, 2, 3, 4]}, "
        "halving: {metric: loss, factor: 2, rungs: 3, steps: 8}}\ncommand: {run: ['true']}\n"
        "resources: {time: 1h}\n"
    )
    plan = compile_plan(load_recipe(tmp_path / "r.yaml"), find_site("local"), tmp_path / "runs")
    assert "at most 7 core hours" in describe(next_submissions(plan)[0])


def test_the_cells_are_listed(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "name: t\nkind: command\nsweep: {grid: {a: [1, 2], b: [x]}}\ncommand: {run: [echo]}\n"
    )
    plain = invoke("sweep", tmp_path / "r.yaml", "--dry-run")
    listed = invoke("sweep", tmp_path / "r.yaml", "--dry-run", "--cells")
    assert "  cell 0 (a=1, b=x)\n  cell 1 (a=2, b=x)\n" in listed.stderr
    assert "cell 0 (" not in plain.stderr
    assert "core hours" not in plain.stderr  # without a limit nobody can say
    assert listed.stdout == plain.stdout
    with pytest.raises(UserError, match="give both"):
        invoke("sweep", tmp_path / "r.yaml", "--cells")
