"""``hpcml cancel``: stop cells, and do not start them again."""

from __future__ import annotations

from pathlib import Path

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option

_NAMED = 10


@click.command("cancel")
@click.argument("run", shell_complete=completion.runs)
@click.argument("cells", nargs=-1, metavar="[CELL]...", shell_complete=completion.cells)
@root_option
def command(run: str, cells: tuple[str, ...], root: Path | None) -> None:
    """Stop cells of a run; running ones save a checkpoint first.

    RUN is a run folder, a run id or its beginning, or a recipe's name. CELL is an index, an id or
    its beginning; without any, all unfinished cells are stopped. Giving the sweep command again
    continues them.
    """
    from hpcml.cli import text
    from hpcml.launch.watch import watch
    from hpcml.runs.cancel import cancel_cell
    from hpcml.runs.find import find_cell, find_run
    from hpcml.runs.status import with_pending

    folder = find_run(run, root, certain=True)
    watcher = watch(folder)
    watcher.ask()
    status = watcher.refresh()
    wanted = {find_cell(folder, cell)["index"] for cell in cells}
    chosen = [cell for cell in with_pending(folder, status) if not wanted or cell.index in wanted]
    open_cells = [
        cell
        for cell in chosen
        if cell.state not in ("done", "failed", "dropped") and not cell.cancelled
    ]
    if wanted:
        for cell in chosen:
            if cell not in open_cells:
                what = "cancelled already" if cell.cancelled else f"{cell.state} already"
                click.echo(f"{text.cell_name(cell, folder.swept)}: {what}")
    running = [cell for cell in open_cells if cell.state == "running"]
    waiting = [cell for cell in open_cells if cell.state != "running"]
    for cell in running:
        click.echo(f"{text.cell_name(cell, folder.swept)}: asked to save and stop")
    for cell in waiting[:_NAMED]:
        click.echo(f"{text.cell_name(cell, folder.swept)}: will not be started ({cell.state})")
    if len(waiting) > _NAMED:
        click.echo(f"and {len(waiting) - _NAMED} more will not be started")
    # Waiting cells first, so that none of them takes the place of a stopped one.
    for cell in waiting + running:
        cancel_cell(folder, cell.id)
    # Cancelled in their files before: one that begins in this moment ends at once.
    trouble = watcher.remove(status, {cell.index for cell in open_cells})
    if trouble and waiting:
        click.echo(f"hpcml: {trouble}\nJobs that wait will end at once when they begin", err=True)
    if not open_cells and not wanted:
        click.echo(f"nothing to cancel in {folder.path}")
