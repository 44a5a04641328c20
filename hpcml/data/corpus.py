"""Where text comes from: files, or the Python standard library of this machine."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PYTHON_STDLIB = "python-stdlib"

# Left out of python-stdlib: tests, mapping tables and generated text, which teach no Python.
_NOT_SOURCE = {
    "__pycache__", "__phello__", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "dist-packages", "test", "tests", "turtledemo",
}  # fmt: skip

# A text file is one document, up to this size: what is read at once stays bounded.
_LARGEST_PART = 1 << 20
# A corpus of a few text files is cut into about this many documents, so that a part of it can be
# held out.
_FEWEST_PARTS = 200
_SMALLEST_PART = 1 << 12


class DataError(Exception):
    """The corpus, the tokenizer or the tokenized data can't be used; the message says why."""


@dataclass(frozen=True)
class Document:
    """One text of a corpus.

    Attributes:
        text: never empty.
        complete: False where the file goes on in the next document (it was cut for its size), so
            that no end of text belongs here.
    """

    text: str
    complete: bool = True

    @cached_property
    def hash(self) -> float:
        """A number in [0, 1) that depends on the text only, for choosing documents."""
        digest = hashlib.blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=8)
        return int.from_bytes(digest.digest(), "little") / 2**64


@dataclass(frozen=True)
class Corpus:
    """Documents in an order that depends on the files alone.

    Attributes:
        files: in reading order. ``.jsonl`` gives the field ``text`` of each line, ``.parquet`` its
            column ``text``; any other file is one document, or several if it is very long.
    """

    files: tuple[Path, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def digest(self) -> str:
        """SHA-256 of what the files contain, in their order; not of where they lie."""
        whole = hashlib.sha256()
        for file in self.files:
            with open(file, "rb") as stream:
                content = hashlib.sha256()
                while block := stream.read(1 << 20):
                    content.update(block)
            whole.update(json.dumps([file.name, file.stat().st_size]).encode())
            whole.update(content.digest())
        return whole.hexdigest()

    def documents(self) -> Iterator[Document]:
        """All documents, one file after the other, in bounded memory.

        Raises:
            DataError: a file lacks the text that its kind promises; names file and line.
        """
        texts = [file for file in self.files if file.suffix not in (".jsonl", ".parquet")]
        part = _LARGEST_PART
        if len(texts) == len(self.files) < _FEWEST_PARTS // 2:
            part = min(max(self.size // _FEWEST_PARTS, _SMALLEST_PART), _LARGEST_PART)
        for file in self.files:
            if file.suffix == ".jsonl":
                yield from _read_jsonl(file)
            elif file.suffix == ".parquet":
                yield from _read_parquet(file)
            else:
                yield from _read_text(file, part)


def find_corpus(source: str | None, patterns: Sequence[str]) -> Corpus:
    """The corpus that a recipe names.

    Args:
        source: ``python-stdlib``, or None to use ``patterns``.
        patterns: glob patterns of files, ``**`` included.

    Raises:
        DataError: nothing is named, or no file is there.
    """
    if source == PYTHON_STDLIB:
        return Corpus(tuple(_stdlib_files(Path(sysconfig.get_path("stdlib")))))
    if source is not None:
        raise DataError(f"no corpus is called {source!r}; there is {PYTHON_STDLIB!r}")
    if not patterns:
        raise DataError(f"no data: give files, or the source {PYTHON_STDLIB!r}")
    found: set[str] = set()
    for pattern in patterns:
        matches = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
        if not matches:
            raise DataError(f"no file matches {pattern!r} (looked from {os.getcwd()})")
        found.update(matches)
    return Corpus(tuple(Path(path) for path in sorted(found)))


def _stdlib_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _NOT_SOURCE and not name.startswith("config-")
        )
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder, name)


def _read_text(file: Path, part: int) -> Iterator[Document]:
    """The file, cut at line ends into documents of about ``part`` characters."""
    with open(file, encoding="utf-8", errors="replace") as stream:
        lines = stream.readlines(part)
        while lines:
            following = stream.readlines(part)
            text = "".join(lines)
            # A single line may be as long as the file.
            for start in range(0, len(text), _LARGEST_PART):
                last = start + _LARGEST_PART >= len(text) and not following
                yield Document(text[start : start + _LARGEST_PART], complete=last)
            lines = following


def _read_jsonl(file: Path) -> Iterator[Document]:
    with open(file, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise DataError(f'{file}, line {number}: expected {{"text": "…"}}')
            if text:
                yield Document(text)


def _read_parquet(file: Path) -> Iterator[Document]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(file) as table:
        if "text" not in table.schema_arrow.names:
            raise DataError(f"{file}: no column `text`; there are {table.schema_arrow.names}")
        for batch in table.iter_batches(batch_size=1024, columns=["text"]):
            for text in batch.column(0):
                if text.as_py():
                    yield Document(text.as_py())
