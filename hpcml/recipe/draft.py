"""The text of a first recipe for a program of somebody's own."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcml.errors import UserError
from hpcml.recipe.arguments import Argument, parameter_name
from hpcml.recipe.yaml import is_text

_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")
_VALUE = re.compile(r'\s*(?:"((?:[^"]|"")*)"|((?!")[^,]*?))\s*(?:,|\Z)')
# A comma with a space goes on with the values, unless another name follows.
_SETTING = re.compile(r'(?:"[^"]*"|,\s*(?![\w.-]+=)|[^\s"])+')
_PLAIN = re.compile(r"[A-Za-z./][A-Za-z0-9_./-]*")
# Other readers of YAML, such as editors, take these for booleans.
_BOOLEANS = {"y", "n", "yes", "no", "on", "off"}
_LONGEST_NUMBER = 1000
_INTERPRETERS = {
    ".py": "python3",
    ".sh": "sh",
    ".bash": "bash",
    ".R": "Rscript",
    ".r": "Rscript",
    ".jl": "julia",
    ".pl": "perl",
}


@dataclass(frozen=True)
class Parameter:
    """A parameter of a draft.

    Attributes:
        flag: how the program takes it; empty where only its place counts.
        name: its name in the recipe.
        values: its values as YAML; more than one are swept.
    """

    flag: str
    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Draft:
    """What is known of a first recipe.

    Attributes:
        script: the program, relative to the recipe's folder.
        parameters: what is given to it.
        arguments: what it takes, as far as that is known.
        needs: keys of ``resources`` with their values as YAML.
        metric: what cells are ranked by, if that is known.
        mode: ``min`` or ``max``.
        schema: the JSON Schema of recipes, for editors.
    """

    script: str
    parameters: Sequence[Parameter]
    arguments: Sequence[Argument] = ()
    needs: Mapping[str, str] = field(default_factory=dict)
    metric: str | None = None
    mode: str = "min"
    schema: str = ""


def recipe_name(script: str) -> str:
    """A recipe's name for a script."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(script).stem).strip("._-")
    return name[:64] or "sweep"


def interpreter(script: str) -> str | None:
    """What runs a script, as its name ends; None where it runs by itself."""
    return _INTERPRETERS.get(Path(script).suffix)


def settings(answer: str) -> list[str]:
    """``name=value,value`` of an answer in which spaces divide them.

    Raises:
        UserError: a quote has no end.
    """
    if answer.count('"') % 2:
        raise UserError('a " is not closed; write name="a, b",c')
    return [found[0].strip().rstrip(",") for found in _SETTING.finditer(answer)]


def parameter(setting: str, arguments: Sequence[Argument]) -> Parameter:
    """A parameter of ``name=value,value``.

    Values are as in a recipe: ``1e-4`` is a number, ``no`` is text. One that stands in double
    quotes is text whatever it is; ``""`` in it is one quote.

    Raises:
        UserError: this is none, or the script takes it without a value.
    """
    given, equals, text = setting.partition("=")
    given = given.strip()
    name = parameter_name(given)
    if not equals or not given or not _PARAMETER.fullmatch(name):
        raise UserError(f"{setting!r} is not a parameter; write name=value,value such as lr=0.1,1")
    argument = next((each for each in arguments if each.name == name), None)
    if argument is not None and argument.switch:
        raise UserError(
            f"{argument.flag} takes no value; put it into command.run of the recipe by hand"
        )
    flag = argument.flag if argument else given if given[:1] == "-" else f"--{given}"
    values = tuple(_values(name, text))
    if len(set(values)) < len(values):
        raise UserError(f"{name}: a value is given twice")
    return Parameter(flag, name, values)


def _values(name: str, text: str) -> list[str]:
    values, position = [], 0
    while True:
        found = _VALUE.match(text, position)
        if found is None:
            raise UserError(
                f"{name}: cannot tell the values of {text!r}; put text in double quotes"
            )
        quoted, plain = found.groups()
        if quoted is None and not plain:
            raise UserError(f'{name}: a value is missing; an empty text is ""')
        values.append(in_yaml(plain) if quoted is None else _quoted(quoted.replace('""', '"')))
        position = found.end()
        if position == len(text) and not found[0].endswith(","):
            return values


def in_yaml(value: str) -> str:
    """What stands for a value that somebody typed: numbers as they are, text quoted if needed."""
    return _text(value) if is_text(value) or not _kept(value) else value


def _kept(value: str) -> bool:
    """Whether a number can be in a recipe; a program takes others, such as ``.inf``, as text."""
    if value.lower().lstrip("+-") in (".inf", ".nan"):
        return False
    try:
        return len(value) < _LONGEST_NUMBER and math.isfinite(float(value))
    except ValueError:  # true, null, 0x10
        return len(value) < _LONGEST_NUMBER


def _text(text: str) -> str:
    """A text, in quotes where another reader of YAML might take it for something else."""
    plain = _PLAIN.fullmatch(text) and is_text(text) and text.lower() not in _BOOLEANS
    return text if plain else _quoted(text)


def _quoted(text: str) -> str:
    """A text in double quotes, on one line."""
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"{text!r} cannot be an argument of a program, which is UTF-8 without NUL")
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if character.isprintable() else f"\\U{ord(character):08X}"


def _entry(text: str) -> str:
    """A text in which nothing is an expression, as an entry of ``command.run``."""
    return _text(text.replace("{{", "{{ '{{' }}"))


def draft_text(draft: Draft) -> str:
    """The recipe, with comments on what to change next."""
    script = Path(draft.script)
    name = recipe_name(draft.script)
    program = interpreter(draft.script)
    path = str(script) if program and not str(script).startswith("-") else f"./{script}"
    run = [program, _entry(path)] if program else [_entry(path)]
    for each in draft.parameters:
        value = f"{{{{ params.{each.name} }}}}"
        if each.flag and len(each.flag) > 2:
            run.append(_text(f"{each.flag}={value}"))
        else:
            run += [_text(each.flag), _text(value)] if each.flag else [_text(value)]
    fixed = [each for each in draft.parameters if len(each.values) == 1]
    swept = [each for each in draft.parameters if len(each.values) > 1]
    lines = [f"# yaml-language-server: $schema={draft.schema}"] if draft.schema else []
    lines += [
        "# What to run, over which parameters, and with which resources.",
        "# docs/recipe.md of hpcml explains the keys.",
        f"name: {_text(name)}",
        "kind: command",
        "",
        "# The same in all cells.",
        *(["params:"] if fixed else ["# params:", "#   name: value"]),
        *(f"  {_text(each.name)}: {each.values[0]}" for each in fixed),
    ]
    taken = {each.name for each in draft.parameters}
    others = [each for each in draft.arguments if each.name not in taken and not each.switch]
    if others:
        lines.append("# The script takes these as well; give one a place here and in command.run:")
        lines += [f"#   {_told(each)}" for each in others]
    lines += [
        "",
        "# What varies: a cell for every combination of the values.",
        *(["sweep:", "  grid:"] if swept else ["# sweep:", "#   grid:", "#     name: [1, 2]"]),
        *(f"    {_text(each.name)}: [{', '.join(each.values)}]" for each in swept),
        "",
        "# Each entry is one argument; no shell reads them. The program runs in a copy of this",
        "# folder (or git repository), and finds a folder that stays in $HPCML_CELL_DIR.",
        "command:",
        "  run:",
        *(f"    - {entry}" for entry in run),
        "",
        "# Results are ranked by a metric that the program reports. In Python, by one line,",
        "#   import hpcml; hpcml.report(step=step, total_steps=1000, loss=loss)",
        '# else by a line such as {"step": 3, "loss": 0.5} at the end of the file $HPCML_METRICS.',
        *(
            ["objective:", f"  metric: {_text(draft.metric)}", f"  mode: {draft.mode}"]
            if draft.metric is not None
            else ["# objective: {metric: loss, mode: min}"]
        ),
        "",
        "# What each cell needs. On a cluster, give a time as well, such as time: 4h.",
        "resources:",
        *(f"  {key}: {value}" for key, value in (draft.needs or {"cpus": "1"}).items()),
        "",
        "# To survive being stopped, the program saves its state in $HPCML_CELL_DIR when it gets",
        "# the signal USR1 (or when the file $HPCML_STOP_FILE appears), exits with code 75, and",
        "# goes on from the state when it starts again. A program that does not do so yet begins",
        "# anew when it is stopped.",
        "#",
        "# On a cluster with Slurm: `hpcml site detect --output site_configs/mycluster.yaml`, then",
        "# `hpcml sweep` with --site mycluster. Options of sbatch that only you need go here:",
        "# slurm: {account: myproject}",
    ]
    return "\n".join(lines) + "\n"


def _told(argument: Argument) -> str:
    text = argument.flag or argument.name
    if argument.default is not None:
        text += f", by default {argument.default!r}"
    elif argument.required:
        text += ", which it needs"
    return "".join(map(_escaped, text))[:90]
