"""The arguments that a Python script takes, found in its source, which is never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SWITCHES = {"store_true", "store_false", "store_const", "append_const", "count", "help", "version"}
_CLICK = {"option", "argument", "Option", "Argument"}


@dataclass(frozen=True)
class Argument:
    """One argument of a script.

    Attributes:
        flag: how it is written on the command line; empty where only its place counts.
        name: a parameter's name for it.
        default: the default, where it is written out as a number or text; else None.
        required: whether the script asks for it.
        switch: whether it takes no value.
    """

    flag: str
    name: str
    default: Any = None
    required: bool = False
    switch: bool = False


def script_arguments(path: Path) -> list[Argument]:
    """The arguments that a script gives to argparse or click, in their order.

    Args:
        path: the script. One that is not Python, or that cannot be parsed, has none.
    """
    if path.suffix != ".py":
        return []
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: dict[str, Argument] = {}
    for argument in _found(tree):
        found.setdefault(argument.name, argument)
    return list(found.values())


def parameter_name(flag: str) -> str:
    """The name of a parameter for a flag: ``learning_rate`` for ``--learning-rate``."""
    return flag.lstrip("-").replace("-", "_")


def _found(tree: ast.AST) -> Iterator[Argument]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        function = call.func
        called = (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        if called != "add_argument" and called not in _CLICK:
            continue
        names = [text for part in call.args if isinstance(text := _literal(part), str) and text]
        keywords = {word.arg: word.value for word in call.keywords if word.arg}
        if names:
            yield _argument(names, keywords)


def _argument(names: list[str], keywords: dict[str, ast.expr]) -> Argument:
    given = {name: _literal(value) for name, value in keywords.items()}
    default = given.get("default")
    if not isinstance(default, (int, float, str)):
        default = None
    flags = [name for name in names if name.startswith("-")]
    if not flags:
        optional = given.get("nargs") in ("?", "*") or given.get("required") is False
        required = not optional and "default" not in keywords
        return Argument("", parameter_name(names[0]), default, required)
    flag = max(flags, key=lambda name: (name.startswith("--"), len(name)))
    action = keywords.get("action")
    switch = (
        given.get("action") in _SWITCHES
        or (action is not None and "BooleanOptionalAction" in ast.dump(action))
        or any(given.get(name) is True for name in ("is_flag", "count"))
        or "/" in flag
    )
    flag = flag.partition("/")[0].strip()
    required = given.get("required") is True
    return Argument(flag, parameter_name(flag), default, required, switch)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
