"""Checking a document against a schema, and saying what is wrong in a person's words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from hpcml.recipe.problems import Problems, did_you_mean


class Block(BaseModel):
    """A part of a recipe or a site: no unknown keys, exact types, never changed."""

    # Deferred: of the many blocks only those at the top are ever validated by themselves.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


M = TypeVar("M", bound=Block)


def checked(model: type[M], data: Mapping[str, Any], problems: Problems) -> M | None:
    """Return ``data`` as a ``model``; where it is none, record every mistake and return None."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _translate(model, problems, detail)
        return None


def model_in(annotation: Any) -> type[Block] | None:
    """Return the block that a field's type holds, if it holds one."""
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def blocks(model: type[Block], prefix: str = "") -> Iterator[tuple[str, type[Block]]]:
    """Yield each block with its dotted key, the recipe itself first."""
    yield prefix, model
    for name, info in model.model_fields.items():
        inner = model_in(info.annotation)
        if inner is not None:
            yield from blocks(inner, f"{prefix}.{name}" if prefix else name)


_ALLOWED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "greater_than_equal": lambda context: f"at least {context['ge']}",
    "greater_than": lambda context: f"more than {context['gt']}",
    "less_than_equal": lambda context: f"at most {context['le']:,}",
    "less_than": lambda context: f"less than {context['lt']}",
    "too_short": lambda context: "at least one entry",
    "string_too_short": lambda context: "a text that is not empty",
    "int_type": lambda context: "a whole number",
    "int_from_float": lambda context: "a whole number",
    "float_type": lambda context: "a number",
    "finite_number": lambda context: "a finite number",
    "bool_type": lambda context: "true or false",
    "string_type": lambda context: "text",
    "list_type": lambda context: "a list",
    "dict_type": lambda context: "a mapping",
    "model_type": lambda context: "a mapping",
    "model_attributes_type": lambda context: "a mapping",
}


def _translate(model: type[Block], problems: Problems, detail: ErrorDetails) -> None:
    """Record an error of pydantic in our words."""
    location = _keys(model, detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    key = str(location[-1]) if location else ""
    if kind == "extra_forbidden":
        problems.add(location, f"there is no key {key!r}{_suggestion(model, location[:-1], key)}")
    elif kind == "missing":
        problems.add(location, "this key is missing")
    elif kind == "value_error":
        problems.add(location, str(context.get("error", detail["msg"])))
    elif kind == "literal_error":
        allowed = [word.strip("'") for word in str(context["expected"]).split(" or ")]
        allowed = [word.strip("' ") for part in allowed for word in part.split(",")]
        value = detail["input"]
        close = did_you_mean(value, allowed) if isinstance(value, str) else ""
        close = close if close.startswith("; did") else ""
        problems.add(
            location, f"must be {' or '.join(allowed)}, not {_shown(detail['input'])}{close}"
        )
    elif kind in _ALLOWED:
        problems.add(location, f"must be {_ALLOWED[kind](context)}, not {_shown(detail['input'])}")
    else:
        problems.add(location, f"{detail['msg']} (it is {_shown(detail['input'])})")


def _keys(model: type[Block], location: tuple[str | int, ...]) -> list[str | int]:
    """The keys of the document in pydantic's place of a mistake.

    Behind the key of a value that may be of several types, pydantic names the one that it tried.
    """
    keys: list[str | int] = []
    block: type[Block] | None = model
    tried = False
    for part in location:
        if not tried and part != "[key]":
            keys.append(part)
        annotation = None
        if block is not None and part in block.model_fields:
            annotation = block.model_fields[str(part)].annotation
            block = model_in(annotation)
        tried = len([kind for kind in _kinds(annotation) if kind is not type(None)]) > 1
    return keys


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ()


def _suggestion(root: type[Block], parents: list[str | int], key: str) -> str:
    model: type[Block] | None = root
    for part in parents:
        info = model.model_fields.get(str(part)) if model else None
        model = model_in(info.annotation) if info else None
    here = list(model.model_fields) if model else []
    close = did_you_mean(key, here)
    if close.startswith("; did"):
        return close
    places = [
        f"{prefix}.{key}" for prefix, block in blocks(root) if prefix and key in block.model_fields
    ]
    if places:
        return f"; it belongs to {' or '.join(places)}"
    return close


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
