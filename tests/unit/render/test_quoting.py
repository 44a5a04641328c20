"""Whatever a value holds, it arrives in the shell, or in YAML, as that value and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import jinja2
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcml.render.environment import (
    QuotingError,
    Trusted,
    one_line,
    shell_environment,
    yaml_environment,
)

TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=80)
NASTY = [
    "",
    " ",
    "a b",
    "'",
    '"',
    "$(touch x)",
    "`id`",
    "a;b",
    "a\nb\n",
    "\\",
    "-n",
    "!x",
    "~",
    "é漢🎉",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=6))
def test_shell_words_arrive_unchanged(values: list[str]) -> None:
    template = "printf '%s\\0' {% for v in values %}{{ v }} {% endfor %}"
    script = shell_environment().from_string(template).render(values=values)
    result = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert result.stdout.decode().split("\0")[:-1] == values


@pytest.mark.parametrize("value", NASTY)
def test_nasty_values_in_every_construction(value: str) -> None:
    template = (
        "{% macro m(v) %}{{ v }}{% endmacro %}"
        "{% set copy = v %}"
        "printf '%s\\0' {{ v }} {{ copy }} {{ m(v) }} {{ [v] }} {{ v | default('') }} x={{ v }}"
    )
    script = shell_environment().from_string(template).render(v=value)
    result = subprocess.run(["bash", "-c", script], capture_output=True, check=True)
    assert result.stdout.decode().split("\0")[:-1] == [value] * 5 + [f"x={value}"]


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | TEXT,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
        max_leaves=8,
    )
)
def test_yaml_values_arrive_unchanged(value: object) -> None:
    text = yaml_environment().from_string("a: {{ v }}\nb:\n  - {{ [v] }}\n").render(v=value)
    # JSON is YAML 1.2; PyYAML, of version 1.1, takes 1e+16 for text: floats are compared as such.
    loaded = yaml.safe_load(text)

    def same(left: object, right: object) -> bool:
        if isinstance(left, float) and isinstance(right, str):
            return float(right) == left
        if isinstance(left, list) and isinstance(right, list):
            return len(left) == len(right) and all(map(same, left, right))
        if isinstance(left, dict) and isinstance(right, dict):
            return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
        return left == right

    assert same(value, loaded["a"])
    assert same([[value]], loaded["b"])


def test_constants_are_quoted_too() -> None:
    assert shell_environment().from_string("echo {{ 'a b' }} {{ 1 }}").render() == "echo 'a b' 1"
    assert yaml_environment().from_string("a: {{ 'x: y' }}").render() == 'a: "x: y"'


def test_trusted_text_and_blocks_are_left_alone() -> None:
    loader = jinja2.DictLoader(
        {
            "base": "{% block b %}echo {{ v }}{% endblock %}",
            "child": "{% extends 'base' %}{% block b %}{{ super() }} && {{ t }}{% endblock %}",
        }
    )
    environment = shell_environment().overlay(loader=loader)
    text = environment.get_template("child").render(v="a b", t=Trusted("echo $HOME"))
    assert text == "echo 'a b' && echo $HOME"


@pytest.mark.parametrize("value", [None, True, {"a": 1}, "a\0b"])
def test_what_is_no_word_is_refused(value: object) -> None:
    with pytest.raises(QuotingError):
        shell_environment().from_string("echo {{ v }}").render(v=value)


def test_an_unknown_name_is_an_error() -> None:
    for environment in (shell_environment(), yaml_environment()):
        with pytest.raises(jinja2.UndefinedError):
            environment.from_string("{{ unknown }}").render()


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\u2028b"])
def test_a_comment_or_directive_refuses_line_breaks(value: str) -> None:
    with pytest.raises(QuotingError):
        one_line(value)


def test_templates_write_values_into_comments_only_as_one_line() -> None:
    """A quoted line break ends a comment, or a directive, all the same."""
    for template in Path(__file__).parents[3].joinpath("templates").rglob("*.j2"):
        text = re.sub(r"\{#.*?#\}", "", template.read_text(), flags=re.DOTALL)
        for line in text.splitlines():
            if line.lstrip().startswith("#"):
                for value in re.findall(r"\{\{(.*?)\}\}", line):
                    assert "| one_line" in value or "| directive" in value, line
