"""Jinja environments whose output is quoted by default.

A template author cannot forget to quote: whatever a ``{{ expression }}`` gives becomes one word
of shell, or one JSON value in YAML. Text that is code by intent must be of the type `Trusted`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from hpcml import resources


class Trusted(str):
    """Text that goes into a script as it is: hpcml's own, or a site's."""

    __slots__ = ()

    def __html__(self) -> str:
        # Jinja's protocol for "already escaped"; results of blocks and of super() have it too.
        return self


class QuotingError(ValueError):
    """A value that cannot be written in the language of the template."""


def shell_quote(value: Any) -> Any:
    """``value`` as shell words: a list as several, anything else as exactly one."""
    if isinstance(value, jinja2.Undefined) or hasattr(value, "__html__"):
        return value
    if isinstance(value, (list, tuple)):
        return Trusted(" ".join(shell_quote(item) for item in value))
    if value is None or isinstance(value, (bool, dict, set)):
        raise QuotingError(f"{value!r} is no word of a shell script")
    text = str(value)
    if "\0" in text:
        raise QuotingError(f"{text!r} holds a NUL, which no shell word can hold")
    return Trusted(shlex.quote(text))


# What JSON allows in a string and YAML does not, or folds into a line break.
_NOT_IN_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def yaml_quote(value: Any) -> Any:
    """``value`` as a JSON value that is the same value in YAML."""
    if isinstance(value, jinja2.Undefined) or hasattr(value, "__html__"):
        return value
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return Trusted(_NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def one_line(value: Any) -> Trusted:
    """``value`` for a comment or a directive, where only the end of the line ends it.

    Raises:
        QuotingError: it holds a line break or a NUL.
    """
    text = str(value)
    if re.search("[\0\r\n\x0b\x0c\x85\u2028\u2029]", text):
        raise QuotingError(f"{text!r} must be a single line")
    return Trusted(text)


def directive(value: Any) -> Trusted:
    """``value`` for an option in an ``#SBATCH`` line, which sbatch splits much like a shell.

    Raises:
        QuotingError: it holds a line break or a NUL.
    """
    return Trusted(shlex.quote(one_line(value)))


def shell_environment(override: Path | None = None) -> jinja2.Environment:
    """The environment for batch scripts.

    Args:
        override: a site's own template; its folder is searched before hpcml's.
    """
    return _environment(shell_quote, override)


def yaml_environment(override: Path | None = None) -> jinja2.Environment:
    """The environment for YAML manifests; ``override`` as in :func:`shell_environment`."""
    return _environment(yaml_quote, override)


@lru_cache(maxsize=8)  # which keeps templates compiled: a script is rendered more than once
def _environment(quote: Callable[[Any], Any], override: Path | None) -> jinja2.Environment:
    folders: Sequence[Path] = [resources.folder("templates")]
    if override is not None:
        folders = [override.parent, *folders]

    @jinja2.pass_context  # which keeps Jinja from taking constants as quoted already
    def finalize(context: jinja2.runtime.Context, value: Any) -> Any:
        return quote(value)

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        # Makes blocks and super() give marked text, which `quote` leaves alone.
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["trusted"] = Trusted
    environment.filters["one_line"] = one_line
    environment.filters["directive"] = directive
    return environment
