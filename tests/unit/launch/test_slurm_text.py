"""What Slurm's commands print, in all the forms that were seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.launch.slurm.text import JobId, NoJobId, array_list, array_tasks, submitted_job


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


INDEX = st.integers(0, 4000)
# One part of a list as Slurm prints it, and the indices that it stands for.
PARTS = st.one_of(
    INDEX.map(lambda i: (str(i), {i})),
    st.tuples(INDEX, st.integers(1, 200)).map(
        lambda r: (f"{r[0]}-{r[0] + r[1]}", set(range(r[0], r[0] + r[1] + 1)))
    ),
    st.tuples(INDEX, st.integers(1, 200), st.integers(1, 50)).map(
        lambda r: (f"{r[0]}-{r[0] + r[1]}:{r[2]}", set(range(r[0], r[0] + r[1] + 1, r[2])))
    ),
)
CAP = st.none() | st.integers(1, 10**6)


@given(st.integers(1, 2**26), st.lists(PARTS, min_size=1, max_size=12), CAP)
def test_the_whole_grammar_of_lists(
    job: int, parts: list[tuple[str, set[int]]], cap: int | None
) -> None:
    """Indices, ranges, and ranges with a step, in any order and number, with and without a cap."""
    text = ",".join(written for written, _ in parts)
    expected = frozenset().union(*(indices for _, indices in parts))
    limit = f"%{cap}" if cap else ""
    assert array_tasks(f"{job}_[{text}{limit}]") == (job, expected)


@given(st.integers(1, 2**26), st.lists(PARTS, min_size=1, max_size=12), CAP, st.data())
def test_a_shortened_list_is_never_taken_for_the_whole(
    job: int, parts: list[tuple[str, set[int]]], cap: int | None, data: st.DataObject
) -> None:
    """Slurm ends it by dots; a terminal, or a fixed width, cuts it anywhere."""
    text = ",".join(written for written, _ in parts)
    limit = f"%{cap}" if cap else ""
    assert array_tasks(f"{job}_[{text},...{limit}]") == (job, None)
    whole = f"{job}_[{text}{limit}]"
    cut = whole[: data.draw(st.integers(len(f"{job}_["), len(whole) - 1))]
    assert array_tasks(cut) == (job, None)


@given(st.sets(INDEX, min_size=1))
def test_what_is_written_is_read(indices: set[int]) -> None:
    assert array_tasks(f"9_[{array_list(indices)}]") == (9, frozenset(indices))
