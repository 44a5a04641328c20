"""`hpcml infer`: batch inference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli import completion
from hpcml.cli.options import (
    dry_run_option,
    root_option,
    settings_option,
    site_option,
    wait_option,
    yes_option,
)

if TYPE_CHECKING:
    from hpcml.plan import Plan


@click.command("infer")
@click.option(
    "--batch",
    "recipe",
    required=True,
    type=click.Path(path_type=Path),
    metavar="RECIPE",
    shell_complete=completion.recipes,
    help="The recipe, of the kind infer.",
)
@settings_option
@site_option
@dry_run_option
@wait_option
@yes_option
@click.option("--more", type=click.IntRange(1, 10_000), help="Add so many workers to a run.")
@click.option("--only-errors", is_flag=True, help="Ask the rows again that have no answer.")
@click.option(
    "--rerun",
    is_flag=True,
    help="The input or the model changed: keep the answers that are still valid, ask the rest.",
)
@root_option
@click.pass_context
def command(
    context: click.Context,
    recipe: Path,
    settings: tuple[str, ...],
    site: str | None,
    dry_run: bool,
    wait: bool,
    yes: bool,
    more: int | None,
    only_errors: bool,
    rerun: bool,
    root: Path | None,
) -> None:
    """Let a language model answer the rows of a table, each exactly once.

    The same command again continues the run: rows that have their answer keep it.
    """
    from hpcml.cli.output import no_reason_to_stop
    from hpcml.cli.sweep import add_workers, preview, run_plans
    from hpcml.errors import UserError
    from hpcml.plan import compile_stages
    from hpcml.recipe.load import load_stages
    from hpcml.site.search import find_site

    if sum((more is not None, only_errors, rerun)) > 1:
        raise UserError("--more, --only-errors and --rerun exclude each other; give one of them")
    plans = compile_stages(load_stages(recipe, settings), find_site(site), root)
    if not any(plan.kind == "infer" for plan in plans):
        raise UserError(f"{recipe}: its kind is {plans[0].kind}; give it to: hpcml sweep {recipe}")
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        click.echo(f"note: {note}", err=True)
    if dry_run:
        preview(plans)
        return
    if more is not None:
        context.exit(max(add_workers(plan, more) for plan in plans if plan.kind == "infer"))
    if only_errors or rerun:
        _begin_rounds(plans, accept_changes=rerun)
    with no_reason_to_stop():
        code = run_plans(plans, wait=wait, yes=yes)
    context.exit(code)


def _begin_rounds(plans: list[Plan], *, accept_changes: bool) -> None:
    """Let the cells of inferences that are there begin another round."""
    from hpcml.errors import UserError
    from hpcml.files import is_file
    from hpcml.launch.drive import only_driver
    from hpcml.launch.watch import watch
    from hpcml.runs.folder import RunFolder
    from hpcml.runs.rounds import begin_round

    for plan in plans:
        if plan.kind != "infer" or not is_file(plan.folder / "plan.json"):
            continue
        run = RunFolder.open(plan.folder, plan.digest)
        with only_driver(run):
            watcher = watch(run)
            watcher.ask()
            if watcher.refresh().in_state("running"):
                raise UserError(f"{run.path}: its workers are running; wait for them, or cancel it")
            for cell in plan.cells:
                begin_round(run, cell.id, accept_changes=accept_changes)
