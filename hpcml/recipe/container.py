"""Folders that a container sees, and names of images, as recipes and sites write them."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

_PATH = r"((?:\\:|[^:])+)"
_BIND = re.compile(rf"{_PATH}(?::{_PATH})?(?::(ro|rw))?", re.DOTALL)
_CONTROL = re.compile(r"[\0-\x1f\x7f]")


class Bind(NamedTuple):
    """A folder or file of the host, and where a container sees it."""

    source: str
    destination: str
    read_only: bool = False


def parse_bind(text: str) -> Bind:
    r"""Read ``source[:destination[:ro]]``, where ``\:`` is a colon that belongs to a path.

    Raises:
        ValueError: it has another form, or a path isn't absolute.
    """
    found = _BIND.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not source, source:destination or source:destination:ro; "
            r"a colon in a path is written \:"
        )
    source, destination = (part and part.replace("\\:", ":") for part in found.groups()[:2])
    destination = destination or source
    for path in (source, destination):
        if not path.startswith("/"):
            raise ValueError(
                f"{path!r} is not an absolute path; it is source, source:destination or "
                "source:destination:ro"
            )
        if _CONTROL.search(path):
            raise ValueError(f"{path!r} has a control character, which no container can be told")
    return Bind(source, destination, found[3] == "ro")


def _bind(text: str) -> str:
    parse_bind(text)
    return text


def _expanded_later(text: str) -> str:
    parse_bind(re.sub(r"\$(\w+|\{\w+\})", "/", text))
    return text


def _image(text: str) -> str:
    if "{{" in text:
        raise ValueError("all cells have the same image, so there can be no {{ }} in it")
    if text != text.strip() or not text or _CONTROL.search(text):
        raise ValueError(f"{text!r} is not the name of an image")
    return text


BindText = Annotated[str, AfterValidator(_bind)]
SiteBindText = Annotated[str, AfterValidator(_expanded_later)]
"""A bind whose paths may have ``$VARIABLES``."""
ImageName = Annotated[str, AfterValidator(_image)]
