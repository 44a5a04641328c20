"""`hpcml schema`: what editors complete and check recipes and sites with."""

from __future__ import annotations

import json

import click


@click.command("schema")
@click.argument("what", type=click.Choice(["recipe", "site"]))
def command(what: str) -> None:
    """Print the JSON Schema of recipes or sites."""
    if what == "recipe":
        from hpcml.recipe.schema import json_schema

        schema = json_schema()
    else:
        from hpcml.site.schema import Site

        schema = Site.model_json_schema()
    click.echo(json.dumps(schema, indent=2, ensure_ascii=False))
