"""Validating jobs of Volcano as a server with its CRD does, strictly."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jsonschema


@lru_cache
def validator() -> jsonschema.Draft202012Validator:
    schema = json.loads((Path(__file__).parent / "crd" / "jobs.json").read_text())
    return jsonschema.Draft202012Validator(_strict(schema))


def problems(job: dict[str, Any]) -> list[str]:
    """What the server would say of a job."""
    return [f"{error.json_path}: {error.message}" for error in validator().iter_errors(job)]


def _strict(schema: Any) -> Any:
    """The schema with unknown fields refused, where a server would drop them."""
    if isinstance(schema, list):
        return [_strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _strict(value) for key, value in schema.items()}
    # A key "properties" may be a field's own name, whose value is then no mapping of schemas.
    if found.get("type") == "object" and isinstance(found.get("properties"), dict):
        found.setdefault("additionalProperties", False)
    if found.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found
