"""What Slurm's commands print, in all the forms that were seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.launch.slurm.text import JobId, NoJobId, array_tasks, submitted_job


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("Submitted batch job 7\n", JobId(7, None)),
        ("Submitted batch job 7 on cluster west\n", JobId(7, "west")),
        ("7\n", JobId(7, None)),
        ("7;west\n", JobId(7, "west")),
        ("*** maintenance on 2026-12-01 ***\n7;west\n", JobId(7, "west")),
        ("sbatch: checking your account, 12 jobs\nSubmitted batch job 7\n\n", JobId(7, None)),
        ("Submitted batch job 7 on cluster west\n7;west\n", JobId(7, "west")),
    ],
)
def test_the_id_is_found_among_other_lines(text: str, job: JobId) -> None:
    assert submitted_job(text) == job


@pytest.mark.parametrize("text", ["", "sbatch: error: no\n", "7\n8\n", "job 7 was submitted"])
def test_no_single_id_is_an_error_with_the_text(text: str) -> None:
    with pytest.raises(NoJobId) as error:
        submitted_job(text)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("text", "number", "indices"),
    [
        ("123", 123, None),
        ("123_7", 123, {7}),
        ("123_[4%1]", 123, {4}),
        ("123_[60-62,91]", 123, {60, 61, 62, 91}),
        ("123_[1-9:2]", 123, {1, 3, 5, 7, 9}),
        ("123_[0-3%50]", 123, {0, 1, 2, 3}),
        ("123_[1,3,5,...]", 123, None),
        ("123_[1,3,5,...%10]", 123, None),
        ("123_[1,3,", 123, None),
    ],
)
def test_array_forms(text: str, number: int, indices: set[int] | None) -> None:
    assert array_tasks(text) == (number, None if indices is None else frozenset(indices))


@pytest.mark.parametrize("text", ["", "abc", "12_", "12_[a-b]", "12_[1-2-3]", "_1"])
def test_what_is_no_job_id(text: str) -> None:
    with pytest.raises(ValueError):
        array_tasks(text)


@given(st.sets(st.integers(0, 4000), min_size=1), st.none() | st.integers(1, 99))
def test_any_set_of_indices_comes_back(indices: set[int], cap: int | None) -> None:
    ordered = sorted(indices)
    parts: list[list[int]] = []
    for index in ordered:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    text = ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts)
    assert array_tasks(f"9_[{text}{f'%{cap}' if cap else ''}]") == (9, frozenset(indices))
