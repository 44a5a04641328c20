"""Reading files of JSON lines while others append to them, and after those others were killed."""

from __future__ import annotations

import json
import os
import re
from datetime import datetime
from pathlib import Path
from typing import Any

_NAME = re.compile(rb'"([^"\\]*)"\s*:')
_decoder = json.JSONDecoder()


class JsonLines:
    """Reads a growing file of JSON lines; each call returns only what is new.

    A last line without its newline is still being written, or its writer was killed: it is left
    for the next call. A missing file is an empty one.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = os.fspath(path)
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The objects of the lines that were completed since the last call."""
        return [record for line in self.read_bytes().splitlines() for record in parse_line(line)]

    def read_bytes(self) -> bytes:
        """The same lines unparsed."""
        # Plain descriptors: status reads tens of thousands of these files, and a file object
        # costs several times as much as the reading itself.
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return b""
        try:
            size = os.fstat(descriptor).st_size
            if size <= self._offset:
                return b""
            data = os.pread(descriptor, size - self._offset, self._offset)
        finally:
            os.close(descriptor)
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data


def parse_line(line: bytes) -> list[dict[str, Any]]:
    """The JSON objects of one line: one, unless a writer was killed within the line.

    The next writer's line then continues the torn one, and must not be lost with it.
    """
    text = line.decode("utf-8", "replace")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return _salvage(text)
    return [record] if isinstance(record, dict) else []


def _salvage(text: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    position = text.find("{")
    while position >= 0:
        try:
            record, end = _decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            end = position + 1
        else:
            records.append(record)
        position = text.find("{", end)
    return records


def last_values(data: bytes) -> dict[str, float]:
    """The last value of each metric in complete metrics lines.

    The same as parsing all lines and merging them in order, in a fraction of the time: the names
    are searched in the bytes, and only the last line of each name is parsed.
    """
    if b"\\" in data:
        return _merge(data.splitlines())
    values: dict[str, float] = {}
    parsed: dict[int, dict[str, float]] = {}
    for name in set(_NAME.findall(data)):
        key = name.decode("utf-8", "replace")
        end = len(data)
        # Usually the first round finds it; more rounds only where a line is torn.
        while (found := data.rfind(b'"' + name + b'"', 0, end)) >= 0:
            start = data.rfind(b"\n", 0, found) + 1
            if start not in parsed:
                parsed[start] = _merge([data[start : data.find(b"\n", found)]])
            if key in parsed[start]:
                values[key] = parsed[start][key]
                break
            end = start
    return values


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """The metrics of one record: its numbers, and NaN where a program wrote null for it."""
    return {
        name: float("nan") if value is None else value
        for name, value in record.items()
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
    }


def _merge(lines: list[bytes]) -> dict[str, float]:
    values: dict[str, float] = {}
    for line in lines:
        for record in parse_line(line):
            values |= numbers(record)
    return values


def parse_time(text: str) -> float:
    """Seconds since the epoch of an event's ``time``; 0 if it is none."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, AttributeError):
        return 0.0
