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
    *("params", "parallel", "grid", "zip", "points", "when", "env", "engine_args", "deepspeed"),
    *("rdma", "node_selector", "options", "labels", "annotations"),
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
    if {*path} & FREE:
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        # The names of stages and pools are free, and what is in them is not.
        if isinstance(data, dict) and path[-1:] not in {("stages",), ("pools",)}:
            yield (*path, key)
        if isinstance(value, (dict, list)):
            yield from _keys(value, (*path, key))


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
