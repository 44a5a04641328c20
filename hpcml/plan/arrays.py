"""Splitting a submission into arrays that a scheduler accepts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One array of a submission.

    Attributes:
        number: position among the parts, from 0.
        offset: the task that index 0 of the array stands for.
        tasks: how many tasks it has, on the indices 0 to ``tasks`` - 1.
        max_running: how many of them may run at a time; None is no limit.
        after: the part that must have ended before this one begins, or None.
    """

    number: int
    offset: int
    tasks: int
    max_running: int | None
    after: int | None

    @property
    def indices(self) -> str:
        """The array in Slurm's form, such as ``0-999%50``."""
        last = f"-{self.tasks - 1}" if self.tasks > 1 else ""
        cap = f"%{self.max_running}" if self.max_running is not None else ""
        return f"0{last}{cap}"


def split(tasks: int, largest: int, max_running: int | None) -> tuple[Part, ...]:
    """Split ``tasks`` into arrays of at most ``largest`` tasks.

    The scheduler limits each array by itself, so a cap on all of them is shared out in proportion
    to their sizes; then no more than ``max_running`` tasks ever run together, and all parts end
    at about the same time. With fewer running tasks than parts, the parts run in as many lanes as
    there may be running tasks, one after another in each.

    Raises:
        ValueError: a number is less than 1.
    """
    if min(tasks, largest, max_running or 1) < 1:
        raise ValueError(f"{tasks} tasks in arrays of {largest} with {max_running} running")
    sizes = [min(largest, tasks - offset) for offset in range(0, tasks, largest)]
    lanes = min(len(sizes), max_running or len(sizes))
    if max_running is None:
        shares: list[int | None] = [None] * len(sizes)
    elif lanes < len(sizes):
        shares = [1] * len(sizes)
    else:
        shares = list(_shares(max_running, sizes))
    return tuple(
        Part(
            number,
            number * largest,
            size,
            shares[number],
            number - lanes if number >= lanes else None,
        )
        for number, size in enumerate(sizes)
    )


def _shares(total: int, sizes: list[int]) -> list[int]:
    """``total`` shared out in proportion to ``sizes``, at least 1 each (largest remainders)."""
    spare = total - len(sizes)
    whole = sum(sizes)
    shares = [1 + spare * size // whole for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda i: -(spare * sizes[i] % whole))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares
