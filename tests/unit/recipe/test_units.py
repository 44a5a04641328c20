from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from hpcml.recipe.units import (
    Duration,
    Memory,
    format_duration,
    format_memory,
    parse_duration,
    parse_memory,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (30, 1800),
        ("30", 1800),
        ("4:00", 240),
        ("4:30", 270),
        ("04:00:00", 14400),
        ("100:00:00", 360_000),
        ("0:90:00", 5400),
        ("1-12", 129_600),
        ("1-12:30", 131_400),
        ("1-12:30:15", 131_415),
        ("90s", 90),
        ("10m", 600),
        ("1h30m", 5400),
        ("2d", 172_800),
        ("1d2h3m4s", 93_784),
        (" 1H ", 3600),
        ("0", 0),
    ],
)
def test_times(text: int | str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", " ", "4x", "1:2:3:4", "-5", "1.5h", "30m1h", "1-", "infinite", "1 h", "9" * 50, "٣"],
)
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(ValueError, match="hours:minutes:seconds"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["9" * 20 + "d", "9" * 20, 10**15, "100001-0", "2400000:00:01"])
def test_times_that_must_be_a_slip(text: int | str) -> None:
    with pytest.raises(ValueError, match="more than 100,000 days"):
        parse_duration(text)
    assert parse_duration("100000-0") == 100_000 * 86400


@pytest.mark.parametrize("text", ["1025P", "9" * 30 + "T"])
def test_sizes_that_must_be_a_slip(text: str) -> None:
    with pytest.raises(ValueError, match="more than 1024P"):
        parse_memory(text)


@pytest.mark.parametrize("value", [True, -1, 1.5, None, [1]])
def test_values_that_are_no_time(value: object) -> None:
    with pytest.raises(ValueError, match="length of time"):
        parse_duration(value)  # type: ignore[arg-type]


@given(st.integers(0, 10**9))
def test_times_round_trip(seconds: int) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.integers(0, 999), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_slurm_and_units_agree(days: int, hours: int, minutes: int, seconds: int) -> None:
    slurm = parse_duration(f"{days}-{hours}:{minutes:02}:{seconds:02}")
    assert slurm == parse_duration(f"{days}d{hours}h{minutes}m{seconds}s")


def test_time_format() -> None:
    assert format_duration(240) == "00:04:00"
    assert format_duration(86_400) == "1-00:00:00"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4G", 4 * 1024**3),
        ("4GB", 4 * 1024**3),
        ("4GiB", 4 * 1024**3),
        ("4 gib", 4 * 1024**3),
        ("512M", 512 * 1024**2),
        ("1.5T", 3 * 1024**4 // 2),
        ("1k", 1024),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["4", "", "G", "-4G", "4X", "4 G B", "1e3G", 4, None, True])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="a number and a unit"):
        parse_memory(text)  # type: ignore[arg-type]


@given(st.integers(0, 2**60))
def test_sizes_round_trip(size: int) -> None:
    assert parse_memory(format_memory(size)) == size


@given(st.integers(0, 10**7))
def test_models_write_what_they_read(value: int) -> None:
    for kind in (Duration, Memory):
        adapter: TypeAdapter[int] = TypeAdapter(kind)
        text = adapter.dump_python(value)
        assert adapter.validate_python(text) == value
        assert adapter.validate_json(adapter.dump_json(value)) == value
