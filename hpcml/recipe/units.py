"""Times and sizes as people and Slurm write them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.IGNORECASE | re.ASCII)
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_CLOCK = re.compile(r"(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(?:i?B)?|B)", re.IGNORECASE | re.ASCII)

_DURATION_FORMS = (
    "minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, "
    "days-hours:minutes:seconds, or units such as 90s, 10m, 1h30m, 2d"
)
_MEMORY_FORMS = "a number and a unit, such as 512M, 4G, 1.5T (powers of 1024, as in Slurm)"
_MAX_LENGTH = 40
_DAY = 24 * 3600
_MAX_DAYS = 100_000
_MAX_MEMORY = 1024**6


def parse_duration(value: int | str) -> int:
    """Return a length of time in seconds.

    Every form of Slurm's ``--time`` is understood with Slurm's meaning: ``30`` (an int or its
    text) is 30 minutes, ``4:00`` 4 minutes, ``1-12`` a day and 12 hours. Units (``1h30m``) may be
    used instead.

    Raises:
        ValueError: the value is none of these, and the message lists the forms; or it is so long
            that it must be a slip.
    """
    seconds = _seconds(value)
    if seconds > _MAX_DAYS * _DAY:
        raise ValueError(f"{value!r} is more than {_MAX_DAYS:,} days")
    return seconds


def _seconds(value: int | str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value * 60
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a length of time; write {_DURATION_FORMS}")
    text = value.strip()
    if text and len(text) <= _MAX_LENGTH:
        if match := _CLOCK.fullmatch(text):
            first, second, third = (int(part or 0) for part in match.groups())
            if match[3] is not None:
                return first * 3600 + second * 60 + third
            return first * 60 + second
        if match := _DAYS.fullmatch(text) or _UNITS.fullmatch(text):
            days, hours, minutes, rest = (int(part or 0) for part in match.groups())
            return ((days * 24 + hours) * 60 + minutes) * 60 + rest
    raise ValueError(f"{value!r} is not a length of time; write {_DURATION_FORMS}")


def format_duration(seconds: int) -> str:
    """Return ``HH:MM:SS``, or ``D-HH:MM:SS`` from one day on, as Slurm prints times."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02}:{minute:02}:{second:02}"
    return f"{days}-{clock}" if days else clock


def parse_memory(value: int | str) -> int:
    """Return a size in bytes. Units are powers of 1024: ``4G``, ``4GB`` and ``4GiB`` are the same.

    Raises:
        ValueError: no unit, or not a size. A bare number is refused because Slurm takes it for
            megabytes and most other programs for bytes.
    """
    match = None
    if isinstance(value, str) and len(value) <= _MAX_LENGTH:
        match = _MEMORY.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not a size; write {_MEMORY_FORMS}")
    power = " KMGTP".index(match[2].upper()) if match[2] else 0
    size = int(Fraction(match[1]) * 1024**power)
    if size > _MAX_MEMORY:
        raise ValueError(f"{value!r} is more than {format_memory(_MAX_MEMORY)}")
    return size


def format_memory(size: int) -> str:
    """Return the shortest exact form of a size in bytes: ``4G``, ``1536M``, ``100B``."""
    for power, unit in ((5, "P"), (4, "T"), (3, "G"), (2, "M"), (1, "K")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return f"{size}B"


# Both are written back as text: an int would be read as minutes, or refused, the next time.
Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema(
        {
            "type": ["string", "integer"],
            "description": f"A length of time: {_DURATION_FORMS}.",
            "examples": ["30", "04:00:00", "1-12:00", "1h30m"],
        }
    ),
]
"""Seconds, in models; any form that ``parse_duration`` takes, in files."""

Memory = Annotated[
    int,
    BeforeValidator(parse_memory),
    PlainSerializer(format_memory, return_type=str),
    WithJsonSchema(
        {
            "type": "string",
            "description": f"A size: {_MEMORY_FORMS}.",
            "examples": ["512M", "4G", "1.5T"],
        }
    ),
]
"""Bytes, in models; any form that ``parse_memory`` takes, in files."""
