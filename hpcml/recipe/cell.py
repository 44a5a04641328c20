"""One cell of a sweep: one set of parameters, and what is run with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A value that a swept parameter takes. Equal values of a parameter are one object."""

    value: Any
    text: str


ABSENT = Entry(None, "")
"""The parameter isn't swept in this cell."""

Row = tuple[Entry, ...]


class Source(Protocol):
    """What all cells of a sweep have in common, and how one is made from its row.

    Attributes:
        names: the parameters that vary, in the order of a row.
        fixed: the parameters that don't.
        layout: parameters that may be others when the same cells are submitted again.
    """

    names: tuple[str, ...]
    fixed: Mapping[str, Any]
    layout: Mapping[str, Any] = MappingProxyType({})

    def params(self, row: Row) -> dict[str, Any]:
        """Return the parameters that the recipe gives a cell, without defaults."""
        params = dict(self.fixed)
        for name, entry in zip(self.names, row, strict=True):
            if entry is not ABSENT:
                params[name] = entry.value
        return params

    def payload(self, row: Row, index: int) -> dict[str, Any]: ...

    def members(self, row: Row, index: int) -> str:
        """Return the canonical JSON of the parameters and of the payload."""
        params, payload = self.params(row), self.payload(row, index)
        return f'"params":{canonical_json(params)},"payload":{canonical_json(payload)}'


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One cell of a sweep. Light, so that a hundred thousand of them fit: it keeps only what is
    its own and makes ``params`` and ``payload`` anew each time they are asked for.

    Attributes:
        index: position in the sweep, from 0.
        id: 12 hexadecimal digits that depend on what determines the result, and nothing else.
    """

    index: int
    id: str
    _row: Row
    _source: Source

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that the recipe gives this cell, under canonical names with dots."""
        return self._source.params(self._row)

    @property
    def swept(self) -> dict[str, Any]:
        """Those of the parameters that vary, in the order of the sweep."""
        return {
            name: entry.value
            for name, entry in zip(self._source.names, self._row, strict=True)
            if entry is not ABSENT
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters that the sweep varies, used in this cell or not."""
        return self._source.names

    @property
    def layout(self) -> Mapping[str, Any]:
        """Parameters of all cells that may be others when the same cells are submitted again."""
        return self._source.layout

    @property
    def payload(self) -> dict[str, Any]:
        """What the worker starts: see docs/design.md."""
        return self._source.payload(self._row, self.index)

    @property
    def members(self) -> str:
        """``"params":…,"payload":…``: their JSON, which may be made faster than they are."""
        return self._source.members(self._row, self.index)

    def __repr__(self) -> str:
        return f"Cell({self.index}, {self.id}, {self.swept})"


def canonical_json(value: Any) -> str:
    """Return the one JSON text of a value, whatever the order of its keys."""
    return _encode(value)


_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
).encode
