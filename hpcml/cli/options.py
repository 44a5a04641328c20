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

#: Keys of the recipe that are other ones this time.
settings_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the recipe, such as params.max_steps=10 (again for more).",
)

#: The site, by name or file.
site_option = click.option(
    "--site",
    shell_complete=completion.sites,
    help="Where to run: a site's name or file. [default: this host's, or local]",
)

#: Whether only to look.
dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing."
)

#: Whether it may take more than the budget.
yes_option = click.option(
    "--yes", is_flag=True, help="Submit also what may take more than the budget allows."
)
