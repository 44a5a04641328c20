"""The expressions of a recipe: ``{{ … }}`` in its texts, and conditions of a sweep.

Expressions are those of Jinja's sandbox, without calls and without the filters that can be made to
run or grow for ever, so that a recipe from a stranger can be looked at safely. Only ``{{ … }}`` is
special in a text; everything else in it, and every value that is put in, stays as it is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcml.recipe.problems import did_you_mean
from hpcml.recipe.stages import Reference, Stages, Unknown, is_token

_HOLE = re.compile(r"\{\{((?:\"[^\"]*\"|'[^']*'|[^\"'}]|\}(?!\}))*)\}\}")
_PLAIN = re.compile(r"\s*params((?:\.[A-Za-z_][A-Za-z0-9_]*)+)\s*")
_MAX_EXPRESSION = 2000
_MAX_EXPONENT = 1024
_FILTERS = (
    "abs", "capitalize", "d", "default", "first", "float", "int", "join", "last", "length",
    "list", "lower", "max", "min", "replace", "round", "sort", "sum", "title", "trim", "unique",
    "upper",
)  # fmt: skip
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TemplateError,
    TypeError,
    ValueError,
)


class ExpressionError(ValueError):
    """An expression that is wrong, or can't be evaluated; the message is for a person."""


class Parameters(dict[str, Any]):
    """Parameters as expressions see them: nested, by attribute, and by their other names."""

    def __init__(self, flat: Mapping[str, Any], aliases: Mapping[str, str] | None = None) -> None:
        super().__init__(nested({name: _known(value) for name, value in flat.items()}))
        self._aliases = aliases or {}

    def __missing__(self, key: str) -> Any:
        return self[self._aliases[key]]


def _known(value: Any) -> Any:
    return Unknown(value) if is_token(value) else value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"a": {"b": 1}}`` for ``{"a.b": 1}``."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        branch = tree
        for part in parents:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def text_of(value: Any) -> str:
    """Return a parameter's value as text: what a program gets as its argument.

    Text stays as it is, a float is written so that reading it gives the same float, ``true`` and
    ``false`` and ``null`` are as in YAML, lists and mappings are JSON.
    """
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return repr(value)
    if value is None or isinstance(value, (bool, int, list, tuple, dict)):
        try:
            return _encode(value)
        except (TypeError, ValueError):
            pass
    if isinstance(value, (Reference, Unknown)):
        try:
            return value.token
        except ValueError as error:
            raise ExpressionError(str(error)) from None
    raise ExpressionError(f"the result is {type(value).__name__}, not text, a number or a list")


_encode = json.JSONEncoder(ensure_ascii=False).encode


class Template:
    """A text with ``{{ … }}`` in it.

    Raises:
        ExpressionError: an expression in it is not valid.
    """

    def __init__(self, text: str) -> None:
        self._parts: list[str | Callable[[Mapping[str, Any]], Any]] = []
        end = 0
        for hole in _HOLE.finditer(text):
            self._parts.append(self._literal(text[end : hole.start()]))
            self._parts.append(_evaluator(hole[1]))
            end = hole.end()
        self._parts.append(self._literal(text[end:]))
        self.names: frozenset[str] | None = _union(_names(hole[1]) for hole in _HOLE.finditer(text))
        """The parameters it uses, by the first part of their names; None if it can't be told."""

    @staticmethod
    def _literal(text: str) -> str:
        if "{{" in text:
            raise ExpressionError("{{ without }}; write {{ params.name }}, or {{ '{{' }} for {{")
        return text

    @property
    def constant(self) -> bool:
        """Whether the text has no expression in it."""
        return len(self._parts) == 1

    def render(self, context: Mapping[str, Any]) -> str:
        """Return the text with the values of ``context`` (``params``, ``cell``, ``stages``) put in.

        Raises:
            ExpressionError: a name is not known, or the expression fails.
        """
        return "".join(
            part if isinstance(part, str) else text_of(part(context)) for part in self._parts
        )


class Condition:
    """An expression that is true or false.

    Raises:
        ExpressionError: the expression is not valid.
    """

    def __init__(self, text: str) -> None:
        if "{{" in text:
            raise ExpressionError("a condition is an expression already; leave {{ }} out")
        self._evaluate = _evaluator(text)
        self.names = _names(text)
        """The parameters it uses, by the first part of their names; None if it can't be told."""

    def holds(self, context: Mapping[str, Any]) -> bool:
        """Return whether the condition is true.

        Raises:
            ExpressionError: a name is not known, or the expression fails or gives no boolean.
        """
        value = self._evaluate(context)
        if not isinstance(value, bool):
            raise ExpressionError(
                f"the condition gives {text_of(value)!r}, not true or false; write a comparison"
            )
        return value


class _Undefined(StrictUndefined):
    """Says which names exist when one doesn't."""

    @property
    def _undefined_message(self) -> str:
        name = str(self._undefined_name)
        owner = self._undefined_obj
        if isinstance(owner, Stages):
            return f"this stage needs no stage {name!r}{did_you_mean(name, owner)}"
        if isinstance(owner, Reference):
            return f"a stage's result has no part {name!r}{did_you_mean(name, owner)}"
        if isinstance(owner, Mapping):
            return f"there is no parameter {name!r}{did_you_mean(name, map(str, owner))}"
        if self._undefined_hint:
            return str(self._undefined_hint)
        return f"{name!r} is not known; write params.{name} for a parameter"


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"**", "*", "%"})

    def __init__(self) -> None:
        # Not optimized: what the optimizer computes becomes code by its repr, and that of infinity
        # is none.
        super().__init__(undefined=_Undefined, optimized=False)
        self.globals.clear()
        self.filters = {name: self.filters[name] for name in _FILTERS}
        self.filters["json"] = _encode
        self.filters["string"] = text_of

    def getattr(self, obj: Any, attribute: str) -> Any:
        # Of a mapping only the keys: a parameter may be called `items`, and methods are not needed.
        if isinstance(obj, Mapping):
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if isinstance(obj, _Undefined):
            return obj  # what is wrong is the part before
        return self.undefined(f"a value has no part {attribute!r}", name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        try:
            return obj[argument]
        except (KeyError, TypeError, AttributeError, IndexError):
            return self.undefined(obj=obj, name=argument)

    def is_safe_callable(self, obj: Any) -> bool:
        return False

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
            raise SecurityError(f"{operator} works on numbers only")
        if operator == "**" and (abs(right) > _MAX_EXPONENT or abs(left) > 2**64):
            raise SecurityError(f"{left} ** {right} is too large")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=1)
def _sandbox() -> _Sandbox:
    return _Sandbox()


@lru_cache(maxsize=4096)
def _evaluator(expression: str) -> Callable[[Mapping[str, Any]], Any]:
    if match := _PLAIN.fullmatch(expression):
        # The usual case by far, and a sweep has many cells.
        return _lookup(tuple(match[1][1:].split(".")))
    if len(expression) > _MAX_EXPRESSION:
        raise ExpressionError(f"the expression is longer than {_MAX_EXPRESSION} characters")
    shown = expression.strip()
    try:
        _check(_sandbox().parse("{{" + expression + "}}"), shown)
        compiled = _sandbox().compile_expression(expression, undefined_to_none=False)
    except TemplateSyntaxError as error:
        raise ExpressionError(f"{shown!r} is not an expression: {error.message}") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        if isinstance(error, ExpressionError):
            raise
        raise ExpressionError(f"{shown!r} is too complicated") from None

    def evaluate(context: Mapping[str, Any]) -> Any:
        try:
            value = compiled(context)
            if isinstance(value, _Undefined):
                str(value)  # raises, with the names that exist
        except UndefinedError as error:
            raise ExpressionError(f"in {shown!r}: {error.message}") from None
        except _FAILURES as error:
            raise ExpressionError(f"{shown!r} fails: {error}") from None
        return value

    return evaluate


def _lookup(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Any]:
    def evaluate(context: Mapping[str, Any]) -> Any:
        value: Any = context["params"]
        for name in names:
            try:
                value = value[name]
            except KeyError:
                raise ExpressionError(
                    f"there is no parameter {name!r}{did_you_mean(name, value)}"
                ) from None
            except (TypeError, IndexError):
                raise ExpressionError(
                    f"params.{'.'.join(names)}: {text_of(value)!r} has no part {name!r}"
                ) from None
        return value

    return evaluate


_NAMES = ("params", "cell", "stages", "halving")


def _check(tree: nodes.Template, shown: str) -> None:
    """Refuse what an expression can't have; such things would fail only when a cell needs them."""
    for node in _walk(tree):
        if isinstance(node, nodes.Const) and _endless(node.value):
            raise ExpressionError(f"{shown!r}: a number in it is too large")
        if isinstance(node, nodes.Call):
            raise ExpressionError(
                f"{shown!r}: nothing can be called in a recipe; use a filter, such as | upper"
            )
        if isinstance(node, nodes.Filter) and node.name not in _sandbox().filters:
            raise ExpressionError(
                f"{shown!r}: there is no filter {node.name!r}"
                f"{did_you_mean(node.name, sorted(_sandbox().filters))}"
            )
        if isinstance(node, nodes.Name) and node.name not in _NAMES:
            raise ExpressionError(
                f"{shown!r}: {node.name!r} is not known; write params.{node.name} for a "
                "parameter, and quotes around text"
            )


def _endless(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _names(expression: str) -> frozenset[str] | None:
    tree = _sandbox().parse("{{" + expression + "}}")
    uses = sum(isinstance(node, nodes.Name) for node in _walk(tree))
    names = [
        node.attr
        for node in _walk(tree)
        if isinstance(node, nodes.Getattr)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "params"
    ]
    return frozenset(names) if len(names) == uses else None


def _union(parts: Iterable[frozenset[str] | None]) -> frozenset[str] | None:
    names: set[str] = set()
    for part in parts:
        if part is None:
            return None
        names |= part
    return frozenset(names)


def _walk(tree: nodes.Node) -> Iterable[nodes.Node]:
    pending: list[nodes.Node] = [tree]
    while pending:
        node = pending.pop()
        yield node
        children: Iterator[nodes.Node] = node.iter_child_nodes()
        pending.extend(children)
