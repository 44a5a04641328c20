"""The recipe that `hpcml init` writes: what was answered is what is loaded."""

from __future__ import annotations

import string
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcml.errors import UserError
from hpcml.recipe import draft, expand
from hpcml.recipe.arguments import Argument, script_arguments
from hpcml.recipe.draft import Draft, Parameter, draft_text, parameter

from .writing import Recipes

TYPED: list[tuple[str, Any]] = [
    ("1", 1),
    ("-3", -3),
    ("1e-4", 1e-4),
    ("0.1", 0.1),
    ("0x10", 16),
    ("true", True),
    ("null", None),
    ("no", "no"),
    ("on", "on"),
    ("007", "007"),
    ("04:00:00", "04:00:00"),
    ("1e999", "1e999"),
    (".inf", ".inf"),
    ("{{", "{{"),
    ("{{ params.a }}", "{{ params.a }}"),
    ("a b", "a b"),
    ("it's", "it's"),
    ("# no", "# no"),
    ("a: b", "a: b"),
    ("- x", "- x"),
    ("é😀", "é😀"),
    ("9" * 2000, "9" * 2000),
]
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
VALUE = st.one_of(
    st.sampled_from(TYPED),
    TEXT.map(lambda text: ('"' + text.replace('"', '""') + '"', text)),
)
NAME = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=6).filter(
    lambda name: not name[0].isdigit()
) | st.sampled_from(["no", "null", "true", "items", "on", "a.b", "class"])


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one == other


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    script=st.sampled_from(["t.py", "a b.py", "{{x}}.sh", "no", "1e4.R", "'\"é.py", "-x.py"]),
    given_=st.dictionaries(NAME, st.lists(VALUE, min_size=1, max_size=3), max_size=3),
    metric=st.sampled_from([None, "loss", "no", '"x":{{']),
)
def test_answers_are_loaded_as_they_were_given(
    shared_recipes: Recipes,
    script: str,
    given_: dict[str, list[tuple[str, Any]]],
    metric: str | None,
) -> None:
    parameters, expected = [], {}
    for name, values in given_.items():
        if any(other.partition(".")[0] == name for other in given_ if other != name):
            continue  # a and a.b
        typed = [one for one, _ in values]
        if len({*typed}) < len(typed) or len({repr(value) for _, value in values}) < len(typed):
            continue  # refused, in another test
        parameters.append(parameter(f"{name}={','.join(typed)}", ()))
        expected[name] = [value for _, value in values]
    loaded = shared_recipes.load(draft_text(Draft(script, parameters, metric=metric)))
    found = loaded.document.data
    fixed = found.get("params", {})
    swept = found.get("sweep", {}).get("grid", {})
    assert {*fixed, *swept} == {*expected}
    for name, values in expected.items():
        got = [fixed[name]] if name in fixed else swept[name]
        assert len(got) == len(values)
        assert all(map(same, got, values)), (got, values)
    if metric is not None:
        assert loaded.recipe.objective is not None
        assert loaded.recipe.objective.metric == metric
    cells = expand(loaded)
    for cell in cells:
        words = cell.payload["argv"]
        assert (
            Path(script).name == Path(words[1] if len(words) > 1 + len(expected) else words[0]).name
        )
        for each in parameters:
            value = cell.params[each.name]
            if isinstance(value, str):
                assert f"{each.flag}={value}" in words or [each.flag, value] == words[-2:]


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_any_answer_is_settings_or_a_message(answer: str) -> None:
    with suppress(UserError):
        for setting in draft.settings(answer):
            for value in parameter(setting, ()).values:
                assert "\n" not in value


def test_an_answer_is_divided_at_spaces() -> None:
    assert draft.settings('lr=0.1, 0.01, seed=1  name="a b",c') == [
        "lr=0.1, 0.01",
        "seed=1",
        'name="a b",c',
    ]
    assert parameter("lr=0.1, 0.01", ()) == Parameter("--lr", "lr", ("0.1", "0.01"))
    assert parameter('x="a, ""b""",""', ()).values == ('"a, \\"b\\""', '""')
    for wrong in ("lr", "=1", "lr=", "lr=1,,2", "lr=1,", 'lr="a"b', "a b=1", "1x=1", "lr=1,1"):
        with pytest.raises(UserError):
            parameter(wrong, ())
    with pytest.raises(UserError, match="not closed"):
        draft.settings('x="a')


SCRIPT = """
import argparse, click
raise SystemExit("this is never run")
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("data")
    group = parser.add_argument_group("x")
    group.add_argument("-l", "--learning-rate", "--lr", type=float, default=1e-3)
    parser.add_argument("-n", type=int, required=True)
    parser.add_argument("--size", default=compute())
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--cache", action=argparse.BooleanOptionalAction)
    parser.add_argument(NAME)
@click.command()
@click.option("--shout/--no-shout", default=False)
@click.option("--epochs", "count", default=10)
@click.argument("out", required=False)
def other(): ...
"""


def test_arguments_are_found_in_the_source(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(SCRIPT)
    assert script_arguments(script) == [
        Argument("", "data", required=True),
        Argument("--learning-rate", "learning_rate", default=1e-3),
        Argument("-n", "n", required=True),
        Argument("--size", "size"),
        Argument("--fast", "fast", switch=True),
        Argument("--cache", "cache", switch=True),
        Argument("--shout", "shout", default=False, switch=True),
        Argument("--epochs", "epochs", default=10),
        Argument("", "out"),
    ]
    with pytest.raises(UserError, match="takes no value"):
        parameter("fast=1", script_arguments(script))
    for wrong in (b"def (", b"\xff\xfe", b"\0", b"(" * 5000):
        script.write_bytes(wrong)
        assert script_arguments(script) == []
    assert script_arguments(tmp_path / "t.sh") == []


def test_each_argument_is_given_as_the_script_takes_it(recipes: Recipes, tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(SCRIPT)
    arguments = script_arguments(script)
    given = [parameter(each, arguments) for each in ("n=-1", "learning-rate=1e-4", "data=-x y")]
    (cell,) = recipes.cells(draft_text(Draft("t.py", given, arguments)))
    assert cell.payload["argv"] == [
        "python3", "t.py", "-n", "-1", "--learning-rate=0.0001", "-x y",
    ]  # fmt: skip
