"""``hpcml status``: how far a run is."""

from __future__ import annotations

import json
from pathlib import Path

import click

from hpcml.cli.options import root_option, run_argument

_ALL_SHOWN_UP_TO = 50


@click.command("status")
@run_argument
@click.option("--all", "every", is_flag=True, help="Show every cell of a large run.")
@click.option("--watch", "watches", is_flag=True, help="The same as `hpcml watch`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@root_option
@click.pass_context
def command(
    context: click.Context,
    run: str | None,
    every: bool,
    watches: bool,
    as_json: bool,
    root: Path | None,
) -> None:
    """Show the states of a run's cells.

    RUN is a run folder, a run id or its beginning, or a recipe's name; without it, the newest run.
    """
    from hpcml.cli.tables import cells_table, console
    from hpcml.cli.view import print_counts, print_reasons
    from hpcml.cli.watch import command as watch_command
    from hpcml.errors import UserError
    from hpcml.launch.watch import watch
    from hpcml.runs.find import find_run, reference
    from hpcml.runs.status import STATES, with_pending
    from hpcml.runs.tables import json_value

    if watches:
        if every or as_json:
            raise UserError("--watch shows the run as `hpcml watch` does, without --all and --json")
        context.invoke(watch_command, run=run, root=root)
        return
    folder = find_run(run, root)
    watcher = watch(folder)
    watcher.ask()
    status = watcher.refresh()
    if watcher.trouble:
        click.echo(f"hpcml: {watcher.trouble}", err=True)
    if as_json:
        cells = [
            {
                "id": cell.id,
                "index": cell.index,
                "state": cell.state,
                "attempts": cell.attempts,
                "step": cell.step,
                "total_steps": cell.total_steps,
                "params": cell.params,
                "metrics": cell.metrics,
                "reason": cell.reason,
            }
            for cell in with_pending(folder, status)
        ]
        document = {"run": str(folder.path), "states": status.counts(), "cells": cells}
        click.echo(json.dumps(json_value(document), indent=1))
        return
    output = console()
    whole = every or status.total <= _ALL_SHOWN_UP_TO
    attention = status.in_state("running", "failed", "lost")
    shown = list(with_pending(folder, status)) if whole else attention
    click.echo(folder.path)
    print_counts(output, status)
    if shown:
        output.print()
        output.print(cells_table(shown, folder, output.width))
    print_reasons(output, shown if whole else status.in_state(*STATES[:-1]))
    if not whole:
        output.print()
        output.print(
            f"The other {status.total - len(shown)} cells: hpcml status {reference(folder)} --all",
            style="dim",
        )
