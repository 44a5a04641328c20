"""``hpcml results``: what came out of a run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from hpcml.cli.options import root_option, run_argument


@click.command("results")
@run_argument
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
    run: str | None,
    every: bool,
    as_json: bool,
    as_csv: bool,
    parquet: Path | None,
    root: Path | None,
) -> None:
    """Show a run's cells, ranked by the recipe's objective.

    RUN is a run folder, a run id or its beginning, or a recipe's name; without it, the newest run.
    """
    from hpcml.cli.view import print_summary
    from hpcml.errors import UserError
    from hpcml.launch.watch import watch
    from hpcml.runs import tables
    from hpcml.runs.find import find_run
    from hpcml.runs.results import results

    if as_json + as_csv + (parquet is not None) > 1:
        raise UserError("--json, --csv and --parquet exclude each other; give one of them")
    folder = find_run(run, root)
    watcher = watch(folder)
    watcher.ask()
    status = watcher.refresh()
    if watcher.trouble:
        click.echo(f"hpcml: {watcher.trouble}", err=True)
    found = results(folder, status)
    if as_json:
        click.echo(tables.to_json(found))
    elif as_csv:
        click.echo(tables.to_csv(found), nl=False)
    elif parquet is not None:
        tables.write_parquet(found, parquet)
        click.echo(f"wrote {len(found.rows)} cells to {parquet}")
    else:
        # Somebody else's run can be looked at as well, and stays as it is.
        with suppress(UserError):
            tables.write_parquet(found, folder.results_file)
        print_summary(found, status, every=every)
