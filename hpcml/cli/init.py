"""`hpcml init`: a first recipe for a script of one's own."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.errors import UserError

if TYPE_CHECKING:
    from hpcml.recipe.arguments import Argument

_COUNTS = ("nodes", "gpus", "cpus")
_NEEDS = (*_COUNTS, "memory", "time")
_OFFERED = 12


@click.command("init")
@click.argument("script", required=False, type=click.Path(path_type=Path))
@click.option(
    "--param",
    "params",
    multiple=True,
    metavar="NAME=VALUE,…",
    help="A parameter: with several values it is swept (again for more).",
)
@click.option("--nodes", help="Nodes of each cell.")
@click.option("--gpus", help="GPUs of each node.")
@click.option("--cpus", help="CPU cores of each process.")
@click.option("--memory", help="Memory of each node, such as 16G.")
@click.option("--time", help="How long one job may run, such as 4h.")
@click.option("--metric", help="What the cells are ranked by; the script reports it.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The recipe. [default: the script's name with .yaml, beside it]",
)
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def command(
    script: Path | None,
    params: tuple[str, ...],
    metric: str | None,
    mode: str,
    output: Path | None,
    force: bool,
    **needs: str | None,
) -> None:
    """Write a recipe for SCRIPT, with comments on what to change next.

    On a terminal it asks what isn't given: the script, its parameters, what a cell needs. With
    --param or a need it asks nothing. The script is looked at, never run.
    """
    from hpcml import resources
    from hpcml.files import is_file, plain_errors
    from hpcml.recipe import draft
    from hpcml.recipe.arguments import script_arguments
    from hpcml.recipe.problems import did_you_mean

    given = {key: value for key, value in needs.items() if value is not None}
    asks = sys.stdin.isatty() and not params and not given
    if script is None:
        if not asks:
            raise UserError("which script? hpcml init train.py --param lr=0.1,0.01 --cpus 2")
        script = Path(click.prompt("Which script (or program) is to run?", err=True))
    if not is_file(script):
        raise UserError(f"there is no file {script}")
    recipe = output or script.with_name(f"{draft.recipe_name(script.name)}.yaml")
    place = _place(script, recipe)
    if os.path.lexists(recipe) and not force:
        raise UserError(f"{recipe} is there already; write over it by --force, or give --output")
    with plain_errors(f"read {script}"):
        arguments = script_arguments(script)
    if asks:
        _offer(arguments)
        answer = _asked("Which parameters, such as lr=0.1,0.01 seed=0,1?")
        params = tuple(draft.settings(answer))
        for need in _asked("What does one cell need, such as gpus=1 cpus=4 time=4h?").split():
            key, _, value = need.partition("=")
            if key not in _NEEDS or not value:
                raise UserError(f"{need!r} is none of {', '.join(f'{key}=…' for key in _NEEDS)}")
            given[key] = value
    parameters = [draft.parameter(setting, arguments) for setting in params]
    if len({each.name for each in parameters}) < len(parameters):
        raise UserError("a parameter is given twice; write its values in one: lr=0.1,0.01")
    missing = [
        each.flag or each.name
        for each in arguments
        if each.required and each.name not in {parameter.name for parameter in parameters}
    ]
    # What only its place tells comes in the order of the script.
    order = [each.name for each in arguments]
    parameters.sort(key=lambda each: 0 if each.flag else 1 + order.index(each.name))
    text = draft.draft_text(
        draft.Draft(
            script=place,
            parameters=parameters,
            arguments=arguments,
            needs=_checked(given),
            metric=metric,
            mode=mode,
            schema=(resources.folder("schemas") / "recipe.json").as_uri(),
        )
    )
    _write(recipe, text, force)
    for each in parameters:
        if order and each.name not in order:
            hint = did_you_mean(each.name, order)
            click.echo(f"note: the script has no argument {each.name}{hint}", err=True)
    if missing:
        click.echo(f"note: the script needs {', '.join(missing)} too: see params", err=True)
    if draft.interpreter(place) is None and not os.access(script, os.X_OK):
        click.echo(
            f"note: {script} is not executable; chmod +x {shlex.quote(str(script))}", err=True
        )
    name = shlex.quote(str(recipe))
    click.echo(
        f"wrote {recipe}\nNext\n"
        f"  hpcml sweep {name} --dry-run   shows what would run\n"
        f"  hpcml sweep {name}             runs it"
    )


def _place(script: Path, recipe: Path) -> str:
    """Where the script is for the recipe, in whose project it must lie."""
    from hpcml.plan.snapshot import project_root

    folder = Path(os.path.realpath(recipe)).parent
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    real = Path(os.path.realpath(script))
    if not real.is_relative_to(project_root(folder)):
        raise UserError(
            f"{script} is not in the project of {recipe} (its git repository, or its folder), "
            "which is what jobs get a copy of; write the recipe beside the script"
        )
    return os.path.relpath(real, folder)


def _offer(arguments: list[Argument]) -> None:
    values = [each for each in arguments if not each.switch]
    if not values:
        return
    shown = [
        (each.flag or each.name) + ("" if each.default is None else f" ({each.default})")
        for each in values[:_OFFERED]
    ]
    more = f" and {len(values) - _OFFERED} more" if len(values) > _OFFERED else ""
    click.echo(f"It takes {', '.join(shown)}{more}.", err=True)


def _asked(question: str) -> str:
    return str(click.prompt(f"{question} [none]\n", default="", show_default=False, err=True))


def _checked(needs: dict[str, str]) -> dict[str, str]:
    """The needs, as YAML."""
    from hpcml.recipe.draft import in_yaml
    from hpcml.recipe.units import parse_duration, parse_memory

    for key, value in needs.items():
        if key in _COUNTS:
            if not (value.isascii() and value.isdecimal() and str(int(value)) == value):
                raise UserError(f"{key} is a whole number, not {value!r}")
            if key != "gpus" and value == "0":
                raise UserError(f"{key} is at least 1")
            continue
        try:
            (parse_memory if key == "memory" else parse_duration)(value)
        except ValueError as error:
            raise UserError(f"{key}: {error}") from None
    return {key: in_yaml(needs[key]) for key in _NEEDS if key in needs}


def _write(recipe: Path, text: str, force: bool) -> None:
    """Put the whole recipe there at once, and nothing over a file that came meanwhile."""
    from hpcml.files import plain_errors

    aside = recipe.with_name(f".{recipe.name}.{os.getpid()}")
    with plain_errors(f"write {recipe}"):
        try:
            with aside.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if force:
                os.replace(aside, recipe)
            else:
                os.link(aside, recipe)
        except FileExistsError:
            raise UserError(f"{recipe} is there already; write over it by --force") from None
        finally:
            aside.unlink(missing_ok=True)
