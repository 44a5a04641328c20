"""A job of one cell that a command waits for: to make an image, or to look into one."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcml.errors import UserError
from hpcml.launch.drive import drive, only_driver
from hpcml.launch.submit import create_run, next_submission, submit_here, submit_to_cluster
from hpcml.launch.watch import follow, watch
from hpcml.plan import Plan, compile_plan
from hpcml.recipe.load import load_recipe
from hpcml.runs.cancel import cancel_cell
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState, Status, with_pending
from hpcml.site.search import FoundSite

#: How long a job may take to end when it is asked to.
_GOING_SECONDS = 30.0


@contextmanager
def errand(
    recipe: Mapping[str, Any],
    site: FoundSite,
    root: Path | None,
    settings: Iterable[str] = (),
    files: Mapping[str, str] | None = None,
) -> Iterator[Plan]:
    """The plan of a recipe that hpcml itself writes, of the kind command.

    Args:
        recipe: the recipe; it has one cell.
        site: where it runs.
        root: the runs root, as for any run.
        settings: ``key=value``, which replace what the recipe says.
        files: texts by the names of the files that the command finds in its folder.

    Raises:
        UserError: the site cannot give what is asked for.
    """
    with tempfile.TemporaryDirectory(prefix="hpcml-") as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
        for file, text in (files or {}).items():
            (folder / file).write_text(text, encoding="utf-8")
        path = folder / "recipe.yaml"
        try:
            plan = compile_plan(load_recipe(path, settings), site, root)
        except UserError as error:
            # Nobody else sees that file.
            raise UserError(str(error).replace(f"{path}:1: ", "")) from None
        # Whatever git work tree the folder for temporary files lies in.
        yield replace(plan, project=folder, directory=".")


def run_errand(
    plan: Plan, show: Callable[[RunFolder, CellState], None], say: Callable[[str], None]
) -> CellState:
    """Run the cell to its end, here or as a job.

    Args:
        plan: what :func:`errand` has made.
        show: called about once a second with the cell.
        say: told what a person should know.

    Returns:
        The cell at the end.

    Raises:
        UserError: it cannot be submitted.
        PartlySubmitted: the scheduler refused it.
        KeyboardInterrupt: of the one who waits; a job goes on.
    """
    run = create_run(plan)

    def look(status: Status) -> None:
        show(run, _cell(run, status))

    with only_driver(run) as lock:
        submission = next_submission(plan)
        if plan.site.scheduler == "local":
            scheduler, watcher = submit_here(submission, run), watch(run)
            if drive(scheduler, lambda: look(watcher.refresh()), say):
                raise KeyboardInterrupt
            cell = _cell(run, watcher.refresh())
            if scheduler.broken:
                cell = replace(cell, state="failed", reason=scheduler.last_words(0))
            return cell
        jobs = submit_to_cluster(submission, run, lock)
    say(f"submitted as {', '.join(jobs)}")
    return _cell(run, follow(watch(run), look, say))


def _cell(run: RunFolder, status: Status) -> CellState:
    (cell,) = with_pending(run, status)
    return cell


def end_errand(run: RunFolder) -> None:
    """End the job, or take it out of the queue; whoever wants its files gone waits for that."""
    watcher = watch(run)
    watcher.ask()
    status = watcher.refresh()
    cell = _cell(run, status)
    cancel_cell(run, cell.id)
    watcher.remove(status, {cell.index})
    deadline = time.monotonic() + _GOING_SECONDS
    while watcher.going(watcher.refresh()) and time.monotonic() < deadline:
        time.sleep(1.0)
        watcher.ask()
