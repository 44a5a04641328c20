"""`hpcml schema`: what editors complete and check recipes and sites with."""

from __future__ import annotations

import click


@click.command("schema")
@click.argument("what", type=click.Choice(["recipe", "site"]))
def command(what: str) -> None:
    """Print the JSON Schema of recipes or sites."""
    from hpcml import resources

    path = resources.folder("schemas") / f"{what}.json"
    click.echo(path.read_text(encoding="utf-8"), nl=False)
