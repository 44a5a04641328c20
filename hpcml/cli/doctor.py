"""`hpcml doctor`: what works here, and what a recipe lacks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option, site_option

if TYPE_CHECKING:
    from hpcml.recipe.load import LoadedRecipe
    from hpcml.site.check import Check
    from hpcml.site.schema import Site


@click.command("doctor")
@click.argument(
    "recipe", required=False, type=click.Path(path_type=Path), shell_complete=completion.recipes
)
@site_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@root_option
@click.pass_context
def command(
    context: click.Context, recipe: Path | None, site: str | None, as_json: bool, root: Path | None
) -> None:
    """Look whether all is there that hpcml needs here, or that RECIPE needs.

    Without RECIPE: what this machine and the site have, and which kinds of recipes can run; engines
    that are not installed are told and are no fault. With one: only what it needs, all of it.
    Exit code 1 if something that is needed is missing. Nothing is submitted: `hpcml site check`
    tries the nodes by a job.
    """
    from hpcml.cli.site import print_checks
    from hpcml.recipe.load import load_stages
    from hpcml.site.search import find_site

    stages = load_stages(recipe) if recipe is not None else []
    found = find_site(site).site
    checks = _checks(found, stages, root)
    if as_json:
        listed = list(checks)
        good = all(check.good is not False for check in listed)
        document = {
            "site": found.name,
            "good": good,
            "checks": [check._asdict() for check in listed],
        }
        click.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        good = print_checks(checks, width=18, none="-")
        if found.scheduler == "slurm":
            click.echo(f"The nodes are tried by `hpcml site check {found.name}`.")
    context.exit(0 if good else 1)


def _checks(site: Site, stages: list[LoadedRecipe], root: Path | None) -> Iterator[Check]:
    import hpcml
    from hpcml.plan.plan import runs_root
    from hpcml.site.check import Check, check_site
    from hpcml.site.engines import check_kinds
    from hpcml.site.image_check import NEEDS, kind_of

    yield Check("hpcml", True, f"{hpcml.__version__}, Python {sys.version.split()[0]}")
    yield Check("site", True, f"{site.name} ({site.scheduler})")
    yield from check_site(site, runs_root(site, root))
    if site.scheduler == "slurm":
        from hpcml.launch.slurm.probe import check_commands

        yield from check_commands(site)
    elif site.scheduler == "volcano":
        from hpcml.launch.volcano.probe import check_server

        yield from check_server(site)
    asked = max((each.recipe.resources.gpus for each in stages), default=0)
    if asked and site.scheduler == "local":
        from hpcml.plan.resources import gpus

        there = len(gpus(site))
        said = f"a cell asks for {asked}, and there are {there}"
        yield Check("GPUs of a cell", there >= asked, said)
    in_image = [each for each in stages if each.recipe.container is not None]
    if site.container is not None and (in_image or not stages):
        yield _runtime(site, required=bool(in_image))
    for each in in_image:
        assert each.recipe.container is not None
        image = each.recipe.container.image
        yield Check(
            kind_of(each.recipe), None, f"in the image {image}: hpcml container check tries it"
        )
    if site.scheduler == "volcano":
        return  # pods have everything in their image
    kinds = [kind_of(each.recipe) for each in stages if each not in in_image]
    if not stages:
        kinds = list(NEEDS)
    python = site.python or sys.executable
    yield from check_kinds(python, list(dict.fromkeys(kinds)), required=bool(stages))
    searches = [each.recipe.sweep.search for each in stages]
    samplers: set[str] = {search.sampler for search in searches if search}
    if not stages or samplers:
        yield _search(samplers)


def _runtime(site: Site, *, required: bool) -> Check:
    """Whether the command that starts containers is here; on a cluster it may be on nodes only."""
    from hpcml.site.check import Check

    assert site.container is not None
    name = site.container.runtime
    if name == "pyxis":
        return Check("containers", None, "pyxis is asked for among the commands of Slurm")
    try:
        said = subprocess.run(
            [name, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        here = site.scheduler == "local"
        why = f"{name}: {error.strerror if isinstance(error, OSError) else error}"
        where = "install it" if here else "it may be on the nodes only"
        return Check("containers", False if required and here else None, f"{why}; {where}")
    return Check("containers", True, said.stdout.strip())


def _search(samplers: set[str]) -> Check:
    """Whether there is what these samplers need; none of them: what any needs, and no fault."""
    from hpcml.site.check import Check

    needs = {"cmaes": "cmaes", "qmc": "scipy"}
    names = ["optuna", *(needs[each] for each in needs if not samplers or each in samplers)]
    missing = [name for name in names if not importlib.util.find_spec(name)]
    if not missing:
        return Check("sweep.search", True, ", ".join(names))
    return Check(
        "sweep.search",
        False if samplers else None,
        f"missing: {', '.join(missing)}: pip install 'hpcml[search]'",
    )
