from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.recipe.yaml import Document, load_yaml


def read(folder: Path, text: str | bytes) -> Document:
    path = folder / "file.yaml"
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text)
    return load_yaml(path)


def message(folder: Path, text: str | bytes) -> str:
    with pytest.raises(UserError) as caught:
        read(folder, text)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e5", 1e5),
        ("1E5", 1e5),
        ("-.5", -0.5),
        ("+3", 3),
        ("0", 0),
        ("0x1F", 31),
        ("0o17", 15),
        ("017", "017"),
        ("1_000", "1_000"),
        ("no", "no"),
        ("yes", "yes"),
        ("on", "on"),
        ("off", "off"),
        ("y", "y"),
        ("true", True),
        ("False", False),
        ("tRue", "tRue"),
        ("", None),
        ("~", None),
        ("null", None),
        ("none", "none"),
        ("04:00:00", "04:00:00"),
        ("4:00", "4:00"),
        ("1:30", "1:30"),
        ("2024-01-31", "2024-01-31"),
        ("2024-01-31T10:00:00Z", "2024-01-31T10:00:00Z"),
        ("1.2.3", "1.2.3"),
        ("=", "="),
        ('"5"', "5"),
        ("'true'", "true"),
        ("!!str 5", "5"),
        ("!!float 5", 5.0),
        (".inf", float("inf")),
        ("-.inf", float("-inf")),
        ('"caf\\u00e9"', "café"),
        ("|\n  a\n  b\n", "a\nb\n"),
        ("[1, [a], {b: ~}]", [1, ["a"], {"b": None}]),
        ("1" + "0" * 30, 10**30),
    ],
)
def test_a_scalar_is_what_it_looks_like(tmp_path: Path, text: str, value: Any) -> None:
    found = read(tmp_path, f"key: {text}\n").data["key"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text_as_written(tmp_path: Path) -> None:
    assert read(tmp_path, "on: 1\n1: 2\nnull: 3\n").data == {"on": 1, "1": 2, "null": 3}


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    assert read(tmp_path, b"\xef\xbb\xbfa: 1\n").data == {"a": 1}


def test_aliases_repeat_values(tmp_path: Path) -> None:
    assert read(tmp_path, "a: &x [1]\nb: *x\n").data == {"a": [1], "b": [1]}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a: 1\nb: 2\na: 3\n", ["file.yaml:3:1", "'a' is given twice", "line 1"]),
        ("x:\n  a: 1\n  a: 3\n", ["file.yaml:3:3", "'a' is given twice", "line 2"]),
        ("a: &x [*x]\n", ["file.yaml:1:4", "contains itself"]),
        ("a: &x {b: *x}\n", ["file.yaml:1:4", "contains itself"]),
        ("a: !!python/object/apply:os.system [ls]\n", ["file.yaml:1:4", "!!python/object"]),
        ("a: !mine 3\n", ["file.yaml:1:4", "!mine"]),
        ("a: !!set {b}\n", ["file.yaml:1:4", "!!set"]),
        ("a: !!int x\n", ["file.yaml:1:4", "does not fit", "!!int"]),
        ("a: !!map [1]\n", ["file.yaml:1:4", "does not fit"]),
        ("a:\n\t- b\n", ["file.yaml:2:1", "tab", "only spaces"]),
        ("a: b\n\tc: d\n", ["file.yaml:2:1", "tab", "only spaces"]),
        ("- a\n", ["file.yaml:1:1", "top level must be a mapping", "a list"]),
        ("text\n", ["file.yaml:1:1", "a single value"]),
        ("", ["file.yaml:1", "empty"]),
        ("# nothing\n", ["file.yaml:1", "empty"]),
        ("a: b: c\n", ["file.yaml:1:5", "quotes"]),
        ("a: @b\n", ["file.yaml:1:4", "quotes"]),
        ("a: 'b\n", ["file.yaml:2:1", "not valid YAML", "line 1"]),
        ("a: [1\nb: 2\n", ["file.yaml:2", "not valid YAML"]),
        ("a: *x\n", ["file.yaml:1:4", "alias"]),
        ("a: 1\n---\nb: 1\n", ["file.yaml:2:1", "second document"]),
        ("a: \x01\n", ["file.yaml:1", "not allowed"]),
        ('a: "\\0"\n', ["file.yaml:1:4", "NUL"]),
        ("a: {{ params.x }}\n", ["file.yaml:1:5", "quotes"]),
        ("<<: {a: 1}\n", ["file.yaml:1:1", "merge keys"]),
        ("a: 1e999\n", ["file.yaml:1:4", "1e999", "too large"]),
        ("a: " + "9" * 5000 + "\n", ["file.yaml:1:4", "5000 digits"]),
        ("a: " + "[" * 200 + "]" * 200 + "\n", ["file.yaml:1", "nested"]),
        ("a: " + "[" * 100_000 + "\n", ["file.yaml:1"]),
        (b"a: 1\nb: caf\xe9\n", ["file.yaml:2:7", "UTF-8", "0xe9"]),
        ("a: 1\n".encode("utf-16"), ["file.yaml:1:1", "UTF-8"]),
    ],
)
def test_a_mistake_has_its_place(tmp_path: Path, text: str | bytes, parts: list[str]) -> None:
    found = message(tmp_path, text)
    for part in parts:
        assert part in found


def test_few_lines_can_not_stand_for_billions(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "100,000" in message(tmp_path, "\n".join(lines))


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_yaml(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="folder"):
        load_yaml(tmp_path)
    with pytest.raises(UserError, match="can't be read"):
        load_yaml("a\0b")


def test_where_a_key_is(tmp_path: Path) -> None:
    document = read(tmp_path, "a:\n  b:\n    - 1\n    - c: 2\nx.y: 3\n")
    path = str(tmp_path / "file.yaml")
    assert document.where("a.b") == f"{path}:2"
    assert document.where(("a", "b", 1, "c")) == f"{path}:4"
    assert document.where(("x.y",)) == f"{path}:5"
    assert document.where("a.absent") == f"{path}:1"
    assert document.where("absent") == f"{path}:1"
    assert document.key_of(("a", "b", 1, "absent")) == "a.b.1.absent"


def test_scalars_as_written(tmp_path: Path) -> None:
    document = read(tmp_path, "a: [1.10, 1e-4, ~, 'x', [1]]\n")
    assert [document.as_written(("a", i)) for i in range(6)] == [
        "1.10", "1e-4", None, "x", None, None,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("a=1e-3", 1e-3),
        ("a=5", 5),
        ("a=true", True),
        ("a=null", None),
        ("a=no", "no"),
        ("a=", ""),
        ("a= x ", " x "),
        ("a='5'", "5"),
        ("a=[0,1]", [0, 1]),
        ("a={b: 1}", {"b": 1}),
        ("a=[a,", "[a,"),
        ("a=b: c", "b: c"),
        ("a=- b", "- b"),
        ("a=b=c", "b=c"),
        ("a=x # y", "x # y"),
        ("a=5 # y", "5 # y"),
        ("a=@x", "@x"),
        ("a=*x", "*x"),
        ("a=&x y", "&x y"),
        ("a=!!python/name:os.system", "!!python/name:os.system"),
        ("a={{ params.x }}", "{{ params.x }}"),
        ("a=x\ny", "x\ny"),
        ("a=$(rm -rf /); `x` 'y' \"z", "$(rm -rf /); `x` 'y' \"z"),
        ("a=04:00:00", "04:00:00"),
    ],
)
def test_the_value_of_a_setting(tmp_path: Path, setting: str, value: Any) -> None:
    found = read(tmp_path, "z: 0\n").override([setting]).data["a"]
    assert found == value
    assert type(found) is type(value)


def test_settings_reach_any_key(tmp_path: Path) -> None:
    document = read(tmp_path, "a: {b: [1, {c: 2}]}\nd:\np:\n  x.y: 1\nq: &q {r: 1}\ns: *q\n")
    changed = document.override(
        ["a.b.1.c=3", "d.e.f=4", "p.x.y=5", "new.key=6", "q.r=7", "d.g=8", "d.g=9"]
    )
    assert changed.data == {
        "a": {"b": [1, {"c": 3}]},
        "d": {"e": {"f": 4}, "g": 9},
        "p": {"x.y": 5},
        "q": {"r": 7},
        "s": {"r": 1},
        "new": {"key": 6},
    }
    assert document.data["a"] == {"b": [1, {"c": 2}]}
    assert changed.where("a.b.1.c") == "--set a.b.1.c"
    assert changed.where("new.key") == "--set new.key"
    assert changed.where("a.b.0").endswith("file.yaml:1")


@pytest.mark.parametrize("setting", ["a", "=1", "a..b=1", ".a=1", ""])
def test_what_is_no_setting(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UserError, match=r"write key=value"):
        read(tmp_path, "z: 0\n").override([setting])


def test_settings_below_a_value(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--set a\.b: a is a single value .*file.yaml:1"):
        read(tmp_path, "a: 1\n").override(["a.b=1"])
    with pytest.raises(UserError, match=r"--set a\.5: a is a list"):
        read(tmp_path, "a: [1]\n").override(["a.5=1"])
    with pytest.raises(UserError, match=r"--set a: .*!!python"):
        read(tmp_path, "a: [1]\n").override(["a=[!!python/name:os.system x]"])


@pytest.mark.parametrize("setting", ["a=x\udcff", "a=[1, '\udcff']", "\udcff=1", "a.\ud800=1"])
def test_a_setting_that_is_not_utf8(tmp_path: Path, setting: str) -> None:
    with pytest.raises(UserError, match="not UTF-8"):
        read(tmp_path, "z: 0\n").override([setting])


@pytest.mark.parametrize("key", ['"\\e[31m"', '"a\\nb"', '"\\u202e"', '"\\x07"'])
def test_a_key_can_be_shown(tmp_path: Path, key: str) -> None:
    for text in (f"{key}: 1\n", f"params: {{{key}: 1}}\n", f"a: [{{{key}: 1}}]\n"):
        found = message(tmp_path, text)
        assert "cannot be shown" in found
        assert found.isprintable()


def test_a_key_of_a_setting_can_be_shown(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be shown"):
        read(tmp_path, "z: 0\n").override(["a.\x1b[31m=1"])
