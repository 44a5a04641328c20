"""What editors check recipes and sites with agrees with what hpcml checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcml.cli.schema import command
from hpcml.errors import UserError
from hpcml.recipe.load import load_stages
from hpcml.recipe.yaml import load_yaml
from hpcml.site.search import load_site

from .writing import problems

ROOT = Path(__file__).parents[3]
FILES = [
    *(("recipe", path) for path in sorted((ROOT / "recipes").glob("*.yaml"))),
    *(("recipe", path) for path in sorted((ROOT / "tests/golden").glob("*.recipe.yaml"))),
    *(("site", path) for path in sorted((ROOT / "site_configs").glob("*.yaml"))),
]
IDS = [path.name for _, path in FILES]
# What people name themselves; a slip there is another name.
FREE = {
    "params",
    "parallel",
    "rdma",
    "grid",
    "zip",
    "points",
    "when",
    "env",
    "engine_args",
    "deepspeed",
    "stages",
}


@pytest.mark.parametrize(("kind", "path"), FILES, ids=IDS)
def test_examples_are_right(kind: str, path: Path) -> None:
    assert not problems(kind, load_yaml(path).data)
    if path.parent.name != "golden":
        first = path.read_text(encoding="utf-8").splitlines()[0]
        place = first.removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / place).resolve() == ROOT / "schemas" / f"{kind}.json"


@pytest.mark.parametrize(("kind", "path"), FILES, ids=IDS)
def test_a_slip_is_refused_by_both(kind: str, path: Path, tmp_path: Path) -> None:
    document = load_yaml(path)
    copy = tmp_path / path.name
    for key in _keys(document.data, ()):
        data, text = _misspelt(document.data, key), document.text
        assert problems(kind, data), key
        name = str(key[-1])
        line = int(document.where(list(key)).rpartition(":")[2]) - 1
        lines = text.splitlines()
        lines[line] = lines[line].replace(f"{name}:", f"{name}_:", 1)
        copy.write_text("\n".join(lines) + "\n", encoding="utf-8")
        with pytest.raises(UserError):
            load_site(copy) if kind == "site" else load_stages(copy)


def _keys(data: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        here = (*path, key)
        named = {part for part in path if isinstance(part, str)} & FREE
        if isinstance(data, dict) and (not named or path[-1:] == ("stages",)) and not _free(path):
            yield here
        if isinstance(value, (dict, list)):
            yield from _keys(value, here)


def _free(path: tuple[str | int, ...]) -> bool:
    return bool(path) and str(path[-1]) in {*FREE, "options", "labels", "annotations", "pools"}


def _misspelt(data: Any, path: tuple[str | int, ...]) -> Any:
    """The data with ``_`` after one key."""
    key, *rest = path
    if isinstance(data, list):
        return [
            _misspelt(value, tuple(rest)) if index == key else value
            for index, value in enumerate(data)
        ]
    if rest:
        return {**data, key: _misspelt(data[key], tuple(rest))}
    return {f"{name}_" if name == key else name: value for name, value in data.items()}


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("recipe", "site"):
        command.main([kind], standalone_mode=False)
        printed = capsys.readouterr().out
        assert printed == (ROOT / "schemas" / f"{kind}.json").read_text(encoding="utf-8")
