"""``hpcml watch``: a run as it goes on."""

from __future__ import annotations

from pathlib import Path

import click

from hpcml.cli.options import root_option, run_argument


@click.command("watch")
@run_argument
@root_option
@click.pass_context
def command(context: click.Context, run: str | None, root: Path | None) -> None:
    """Show a run until nothing of it runs or waits; Ctrl-C ends only the looking.

    RUN is a run folder, a run id or its beginning, or a recipe's name; without it, the newest run.
    The scheduler is asked every 30 seconds, the run folder is read each second.
    """
    from hpcml.cli.view import look, print_summary
    from hpcml.runs.find import find_run
    from hpcml.runs.results import results

    folder = find_run(run, root)
    status = look(folder)
    if status is None:
        context.exit(130)
    print_summary(results(folder, status), status)
