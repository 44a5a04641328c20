"""Where hpcml's own templates, recipes, site configurations, images and schemas lie."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder ``templates``, ``recipes``, ``site_configs``, ``containers`` or ``schemas``.

    In an installed package it lies in the package, in a checkout at the top level.
    """
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
