"""The plan of a run, from its folder: the recipe and the site are not needed any more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from hpcml.errors import UserError
from hpcml.files import plain_errors
from hpcml.plan.container import Container
from hpcml.plan.plan import Plan
from hpcml.plan.resources import Resources
from hpcml.plan.volcano import Pod
from hpcml.recipe.cell import ABSENT, Cell, Entry, Row, canonical_json
from hpcml.recipe.schema import Spending
from hpcml.site.schema import Site


@dataclass(slots=True, eq=False)
class _Line:
    """A cell as its line in ``cells.jsonl`` has it."""

    names: tuple[str, ...]
    own: dict[str, Any]
    layout: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def params(self, row: Row) -> dict[str, Any]:
        return dict(self.own["params"])

    def payload(self, row: Row, index: int) -> dict[str, Any]:
        return dict(self.own["payload"])

    def members(self, row: Row, index: int) -> str:
        params, payload = canonical_json(self.own["params"]), canonical_json(self.own["payload"])
        return f'"params":{params},"payload":{payload}'


def stored_plan(folder: Path) -> Plan:
    """The plan that the run in ``folder`` was given last.

    Raises:
        UserError: it cannot be read, or another version of hpcml wrote less than is needed.
    """
    with plain_errors(f"read {folder}"):
        document = json.loads((folder / "plan.json").read_bytes())
        recipe, site = (folder / "recipe.yaml").read_text(), (folder / "site.yaml").read_text()
        lines = (folder / "cells.jsonl").read_text(encoding="utf-8").split("\n")
    root = folder.parent.parent
    try:
        names = tuple(document["swept"])
        cells = tuple(_cell(json.loads(line), names, document["layout"]) for line in lines if line)
        return Plan(
            name=document["name"],
            kind=document["kind"],
            digest=document["digest"],
            cells=cells,
            stage=document["stage"],
            needs=tuple(stored_plan(root / run) for run in document["needs"]),
            swept=names,
            objective=document["objective"],
            halving=document.get("halving"),
            search=document.get("search"),
            resources=Resources(**document["resources"]),
            pack=document["array"]["pack"],
            workers=document["workers"],
            max_running=document["array"]["max_running"],
            budget=Spending(),  # that of the recipe is for the command that is given with it
            retry=document["retry"],
            layout=document["layout"],
            env_from=tuple(document["env_from"]),
            site=Site.model_validate(document["site"]),
            python=document["python"],
            container=TypeAdapter(Container | None).validate_python(document["container"]),
            pod=TypeAdapter(Pod | None).validate_python(document["pod"]),
            root=root,
            project=None if document["project"] is None else Path(document["project"]),
            directory=document["directory"],
            code_limit=document["code_limit"],
            directives=tuple((name, value) for name, value in document["directives"]),
            recipe_text=recipe,
            site_text=site,
            notes=(),
        )
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise UserError(
            f"{folder / 'plan.json'}: it lacks what this version of hpcml needs ({error}); the "
            "command that made the run, given again, writes it anew"
        ) from None


def _cell(line: dict[str, Any], names: tuple[str, ...], layout: Mapping[str, Any]) -> Cell:
    params = line["params"]
    row = tuple(
        Entry(params[name], canonical_json(params[name])) if name in params else ABSENT
        for name in names
    )
    return Cell(line["index"], line["id"], row, _Line(names, line, layout))
