"""``hpcml rerun``: chosen cells of a run, again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option, wait_option
from hpcml.cli.output import no_reason_to_stop
from hpcml.errors import UserError

if TYPE_CHECKING:
    from hpcml.plan import Plan
    from hpcml.runs.folder import RunFolder


@click.command("rerun")
@click.argument("run", shell_complete=completion.runs)
@click.option("--failed", is_flag=True, help="Every cell that failed.")
@click.option(
    "--cell",
    "cells",
    multiple=True,
    metavar="CELL",
    shell_complete=completion.cells,
    help="This cell (again for more).",
)
@click.option(
    "--from-scratch",
    is_flag=True,
    help="Begin anew. What the cells have is set aside in their folders. Cells that are done need "
    "this: their result is replaced.",
)
@wait_option
@root_option
@click.pass_context
def command(
    context: click.Context,
    run: str,
    failed: bool,
    cells: tuple[str, ...],
    from_scratch: bool,
    wait: bool,
    root: Path | None,
) -> None:
    """Run chosen cells of RUN again, as they were submitted last; its recipe is not needed.

    RUN is a run folder, a run id or its beginning, or a recipe's name. CELL is an index, an id or
    its beginning, or "best". The cells continue from their checkpoints, with new budgets, in the
    same code; code that was changed since is taken by the sweep command given again.
    """
    from hpcml.cli.sweep import run_chosen
    from hpcml.plan.stored import stored_plan
    from hpcml.runs.find import find_cell, find_run, reference

    if not failed and not cells:
        raise UserError("say which cells: --failed, or --cell CELL, or both")
    folder = find_run(run, root, certain=True)
    chained = folder.plan.get("halving") or folder.plan.get("search")
    if chained or folder.plan.get("kind") == "infer":
        given = "infer --batch" if folder.plan.get("kind") == "infer" else "sweep"
        raise UserError(
            f"{reference(folder)}: what its cells do depends on one another; to go on with what is "
            f"left, give hpcml {given} with its recipe again"
        )
    named = {find_cell(folder, cell)["index"] for cell in cells}
    plan = stored_plan(folder.path)
    with no_reason_to_stop():
        code = run_chosen(
            plan,
            folder,
            lambda: _choose(plan, folder, named, failed=failed, anew=from_scratch),
            wait=wait,
        )
    context.exit(code)


def _choose(plan: Plan, run: RunFolder, named: set[int], *, failed: bool, anew: bool) -> list[int]:
    """The cells to run; those that begin anew have been set aside.

    Raises:
        UserError: one of them cannot run again.
    """
    from hpcml.cli import text
    from hpcml.launch.submit import taken
    from hpcml.launch.watch import watch
    from hpcml.runs.anew import begin_anew
    from hpcml.runs.find import builders_on, reference
    from hpcml.runs.status import CellState

    queued = taken(run)
    watcher = watch(run)
    watcher.ask()
    status = watcher.refresh()
    done = {run.ids[cell_id] for cell_id in run.done()}
    chosen = set(named)
    if failed:
        chosen |= {cell.index for cell in status.in_state("failed")} - queued - done
    for index in sorted(named):
        params = plan.cells[index].params
        unknown = CellState(plan.cells[index].id, index, "pending", params)
        cell = status.cells.get(index, unknown)
        name = text.cell_name(cell, run.swept)
        if cell.state == "running" or index in queued:
            what = "is running" if cell.state == "running" else "is queued"
            raise UserError(
                f"{name} {what}; wait for it, or end it first: "
                f"hpcml cancel {reference(run)} {index}"
            )
        if index not in done:
            continue
        if not anew:
            raise UserError(
                f"{name} is done; with --from-scratch it begins anew, and its result is replaced"
            )
        if later := builders_on(run):
            names = ", ".join(other.name for other in later)
            raise UserError(f"{name} is done, and {names} takes what it found; it stays as it is")
    if anew:
        for index in sorted(chosen):
            begin_anew(run, plan.cells[index].id)
    return sorted(chosen)
