"""`hpcml plan`: what a training will need, before anything is submitted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcml.cli import completion
from hpcml.cli.options import settings_option, site_option
from hpcml.errors import UserError

if TYPE_CHECKING:
    from hpcml.plan.training.estimate import Estimate
    from hpcml.recipe.load import LoadedRecipe
    from hpcml.site.schema import Site


@click.command("plan")
@click.argument("recipe", type=click.Path(path_type=Path), shell_complete=completion.recipes)
@settings_option
@site_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(recipe: Path, settings: tuple[str, ...], site: str | None, as_json: bool) -> None:
    """Say what the training of RECIPE needs: memory, time, layouts, checkpoints, job lengths.

    Nothing is submitted and no GPU is needed. Cells that differ only in what needs nothing, such
    as the learning rate, have one answer.
    """
    from hpcml.cli.estimate import as_document, print_estimate, print_overview
    from hpcml.recipe.load import load_stages
    from hpcml.recipe.stages import Reference, Stages
    from hpcml.recipe.sweep import expand
    from hpcml.site.search import find_site

    stages = load_stages(recipe, settings)
    training = [loaded for loaded in stages if loaded.recipe.kind == "train"]
    if not training:
        kind = stages[0].recipe.kind
        raise UserError(
            f"{recipe}: there is nothing to plan, since its kind is {kind}: hpcml knows what a "
            "training needs (kind train), not what other programs do. hpcml sweep --dry-run shows "
            "what would be submitted"
        )
    found = find_site(site).site
    documents = []
    names = Stages({loaded.stage: Reference(loaded.stage) for loaded in stages if loaded.stage})
    for loaded in training:
        cells = expand(loaded, names)
        estimates, unknown = _estimates(loaded, found, cells)
        title = loaded.recipe.name
        if as_json:
            documents.append(as_document(title, found, estimates, unknown))
        elif unknown is not None:
            click.echo(f"{title}: {unknown}")
        elif len(estimates) <= _IN_FULL:
            for estimate in estimates:
                print_estimate(title, found, estimate, len(cells))
        else:
            print_overview(title, found, estimates, len(cells))
    if as_json:
        click.echo(json.dumps(documents, indent=2))


#: Models and layouts of a recipe that are shown in full; more of them have a line each.
_IN_FULL = 3


def _estimates(loaded: LoadedRecipe, site: Site, cells: Any) -> tuple[list[Estimate], str | None]:
    """The estimates of a recipe, or why there are none."""
    from hpcml.plan.partitions import choose_partition
    from hpcml.plan.plan import lead_of, resources_of
    from hpcml.plan.training.estimate import estimates, hardware_of
    from hpcml.plan.training.model import UnknownModel

    resources = resources_of(loaded)
    partition = choose_partition(loaded, resources, site) if site.scheduler != "local" else None
    lead = lead_of(site, resources)
    try:
        hardware = hardware_of(site, partition, resources, lead)
        return estimates(loaded, cells, hardware), None
    except UnknownModel as error:
        return [], f"what it needs can't be said: {error}"
