"""Files that others write to, and were killed while they did."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from hpcml.runs.events import JsonLines, last_values, numbers, parse_line, parse_time

names = st.one_of(
    st.sampled_from(["step", "loss", "eval_loss", "total_steps"]), st.text(max_size=6)
)
values = st.one_of(
    st.integers(), st.floats(), st.none(), st.booleans(), st.text(max_size=6), st.just('"loss":1')
)
records = st.lists(st.dictionaries(names, values, max_size=5), max_size=8)
layouts = st.sampled_from([(",", ":"), (", ", ": "), (" ,", " : ")])


def lines_of(items: list[dict[str, Any]], layout: tuple[str, str] = (",", ":")) -> bytes:
    return b"".join(
        json.dumps(item, ensure_ascii=False, separators=layout).encode("utf-8", "replace") + b"\n"
        for item in items
    )


def same(left: object, right: object) -> bool:
    """Equality that takes NaN for itself."""
    return repr(left) == repr(right)


@given(items=records, data=st.data())
def test_a_torn_last_line_waits_for_its_end(
    items: list[dict[str, Any]], data: st.DataObject, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("lines") / "events.jsonl"
    content = lines_of(items)
    cut = data.draw(st.integers(0, len(content)))
    reader = JsonLines(path)
    assert reader.read() == []
    path.write_bytes(content[:cut])
    first = reader.read()
    assert len(first) == content[:cut].count(b"\n")
    with path.open("ab") as file:
        file.write(content[cut:])
    whole = first + reader.read()
    assert same(whole, [json.loads(line) for line in content.splitlines()])
    assert reader.read() == []


# With a quote or a brace in a name the torn line and the next may read as one that is whole.
plain_names = names.filter(lambda name: not {*name} & {*'{}"\\'})


@given(st.dictionaries(plain_names, st.integers(), min_size=1), st.data())
def test_a_line_that_continues_a_torn_one_is_not_lost(
    record: dict[str, int], data: st.DataObject
) -> None:
    torn = lines_of([{"event": "metrics", "value": {"a": 1}, "text": "x"}]).rstrip()
    cut = data.draw(st.integers(0, len(torn)))
    complete = lines_of([record]).rstrip()
    assert record in parse_line(torn[:cut] + complete)


def test_what_a_crash_of_a_machine_leaves_is_survived() -> None:
    assert parse_line(b"\0" * 100) == []
    assert parse_line(b"\0" * 100 + b'{"event":"started"}') == [{"event": "started"}]
    assert parse_line(b'{"a":"\xff"}') == [{"a": "�"}]
    assert parse_line(b"[" * 100_000) == []
    assert parse_line(b'{"a":' * 10_000) == []
    assert parse_line(b"3") == []
    assert parse_line(b"") == []


@given(records, layouts)
@example([{"loss": 1.0, "text": '"loss":'}], (",", ":"))
@example([{"loss": 1.0}, {"a": {"loss": 2.0}}], (",", ":"))
@example([{"loss": 1}, {"loss": "x"}, {"loss": True}], (",", ":"))
def test_the_fast_way_finds_what_the_plain_way_finds(
    items: list[dict[str, Any]], layout: tuple[str, str]
) -> None:
    plain: dict[str, float] = {}
    for item in items:
        plain |= numbers(item)
    found = last_values(lines_of(items, layout))
    assert same(sorted(found.items()), sorted(plain.items()))


def test_torn_metrics_lines_are_survived() -> None:
    data = b'{"step":1,"loss":3}\n{"step":2,"lo\n{"step":3,"lo{"step":4,"loss":2}\n'
    assert last_values(data) == {"step": 4, "loss": 2}


def test_null_is_how_some_programs_write_nan() -> None:
    assert math.isnan(last_values(b'{"loss":1}\n{"loss":null}\n')["loss"])


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert JsonLines(tmp_path / "absent" / "file").read() == []
    (tmp_path / "file").touch()
    assert JsonLines(tmp_path / "file" / "below").read() == []


def test_times() -> None:
    assert parse_time("1970-01-01T00:00:01.500+00:00") == 1.5
    assert parse_time("1970-01-01T00:00:01.500Z") == 1.5
    assert parse_time("yesterday") == 0.0
