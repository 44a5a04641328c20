"""`hpcml site`: the places where jobs can run."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli import completion
from hpcml.errors import UserError
from hpcml.recipe.problems import did_you_mean

if TYPE_CHECKING:
    from hpcml.site.check import Check
    from hpcml.site.schema import Partition, Site


@click.group("site")
def command() -> None:
    """List, show, detect and check the places where jobs can run."""


@command.command("list")
def list_sites() -> None:
    """List the sites that are found, and which one is used without --site."""
    from hpcml.site.search import find_site, load_site, site_files

    chosen = find_site().path
    for name, path in site_files().items():
        site = load_site(path).site
        mark = "*" if path == chosen else " "
        click.echo(f"{mark} {name:<16} {site.scheduler:<8} {site.description}  ({path})")


@command.command("show")
@click.argument("name", required=False, shell_complete=completion.sites)
def show_site(name: str | None) -> None:
    """Print the file of a site (the one in use, without NAME)."""
    from hpcml.site.search import find_site

    found = find_site(name)
    click.echo(f"# {found.path}", err=True)
    click.echo(found.text, nl=False)


@command.command("detect")
@click.option("--name", help="The site's name; the cluster's without it.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write, which must not exist; without it the text is printed.",
)
def detect_site(name: str | None, output: Path | None) -> None:
    """Write a site file for the Slurm of this login node, with what it says of itself."""
    from hpcml.launch.slurm.describe import ask
    from hpcml.site.detect import site_file

    if output is not None and output.exists():
        raise UserError(f"--output {output}: it exists already, and is left as it is")
    text = site_file(ask(), name)
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"--output {output}: it exists already, and is left as it is") from None
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    click.echo(f"{output} is written; look through it, then: hpcml site check {output}", err=True)


@command.command("check")
@click.argument("name", required=False, shell_complete=completion.sites)
@click.option("--root", type=click.Path(path_type=Path), help="The runs root to check.")
@click.option("--partition", "-p", "names", multiple=True, help="Try only this one (repeatable).")
@click.option("--no-jobs", is_flag=True, help="Look at this machine only; submit nothing.")
@click.option("--wait", default="10m", help="How long a job may take to start.  [default: 10m]")
@click.pass_context
def check_site_command(
    context: click.Context,
    name: str | None,
    root: Path | None,
    names: tuple[str, ...],
    no_jobs: bool,
    wait: str,
) -> None:
    """Look whether a site has what hpcml relies on; exit code 1 if something is missing.

    On a site with Slurm a short job is submitted to each partition. It is cancelled, and its files
    are removed, when the command ends. With Volcano the server is asked, and nothing is submitted.
    """
    from hpcml.plan.plan import runs_root
    from hpcml.recipe.units import parse_duration
    from hpcml.site.check import check_site
    from hpcml.site.search import find_site

    site = find_site(name).site
    try:
        seconds = parse_duration(wait)
    except ValueError as error:
        raise UserError(f"--wait: {error}") from None
    partitions = _chosen(site, names)
    folder = runs_root(site, root)
    good = print_checks(check_site(site, folder))
    if site.scheduler == "slurm":
        from hpcml.launch.slurm.probe import Prober, check_commands

        # Without these there is nobody to submit to.
        good &= (answer := print_checks(check_commands(site)))
        if answer and not no_jobs:
            prober = Prober(site, folder, seconds, partial(click.echo, err=True))
            with ended_by_signals():
                for title, checks in prober.run(partitions):
                    click.echo(f"\n{title}")
                    good &= print_checks(checks)
    elif site.scheduler == "volcano":
        from hpcml.launch.volcano.probe import check_server

        good &= print_checks(check_server(site))
    context.exit(0 if good else 1)


def _chosen(site: Site, names: tuple[str, ...]) -> list[Partition]:
    if names and site.scheduler != "slurm":
        raise UserError(f"--partition: site {site.name} is not of Slurm; its jobs are not tried")
    known = {partition.name: partition for partition in site.partitions}
    for name in names:
        if name not in known:
            raise UserError(
                f"--partition {name}: site {site.name} lists no such partition"
                f"{did_you_mean(name, known)}"
            )
    return [known[name] for name in dict.fromkeys(names)] or list(known.values())


def print_checks(checks: Iterable[Check], width: int = 15, none: str = "skipped") -> bool:
    """Print each check, its name in ``width`` columns; whether none has failed.

    Args:
        checks: the checks, printed as they come.
        width: columns of their names.
        none: the word for one that is neither good nor a fault.
    """
    good = True
    for check in checks:
        good &= check.good is not False
        word = {True: "ok", False: "FAIL", None: none}[check.good]
        seen = check.seen.replace("\n", "\n" + " " * (width + 10))
        click.echo(f"{word:<8} {check.name:<{width}} {seen}")
    return good


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let TERM and HUP end the command as Ctrl-C does, so that what it made is removed."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
