"""The report as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import resources
from typing import Any

from hpcml.report.data import Report

# In an order in which each uses only what was before it.
_SCRIPTS = (
    *("draw", "run", "curves", "parameters", "heat", "parallel", "inference"),
    *("timeline", "tables", "page"),
)

# What a browser would take for markup within a script. All beyond ASCII is escaped by JSON.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def page(report: Report) -> bytes:
    """The file's content: the page, its style and script, and the report as JSON."""
    text = _part("page.html")
    # The data come last, so that nothing in them is taken for a place to fill.
    for mark, content in (
        ("/*STYLE*/", _part("page.css")),
        ("/*SCRIPT*/", '"use strict";\n' + "".join(_part(f"{name}.js") for name in _SCRIPTS)),
        ("/*DATA*/", embedded(report)),
    ):
        text = text.replace(mark, content, 1)
    return text.encode()


def embedded(report: Report) -> str:
    """The report as JSON that can stand within a ``<script>``."""
    text = json.dumps(report, default=_members, separators=(",", ":"), allow_nan=False)
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def _members(item: Any) -> dict[str, Any]:
    return {member.name: getattr(item, member.name) for member in fields(item)}


def _part(name: str) -> str:
    return (
        resources.files("hpcml.report").joinpath("web").joinpath(name).read_text(encoding="utf-8")
    )
