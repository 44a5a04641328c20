"""`hpcml site`: the places where jobs can run."""

from __future__ import annotations

from pathlib import Path

import click


@click.group("site")
def command() -> None:
    """List, show and check the places where jobs can run."""


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
@click.argument("name", required=False)
def show_site(name: str | None) -> None:
    """Print the file of a site (the one in use, without NAME)."""
    from hpcml.site.search import find_site

    found = find_site(name)
    click.echo(f"# {found.path}", err=True)
    click.echo(found.text, nl=False)


@command.command("check")
@click.argument("name", required=False)
@click.option("--root", type=click.Path(path_type=Path), help="The runs root to check.")
@click.pass_context
def check_site_command(context: click.Context, name: str | None, root: Path | None) -> None:
    """Look whether a site has what hpcml relies on; exit code 1 if something is missing."""
    from hpcml.plan.plan import runs_root
    from hpcml.site.check import check_site
    from hpcml.site.search import find_site

    found = find_site(name)
    good = True
    for check in check_site(found.site, runs_root(found.site, root)):
        good &= check.good
        click.echo(f"{'ok  ' if check.good else 'FAIL'}  {check.name:<12} {check.seen}")
    context.exit(0 if good else 1)
