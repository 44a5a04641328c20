"""What is said before cells run."""

from __future__ import annotations

from pathlib import Path

from hpcml.cli.preview import describe
from hpcml.launch.submit import create_run, next_submission, next_submissions
from hpcml.plan import Plan, compile_plan
from hpcml.recipe import load_recipe
from hpcml.site.search import find_site


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
