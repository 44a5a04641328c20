from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.recipe.expression import Condition, ExpressionError, Parameters, Template

any_text = st.text(st.characters(exclude_categories=["Cs"]))


def render(text: str, **params: Any) -> str:
    return Template(text).render({"params": Parameters(params), "cell": {"index": 7}})


def failure(text: str, **params: Any) -> str:
    with pytest.raises(ExpressionError) as caught:
        render(text, **params)
    return str(caught.value)


@given(any_text)
def test_any_text_arrives_unchanged(value: str) -> None:
    assert render("{{ params.x }}", x=value) == value
    assert render("{{ params['x'] }}", x=value) == value
    assert render("a{{params.x}}b\n", x=value) == f"a{value}b\n"


@given(any_text.filter(lambda text: "{{" not in text))
def test_text_without_expressions_is_left_alone(text: str) -> None:
    assert render(text) == text


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10_240,
        "trailing\n",
        "\n\n",
        "\r\n",
        "{{ params.x }}",
        "{% for x in y %}",
        "{# c #}",
        "'\"\\`$(id);|&><*?~!#",
        "\u202e\U0001f600é",
        "\t",
        "",
    ],
)
def test_difficult_values(value: str) -> None:
    assert render("{{ params.x }}", x=value) == value


@given(st.floats(allow_nan=False))
def test_a_float_is_the_same_when_read(value: float) -> None:
    assert float(render("{{ params.x }}", x=value)) == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | any_text,
    lambda inner: st.lists(inner) | st.dictionaries(any_text, inner),
    max_leaves=10,
)


@given(st.lists(json_values) | st.dictionaries(any_text, json_values))
def test_lists_and_mappings_are_json(value: Any) -> None:
    assert json.loads(render("{{ params.x }}", x=value)) == value


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("{{ params.lr }}", "1e-05"),
        ("{{ params.flag }} {{ params.nothing }}", "true null"),
        ("--n={{ params.n * 2 + 1 }}", "--n=7"),
        ("{{ params.model.size }}", "big"),
        ("{{ params.model }}", '{"size": "big"}'),
        ("{{ params.items[1] }}", "2"),
        ("{{ params.items | length }}", "2"),
        ("{{ 'a' if params.flag else 'b' }}", "a"),
        ("{{ cell.index }}", "7"),
        ("{{ '{{' }} {{ '}}' }}", "{{ }}"),
        ("{{ params.absent | default(5) }}", "5"),
        ("{{ params.absent is defined }}", "false"),
        ("{{ 2 ** 10 }}", "1024"),
        ("{{ params.model.size | upper }}", "BIG"),
        ("{{ params.flag | string ~ '!' }}", "true!"),
        ("{{ params.items | json }}", "[1, 2]"),
    ],
)
def test_expressions(text: str, result: str) -> None:
    found = render(
        text,
        **{"lr": 1e-5, "flag": True, "nothing": None, "n": 3, "model.size": "big"},
        items=[1, 2],
    )
    assert found == result


def test_parameters_may_have_the_names_of_methods() -> None:
    text = "{{ params.items }}{{ params.get }}{{ params.a.keys }}"
    assert render(text, **{"items": 1, "get": 2, "a.keys": 3}) == "123"


def test_other_names_are_found() -> None:
    params = Parameters({"learning_rate": 1}, {"lr": "learning_rate"})
    assert Template("{{ params.lr }}{{ params.lr + 1 }}").render({"params": params}) == "12"


@pytest.mark.parametrize("text", ["{{ params.learning_rte }}", "{{ params.learning_rte + 1 }}"])
def test_an_unknown_parameter_has_a_suggestion(text: str) -> None:
    assert "did you mean 'learning_rate'" in failure(text, learning_rate=1, seed=2)


def test_unknown_parameters_are_listed() -> None:
    assert "known: a, b" in failure("{{ params.zzz }}", a=1, b=2)
    assert "known: c" in failure("{{ params.a.zzz }}", **{"a.c": 2})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{{ x }}", "params.x"),
        ("{{ params.x", "{{ without }}"),
        ("{{ }}", "not an expression"),
        ("{{ params.n + }}", "not an expression"),
        ("{{ params.n / 0 }}", "zero"),
        ("{{ params.n + 'a' }}", "unsupported"),
        ("{{ params.n.real }}", "no part 'real'"),
        ("{{ params.n.__class__ }}", "no part '__class__'"),
        ("{{ ''.__class__.__mro__ }}", "no part"),
        ("{{ params['n']['__class__'] }}", "__class__"),
        ("{{ params.t.upper() }}", "nothing can be called"),
        ("{{ range(10**9) }}", "nothing can be called"),
        ("{{ 'x' | center(10**9) }}", "no filter 'center'"),
        ("{{ 'x' | uper }}", "did you mean 'upper'"),
        ("{{ 'x' * 10**9 }}", "numbers only"),
        ("{{ [0] * 10**9 }}", "numbers only"),
        ("{{ '%9999999d' % 1 }}", "numbers only"),
        ("{{ 9 ** (9 ** 9) }}", "too large"),
        ("{{ params.n ** 99999 }}", "too large"),
        ("{{ " + "(" * 900 + "1" + ")" * 900 + " }}", "too complicated"),
        ("{{ " + "1+" * 2000 + "1 }}", "longer than"),
        ("{{ params.n }} {{ self }}", "'self' is not known"),
        ("{{ params.n | default }}{{ y }}", "params.y"),
    ],
)
def test_what_is_no_expression(text: str, part: str) -> None:
    assert part in failure(text, n=3, t="a")


@pytest.mark.parametrize("text", ["{{ 1e400 }}", "{{ -1e400 }}", "{{ [1, 1e999][0] }}"])
def test_a_number_that_is_too_large(text: str) -> None:
    assert "too large" in failure(text)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("{{ 1e308 + 1e308 }}", "inf"),
        ("{{ 1e308 + 1e308 - 1e308 }}", "inf"),
        ("{{ 'nan' | float }}", "nan"),
        ("{{ 'inf' | float > 1 }}", "true"),
    ],
)
def test_a_result_that_is_endless_is_text(text: str, result: str) -> None:
    assert render(text) == result


def holds(text: str, **params: Any) -> bool:
    return Condition(text).holds({"params": Parameters(params)})


def test_conditions() -> None:
    assert holds("params.optim == 'sgd' and params.lr > 0.1", optim="sgd", lr=0.2)
    assert not holds("params.n in [1, 2]", n=3)
    assert holds("params.a.b is none", **{"a.b": None})
    assert Condition("params.x == params.y.z").names == {"x", "y"}
    assert Condition("params['x'] == 1").names is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("params.n", "not true or false"),
        ("{{ params.n == 1 }}", "leave {{ }} out"),
        ("params.n ==", "not an expression"),
        ("n == 1", "params.n"),
        ("params.m == 1", "no parameter 'm'"),
        ("params.n < 'a'", "not supported"),
        ("", "not an expression"),
    ],
)
def test_what_is_no_condition(text: str, part: str) -> None:
    with pytest.raises(ExpressionError) as caught:
        holds(text, n=1)
    assert part in str(caught.value)
