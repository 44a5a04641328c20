"""``hpcml results``: what came out of a run, or of several."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option

if TYPE_CHECKING:
    from hpcml.runs.folder import RunFolder
    from hpcml.runs.status import Status


@click.command("results")
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=completion.runs)
@click.option("--all", "every", is_flag=True, help="Show every cell and not only the best ones.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV.")
@click.option(
    "--parquet",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a Parquet file.",
)
@root_option
def command(
    runs: tuple[str, ...],
    every: bool,
    as_json: bool,
    as_csv: bool,
    parquet: Path | None,
    root: Path | None,
) -> None:
    """Show the cells of a run, ranked by the recipe's objective; of several runs, together.

    RUN is a run folder, a run id or its beginning, or a recipe's name; without it, the newest run.
    Several runs are compared where they have the same objective.
    """
    from hpcml.cli.view import print_comparison, print_summary
    from hpcml.errors import UserError
    from hpcml.runs import tables
    from hpcml.runs.comparison import compare
    from hpcml.runs.find import find_run
    from hpcml.runs.results import results

    if as_json + as_csv + (parquet is not None) > 1:
        raise UserError("--json, --csv and --parquet exclude each other; give one of them")
    named = [find_run(run, root) for run in runs or (None,)]
    # Two names of one run are one.
    folders = list({folder.path.resolve(): folder for folder in named}.values())
    states = [_look(folder) for folder in folders]
    found = [results(folder, status) for folder, status in zip(folders, states, strict=True)]
    comparison = compare(found) if len(found) > 1 else None
    table: tables.Table = comparison or found[0]
    if as_json:
        click.echo(tables.to_json(table))
    elif as_csv:
        click.echo(tables.to_csv(table), nl=False)
    elif parquet is not None:
        tables.write_parquet(table, parquet)
        click.echo(f"wrote {sum(len(each.rows) for each in found)} cells to {parquet}")
    elif comparison is not None:
        print_comparison(comparison, states, every=every)
    else:
        # Somebody else's run can be looked at as well, and stays as it is.
        with suppress(UserError):
            tables.write_parquet(table, folders[0].results_file)
        print_summary(found[0], states[0], every=every)


def _look(folder: RunFolder) -> Status:
    """The states now; what could not be found out is said."""
    from hpcml.launch.watch import watch

    watcher = watch(folder)
    watcher.ask()
    status = watcher.refresh()
    if watcher.trouble:
        click.echo(f"hpcml: {watcher.trouble}", err=True)
    return status
