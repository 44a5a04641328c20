"""Collecting what is wrong with a file, so that a person sees all of it at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Protocol

from hpcml.errors import UserError

KeyPath = Sequence[str | int]


class Locator(Protocol):
    """Something that knows where a key is written, such as a ``Document``."""

    def where(self, key_path: str | KeyPath) -> str: ...

    def key_of(self, key_path: KeyPath) -> str: ...


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is spelled most like ``word``, or None if none is close."""
    candidates = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), candidates, n=1, cutoff=0.6)
    return candidates[close[0]] if close else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?``, or the list of what is known if nothing is close."""
    known = list(known)
    match = nearest(word, known)
    if match is not None:
        return f"; did you mean {match!r}?"
    if not known:
        return ""
    shown = ", ".join(known[:30]) + (", …" if len(known) > 30 else "")
    return f"; known: {shown}"


class Problems:
    """Mistakes found in one document. ``raise_any`` turns them into one ``UserError``."""

    def __init__(self, document: Locator) -> None:
        self._document = document
        self._lines: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, key_path: KeyPath, message: str) -> None:
        """Record that the value at ``key_path`` is wrong; ``message`` says what is allowed."""
        key = self._document.key_of(key_path)
        where = self._document.where(key_path)
        line = f"{where}: {key}: {message}" if key else f"{where}: {message}"
        if line not in self._lines:
            self._lines.append(line)

    def key_of(self, key_path: KeyPath) -> str:
        """Return the key path as people write it."""
        return self._document.key_of(key_path)

    def raise_any(self) -> None:
        """Raise a ``UserError`` that lists everything recorded; do nothing if there is nothing."""
        if self._lines:
            raise UserError("\n".join(self._lines))
