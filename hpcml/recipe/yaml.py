"""Reading YAML strictly: what a person sees in the file is what the program gets.

Scalars follow YAML 1.2 (``1e-4`` is a number, ``no`` and ``04:00:00`` are text), a key given twice
is an error, and every value remembers its line. Built on PyYAML's node tree, because only nodes
know where they come from.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from hpcml.errors import UserError
from hpcml.recipe.memory import no_collection
from hpcml.recipe.problems import KeyPath

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_STR = "tag:yaml.org,2002:str"
_INT = "tag:yaml.org,2002:int"
_FLOAT = "tag:yaml.org,2002:float"
_BOOL = "tag:yaml.org,2002:bool"
_NULL = "tag:yaml.org,2002:null"
_MAP = "tag:yaml.org,2002:map"
_SEQ = "tag:yaml.org,2002:seq"

# Numbers with leading zeros stay text: YAML versions disagree about them.
_INT_FORM = re.compile(r"[-+]?(?:0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT_FORM = re.compile(
    r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_SCALAR_FORMS = (
    (_NULL, re.compile(r"~|null|Null|NULL|")),
    (_BOOL, re.compile(r"true|True|TRUE|false|False|FALSE")),
    (_INT, _INT_FORM),
    (_FLOAT, _FLOAT_FORM),
)

_MAX_DEPTH = 100
_MAX_REPEATED = 100_000  # values that may come from aliases; a few lines can stand for billions
_MAX_DIGITS = 4000  # CPython refuses to convert longer texts to an int


@lru_cache(maxsize=10_000)  # a long file has the same few keys again and again
def _plain_tag(value: str) -> str:
    for tag, form in _SCALAR_FORMS:
        if form.fullmatch(value):
            return tag
    return _STR


def is_text(value: str) -> bool:
    """Whether a scalar without quotes is text, and not a number, a boolean or null."""
    return _plain_tag(value) == _STR


class _Loader(_BaseLoader):  # type: ignore[misc]
    """A loader that only composes nodes, with the scalar rules above instead of YAML 1.1's."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own attribute)

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        if kind is ScalarNode and implicit[0]:
            return _plain_tag(value)
        return {ScalarNode: _STR, SequenceNode: _SEQ}.get(kind, _MAP)


class Document:
    """A mapping read from YAML, whose values know where they were written.

    Attributes:
        path: the file, as it was given.
        text: the file's text, without the overrides.
        data: the content as dict, list, str, int, float, bool and None.
    """

    def __init__(self, path: Path, text: str, root: MappingNode) -> None:
        self.path = path
        self.text = text
        self._root = root
        self.data: dict[str, Any] = _Construction(root).data

    def where(self, key_path: str | KeyPath) -> str:
        """Return ``file:line`` of a key, or of the nearest parent that exists.

        Args:
            key_path: keys and list indices from the top, or a text with dots. Parts that the
                file doesn't have are passed over.
        """
        _, mark = self._locate(_split(key_path))
        return _place(mark, column=False)

    def key_of(self, key_path: KeyPath) -> str:
        """Return the key path as people write it: ``sweep.points.0.seed``."""
        path, _ = self._locate(key_path)
        return ".".join(str(part) for part in path)

    def as_written(self, key_path: KeyPath) -> str | None:
        """Return the text of a scalar as it is in the file (``1.10``, not 1.1).

        None if the value is null, not a scalar, or not there.
        """
        node: Node | None = self._root
        for part in key_path:
            node = _child(node, part)[1]
        if not isinstance(node, ScalarNode) or node.tag == _NULL:
            return None
        return str(node.value)

    def override(self, settings: Iterable[str]) -> Document:
        """Return this document with ``key=value`` settings applied, the later over the earlier.

        The key is dotted and may reach any depth; the value follows the rules of this module for
        scalars, ``[…]`` and ``{…}``. What is not YAML of another type is text, unchanged.

        Raises:
            UserError: a setting without ``=``, or a key below something that has no keys.
        """
        root = self._root
        for setting in settings:
            key, separator, text = setting.partition("=")
            key = key.strip()
            if not _is_unicode(setting):
                raise UserError(f"--set {key}: this is not UTF-8; is the terminal set to UTF-8?")
            if not separator or not key or not all(key.split(".")):
                raise UserError(
                    f"--set {setting}: this is not a setting; write key=value with the key in "
                    "dots, for example --set params.learning_rate=3e-4"
                )
            name = f"--set {key}"
            root = _replaced(root, key, key.split("."), _setting_node(text, name), name)
        return Document(self.path, self.text, root)

    def stage(self, name: str, shared: Iterable[str]) -> Document:
        """Return the mapping ``stages.<name>`` as a document of its own.

        Args:
            name: the stage.
            shared: keys of this document that it gets unless it has them itself. It is called
                ``<name of this document>.<name>``.
        """
        stages = _child(self._root, "stages")[1]
        node = _child(stages, name)[1]
        assert isinstance(node, MappingNode)
        own = {key.value for key, _ in node.value}
        pairs = [pair for pair in self._root.value if pair[0].value in set(shared) - own]
        for key, value in self._root.value:
            if key.value == "name" and isinstance(value, ScalarNode):
                called = ScalarNode(_STR, f"{value.value}.{name}", value.start_mark, value.end_mark)
                pairs.append((key, called))
        merged = [*pairs, *node.value]
        root = MappingNode(_MAP, merged, node.start_mark, node.end_mark)
        return Document(self.path, self.text, root)

    def _locate(self, key_path: KeyPath) -> tuple[list[str | int], Any]:
        """Return the part of the path that exists, plus a last part that doesn't, and a mark."""
        found: list[str | int] = []
        node: Node = self._root
        mark = node.start_mark
        for position, part in enumerate(key_path):
            key, child = _child(node, part)
            if child is None:
                # Validators number the alternatives of a union; such numbers are no keys.
                if isinstance(part, str) and position == len(key_path) - 1:
                    found.append(part)
                continue
            found.append(part)
            mark = key.start_mark if key is not None else child.start_mark
            if child.start_mark.name != mark.name:  # the value came from --set
                mark = child.start_mark
            node = child
        return found, mark


@no_collection()
def load_yaml(path: str | os.PathLike[str]) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        UserError: the file can't be read or isn't UTF-8, or its YAML is wrong: bad syntax, a key
            given twice, an unknown tag, a merge key, an alias to its own parent, or aliases that
            expand to more than 100,000 values. The message has file, line and column.
    """
    path = Path(path)
    text = _read(path)
    node = _compose(text, str(path))
    if node is None:
        raise UserError(f"{path}:1: the file is empty; a mapping (key: value) is expected")
    if not isinstance(node, MappingNode):
        raise UserError(
            f"{_place(node.start_mark)}: the top level must be a mapping (key: value), "
            f"not {_kind(node)}"
        )
    return Document(path, text, node)


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: this is a folder, not a YAML file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: the file can't be read: {reason}") from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise UserError(
            f"{path}:{line}:{column}: the file is not UTF-8 (byte {raw[error.start]:#04x}); "
            "save it as UTF-8"
        ) from None


def _compose(text: str, name: str) -> Node | None:
    stream = io.StringIO(text)
    stream.name = name  # libyaml takes the name for its marks from here
    loader = _Loader(stream)
    try:
        node: Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{_place(mark, name)}: {_syntax_message(error, text)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise UserError(
            f"{name}:{line}: a character is not allowed in YAML: {error.reason}; "
            'write it as an escape in double quotes, for example "\\e"'
        ) from None
    except RecursionError:
        raise UserError(f"{name}: the values are nested too deeply") from None
    finally:
        loader.dispose()
    return node


def _syntax_message(error: yaml.MarkedYAMLError, text: str) -> str:
    problem = str(error.problem)
    mark = error.problem_mark
    if mark is not None:
        lines = text.splitlines()
        line = lines[mark.line] if mark.line < len(lines) else ""
        if "\t" in line[: mark.column + 1] and ("token" in problem or "tab" in problem):
            return "there is a tab; YAML takes only spaces as indentation"
    if "single document" in str(error.context) or "another document" in problem:
        return "a second document begins here (---); only one is allowed"
    if "undefined alias" in problem or "duplicate anchor" in problem:
        return f"{problem}; an alias (*name) needs exactly one anchor (&name) before it"
    hint = ""
    if "mapping values are not allowed" in problem or "cannot start any token" in problem:
        hint = "; put the value in quotes if it is text"
    if error.context and error.context_mark is not None:
        place = f" (line {error.context_mark.line + 1})"
        return f"this is not valid YAML: {error.context}{place}: {problem}{hint}"
    return f"this is not valid YAML: {problem}{hint}"


class _Construction:
    """Turns nodes into plain values, once, with all checks that YAML itself doesn't make."""

    def __init__(self, root: MappingNode) -> None:
        self._open: set[int] = set()
        self._seen: set[int] = set()
        self._repeated = 0
        self.data: dict[str, Any] = self._value(root)

    def _value(self, node: Node) -> Any:
        identity = id(node)
        if identity in self._open:
            raise UserError(f"{_place(node.start_mark)}: this value contains itself by an alias")
        if identity in self._seen:
            self._repeated += 1
            if self._repeated > _MAX_REPEATED:
                raise UserError(
                    f"{_place(node.start_mark)}: the aliases expand to more than "
                    f"{_MAX_REPEATED:,} values"
                )
        self._seen.add(identity)
        if isinstance(node, ScalarNode):
            return _scalar(node)
        if len(self._open) >= _MAX_DEPTH:
            raise UserError(
                f"{_place(node.start_mark)}: the values are nested more than {_MAX_DEPTH} deep"
            )
        self._open.add(identity)
        value = self._sequence(node) if isinstance(node, SequenceNode) else self._mapping(node)
        self._open.remove(identity)
        return value

    def _sequence(self, node: Node) -> list[Any]:
        if node.tag != _SEQ:
            raise _tag_error(node)
        return [self._value(item) for item in node.value]

    def _mapping(self, node: Node) -> dict[str, Any]:
        if node.tag != _MAP:
            raise _tag_error(node)
        data: dict[str, Any] = {}
        first: dict[str, Node] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise UserError(
                    f"{_place(key_node.start_mark)}: a key must be text, not {_kind(key_node)}; "
                    "a value that begins with {{ must be in quotes"
                )
            # Keys are text as they are written, so that `on`, `1` and `null` are names.
            key = _text(key_node)
            if not key.isprintable():
                raise UserError(
                    f"{_place(key_node.start_mark)}: the key {key!r} has a character that cannot "
                    "be shown"
                )
            if key == "<<" and not key_node.style:
                raise UserError(
                    f"{_place(key_node.start_mark)}: merge keys (<<) are not part of YAML 1.2; "
                    "write the keys out"
                )
            if key in data:
                raise UserError(
                    f"{_place(key_node.start_mark)}: the key {key!r} is given twice; the first "
                    f"one is in line {first[key].start_mark.line + 1}"
                )
            first[key] = key_node
            data[key] = self._value(value_node)
        return data


def _scalar(node: ScalarNode) -> Any:
    text = _text(node)
    if node.tag == _STR:
        return text
    if node.tag == _NULL and _SCALAR_FORMS[0][1].fullmatch(text):
        return None
    if node.tag == _BOOL and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if node.tag == _INT and _INT_FORM.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise UserError(f"{_place(node.start_mark)}: the number has {len(text)} digits")
        return int(text, 0)
    if node.tag == _FLOAT and _FLOAT_FORM.fullmatch(text):
        word = text.lower().lstrip("+-")
        if word in (".inf", ".nan"):
            return float(text.lower().replace(".", ""))
        number = float(text)
        if math.isinf(number):
            raise UserError(f"{_place(node.start_mark)}: the number {text} is too large")
        return number
    raise _tag_error(node)


def _text(node: ScalarNode) -> str:
    text = str(node.value)
    if not _is_unicode(text):
        raise UserError(f"{_place(node.start_mark)}: the text is not valid Unicode; use UTF-8")
    if "\0" in text:
        raise UserError(f"{_place(node.start_mark)}: a NUL character can't be passed to a program")
    return text


def _is_unicode(text: str) -> bool:
    """Whether it has a UTF-8 form, which lone surrogates have not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _tag_error(node: Node) -> UserError:
    tag = str(node.tag).replace("tag:yaml.org,2002:", "!!")
    if tag in ("!!str", "!!int", "!!float", "!!bool", "!!null", "!!seq", "!!map"):
        return UserError(f"{_place(node.start_mark)}: the value does not fit its tag {tag}")
    return UserError(
        f"{_place(node.start_mark)}: the tag {tag} is not allowed; recipes and sites are plain data"
    )


def _kind(node: Node) -> str:
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    return "a single value"


def _place(mark: Any, name: str | None = None, *, column: bool = True) -> str:
    if mark is None:
        return name or "?"
    source = name or str(mark.name)
    if source.startswith("--set "):
        return source
    place = f"{source}:{mark.line + 1}"
    return f"{place}:{mark.column + 1}" if column else place


def _split(key_path: str | KeyPath) -> KeyPath:
    if isinstance(key_path, str):
        return [int(part) if part.isdigit() else part for part in key_path.split(".") if part]
    return key_path


def _child(node: Node | None, part: str | int) -> tuple[Node | None, Node | None]:
    """Return the key node (None in a list) and the value node of a part, or two Nones."""
    if isinstance(node, MappingNode):
        for key, value in node.value:
            if key.value == str(part):
                return key, value
    elif isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return None, node.value[part]
    return None, None


def _setting_node(text: str, name: str) -> Node:
    """Compose the value of a setting; whatever is not YAML of another type is the text itself."""
    mark = yaml.Mark(name, 0, 0, 0, None, 0)
    plain = ScalarNode(_STR, text, mark, mark)
    if text.lstrip().startswith("{{"):  # a template, which YAML would read as nested mappings
        return plain
    try:
        node = _compose(text, name)
    except UserError:
        return plain
    if isinstance(node, ScalarNode):
        quoted = node.style in ("'", '"') and text.strip()[:1] == node.style
        same = not node.style and node.tag != _STR and node.value == text.strip()
        return _marked(node, mark) if text and (quoted or same) else plain
    if isinstance(node, (SequenceNode, MappingNode)) and node.flow_style:
        return _marked(node, mark)
    return plain


def _marked(node: Node, mark: Any) -> Node:
    node.start_mark = mark
    return node


def _replaced(node: MappingNode, key: str, parts: list[str], value: Node, name: str) -> MappingNode:
    """Return a copy of ``node`` with the value at ``parts`` replaced; other nodes are shared."""
    mark = value.start_mark
    pairs = list(node.value)
    # A parameter may be written as one key with dots, or nested.
    heads = [".".join(parts[: count + 1]) for count in range(len(parts) - 1, -1, -1)]
    position = next(
        (
            (index, head)
            for head in heads
            for index, (key_node, _) in enumerate(pairs)
            if key_node.value == head
        ),
        None,
    )
    if position is None:
        for part in reversed(parts[1:]):
            value = MappingNode(_MAP, [(ScalarNode(_STR, part, mark, mark), value)], mark, mark)
        pairs.append((ScalarNode(_STR, parts[0], mark, mark), value))
    else:
        index, head = position
        key_node, old = pairs[index]
        rest = parts[head.count(".") + 1 :]
        if rest:
            value = _replaced_below(old, key, rest, value, name)
        pairs[index] = (key_node, value)
    return MappingNode(node.tag, pairs, node.start_mark, node.end_mark, node.flow_style)


def _replaced_below(old: Node, key: str, rest: list[str], value: Node, name: str) -> Node:
    mark = value.start_mark
    if isinstance(old, ScalarNode) and old.tag == _NULL:
        old = MappingNode(_MAP, [], mark, mark)
    if isinstance(old, MappingNode):
        return _replaced(old, key, rest, value, name)
    if isinstance(old, SequenceNode) and rest[0].isdigit() and int(rest[0]) < len(old.value):
        items = list(old.value)
        index = int(rest[0])
        items[index] = (
            _replaced_below(items[index], key, rest[1:], value, name) if rest[1:] else value
        )
        return SequenceNode(old.tag, items, old.start_mark, old.end_mark, old.flow_style)
    done = key.split(".")[: -len(rest)]
    raise UserError(
        f"{name}: {'.'.join(done)} is {_kind(old)} ({_place(old.start_mark, column=False)}), "
        f"which has no key {rest[0]!r}"
    )
