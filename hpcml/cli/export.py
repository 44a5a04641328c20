"""``hpcml export``: a trained model for other programs."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option


@click.command("export")
@click.argument("run", shell_complete=completion.runs)
@click.argument("cell", shell_complete=completion.cells)
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@click.option("--unmerged", is_flag=True, help="Keep an adapter apart from its base model.")
@root_option
def command(run: str, cell: str, target: Path, unmerged: bool, root: Path | None) -> None:
    """Write the model of a cell to DIR, in the format of Hugging Face.

    RUN is a run folder, a run id or its beginning, or a recipe's name. CELL is an index, an id or
    its beginning, or "best".
    """
    import importlib.util

    from hpcml.errors import UserError
    from hpcml.files import plain_errors
    from hpcml.runs.find import find_cell, find_run
    from hpcml.runs.results import checkpoint_of
    from hpcml.runs.status import collect

    folder = find_run(run, root)
    cell_dir = folder.cell_dir(find_cell(folder, cell)["id"])
    checkpoint = checkpoint_of(cell_dir)
    if checkpoint is None:
        pointer = cell_dir / "checkpoints" / "latest"
        with plain_errors(f"read {pointer}"), suppress(FileNotFoundError, NotADirectoryError):
            pointer.read_bytes()
        raise UserError(f"cell {cell} has no checkpoint in {cell_dir / 'checkpoints'}")
    if importlib.util.find_spec("torch") is None:
        raise UserError("hpcml export needs torch; install it by: pip install 'hpcml[torch]'")
    from hpcml.train.checkpoint import CheckpointError
    from hpcml.train.export import ExportError, export

    try:
        with plain_errors(f"write {target}"):
            export(cell_dir, target, "final", not unmerged)
    except (ExportError, CheckpointError) as error:
        raise UserError(str(error)) from error
    click.echo(f"wrote the model of {checkpoint} to {target}")
    if cell == "best" and not (status := collect(folder)).complete:
        states = ", ".join(f"{count} {state}" for state, count in status.counts().items())
        click.echo(f"the best of {folder.name} may still change: {states}", err=True)
