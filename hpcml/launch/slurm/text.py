"""Reading what Slurm's commands print."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_BANNER = re.compile(r"Submitted batch job (\d+)(?: on cluster (\S+))?")
_PARSABLE = re.compile(r"(\d+)(?:;([\w.-]+))?")
_ARRAY = re.compile(r"(\d+)_(?:(\d+)|\[([^\]%]*)(?:%\d*)?\]?)")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


class NoJobId(ValueError):
    """The text of sbatch names no job, or more than one; something may have been submitted."""


class JobId(NamedTuple):
    """A job's number, and its cluster where several share a controller."""

    number: int
    cluster: str | None


def submitted_job(text: str) -> JobId:
    """The job that ``sbatch`` says it submitted.

    Sites wrap sbatch in scripts that print lines of their own, so every line is looked at, in
    sbatch's plain and its ``--parsable`` form.

    Raises:
        NoJobId: no line, or lines that disagree.
    """
    found = set()
    for line in text.splitlines():
        match = _BANNER.search(line) or _PARSABLE.fullmatch(line.strip())
        if match:
            found.add(JobId(int(match[1]), match[2]))
    if len({job.number for job in found}) != 1:
        raise NoJobId(text)
    # The same job in both forms: the one that names the cluster knows more.
    return max(found, key=lambda job: job.cluster or "")


def array_tasks(text: str) -> tuple[int, frozenset[int] | None]:
    """The job number and the array indices of a job id as squeue and sacct print it.

    ``123`` is a job without an array, and gives no indices. ``123_4`` is one task,
    ``123_[60-89,91-94%5]`` and ``123_[1-9:2]`` are several that wait. A list that squeue
    shortened (``123_[1,3,...]``) gives None as well, since the rest of it is unknown.

    Raises:
        ValueError: it is no job id.
    """
    if text.isdigit():
        return int(text), None
    match = _ARRAY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no job id of Slurm")
    number = int(match[1])
    if match[2] is not None:
        return number, frozenset((int(match[2]),))
    if "..." in match[3] or not text.endswith("]"):
        return number, None
    return number, frozenset(_expand(match[3]))


def array_list(indices: Iterable[int]) -> str:
    """Array indices as Slurm's commands take them: ``0-5,9``."""
    ranges: list[list[int]] = []
    for index in sorted(indices):
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(f"{low}-{high}" if low < high else str(low) for low, high in ranges)


def _expand(text: str) -> Iterator[int]:
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{text!r} is no list of array indices")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        yield from range(first, last + 1, int(match[3] or 1))
