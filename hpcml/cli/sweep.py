"""`hpcml sweep`: the main command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli.options import root_option

if TYPE_CHECKING:
    from hpcml.plan import Plan, Submission
    from hpcml.runs.folder import RunFolder


@click.command("sweep")
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the recipe, such as params.max_steps=10 (again for more).",
)
@click.option(
    "--site", help="Where to run: a site's name or file. [default: this host's, or local]"
)
@click.option("--dry-run", is_flag=True, help="Print what would be submitted, and submit nothing.")
@root_option
@click.pass_context
def command(
    context: click.Context,
    recipe: Path,
    settings: tuple[str, ...],
    site: str | None,
    dry_run: bool,
    root: Path | None,
) -> None:
    """Run every cell of RECIPE, and follow them to their end.

    The same command again continues the run: cells that are done are skipped, failed ones start
    again, unfinished ones continue from their checkpoint.
    """
    from hpcml.plan import compile_plan
    from hpcml.recipe.load import load_recipe
    from hpcml.site.search import find_site

    plan = compile_plan(load_recipe(recipe, settings), find_site(site), root)
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    if dry_run:
        _preview(plan)
    else:
        context.exit(_run(plan))


def _preview(plan: Plan) -> None:
    """The script goes to stdout, byte for byte; what it will do, to stderr."""
    from hpcml.cli.preview import describe
    from hpcml.launch.submit import next_submission
    from hpcml.render import render_script

    submission = next_submission(plan)
    click.echo(describe(submission), err=True)
    if submission.indices:
        click.echo(render_script(submission), nl=False)


def _run(plan: Plan) -> int:
    from hpcml.launch.submit import create_run, next_submission
    from hpcml.render import render_script

    submission = next_submission(plan)
    render_script(submission)  # a fault in a template must show before anything is made
    run = create_run(plan)
    if plan.site.scheduler == "local":
        return _run_here(submission, run)
    return _hand_over(submission, run)


def _run_here(submission: Submission, run: RunFolder) -> int:
    """Run the cells on this machine, to their end."""
    from hpcml.cli.preview import describe
    from hpcml.cli.view import print_summary, progress
    from hpcml.launch.drive import drive, only_driver
    from hpcml.launch.submit import submit_here
    from hpcml.runs.results import results
    from hpcml.runs.status import Watcher
    from hpcml.runs.tables import write_parquet

    interrupted = False
    with only_driver(run):
        watcher = Watcher(run)
        click.echo(describe(submission), err=True)
        if submission.indices:
            scheduler = submit_here(submission, run)
            with progress(run) as view:
                interrupted = drive(scheduler, lambda: view.refresh(watcher.refresh()), view.say)
            for task, code in scheduler.broken.items():
                words = scheduler.last_words(task) or "it left no words"
                click.echo(f"task {task} broke off with exit code {code}: {words}", err=True)
        status = watcher.refresh()
    ranked = results(run, status)
    write_parquet(ranked, run.results_file)
    print_summary(ranked, status)
    if interrupted:
        return 130
    return 0 if status.counts() == {"done": len(run)} else 1


def _hand_over(submission: Submission, run: RunFolder) -> int:
    """Give the cells to a cluster's scheduler, which goes on without this command."""
    from hpcml.cli.preview import describe
    from hpcml.launch.slurm.scheduler import PartlySubmitted
    from hpcml.launch.submit import submit_to_slurm

    click.echo(describe(submission), err=True)
    reference = f"{run.name}/{run.run_id}"
    if submission.indices:
        try:
            jobs = submit_to_slurm(submission, run)
        except PartlySubmitted as error:
            click.echo(f"hpcml: {error}", err=True)
            return 1
        click.echo(f"submitted as {', '.join(map(str, jobs))}")
    click.echo(f"Next\n  hpcml status {reference}   shows how far it is")
    return 0
