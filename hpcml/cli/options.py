"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path

import click

from hpcml.cli import completion

#: Where the runs lie.
root_option = click.option(
    "--root",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the runs lie. [default: $HPCML_RUNS, or 'runs' in this folder; they are found "
    "also where the sites keep theirs]",
)

#: The run, or the newest one.
run_argument = click.argument("run", required=False, shell_complete=completion.runs)

#: Whether to stay until the cells have ended.
wait_option = click.option(
    "--wait",
    is_flag=True,
    help="On a cluster: follow the cells to their end. Ctrl-C ends only that. [local: always]",
)
